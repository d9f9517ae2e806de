#include "planner/views.h"

#include <algorithm>
#include <fmt/format.h>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "planner/buffer_view.h"
#include "planner/near_names.h"
#include "tensorbus/base/malformed.h"

namespace tensorbus::planner {
namespace {

class ViewResolver {
 public:
  ViewResolver(std::span<const TensorSpec> manifest, const ViewFile& file) : file_(file) {
    out_.tensors.assign(manifest.begin(), manifest.end());
  }

  Result<Registration> Run(std::span<const std::uint64_t> segment_bytes) {
    out_.segment_bytes.assign(segment_bytes.begin(), segment_bytes.end());
    TB_RETURN_IF_ERROR(IndexNames());
    mapped_.resize(out_.tensors.size());
    for (const ViewSpec& view : file_.views) {
      const Status status = AddView(view);
      if (!status.ok()) return status.Annotate(fmt::format("view of buffer '{}'", view.buffer));
    }
    TB_RETURN_IF_ERROR(CheckComplete());
    TB_RETURN_IF_ERROR(Validate(out_, 0, false));
    return std::move(out_);
  }

 private:
  Status IndexNames() {
    for (std::uint32_t t = 0; t < out_.tensors.size(); ++t) {
      if (!tensors_.emplace(out_.tensors[t].name, t).second)
        return Malformed(fmt::format("tensor '{}' appears twice", out_.tensors[t].name),
                         Reason::kMalformed);
    }
    for (const BufferSpec& buffer : file_.buffers) {
      if (!buffers_.emplace(buffer.name, &buffer).second)
        return Malformed(fmt::format("buffer '{}' appears twice", buffer.name), Reason::kMalformed);
    }
    return {};
  }

  template <typename Map>
  static Status Unknown(std::string_view kind, const std::string& name, const Map& known) {
    NearNames near(name);
    for (const auto& [other, value] : known) near.Consider(other);  // sorted before use
    return Malformed(fmt::format("no {} '{}'{}", kind, name, NearNames::Hint(near.Take())),
                     Reason::kUnknownTensor);
  }

  Status AddView(const ViewSpec& spec) {
    const auto found = buffers_.find(spec.buffer);
    if (found == buffers_.end()) return Unknown("buffer", spec.buffer, buffers_);
    BufferView view = BufferView::Whole(*found->second);
    for (const ViewStep& step : spec.steps) {
      TB_ASSIGN_OR_RETURN(view, view.Apply(step));
    }
    switch (spec.fill) {
      case ViewSpec::Fill::kOne:
        if (spec.parts.size() != 1)
          return Malformed(fmt::format("one part is needed, not {}", spec.parts.size()),
                           Reason::kMalformed);
        return AddPart(spec, *found->second, spec.parts[0], view);
      case ViewSpec::Fill::kConcatenate:
        return AddConcatenated(spec, *found->second, view);
      case ViewSpec::Fill::kInterleave:
        return AddInterleaved(spec, *found->second, view);
      case ViewSpec::Fill::kSegments:
        break;
    }
    return AddSegments(spec, *found->second, view);
  }

  Status AddConcatenated(const ViewSpec& spec, const BufferSpec& buffer, const BufferView& view) {
    std::uint64_t at = 0;
    for (const PartSpec& part : spec.parts) {
      TB_ASSIGN_OR_RETURN(const Box box, BoxOf(part));
      if (spec.dim < 0 || spec.dim >= box.rank())
        return Malformed(fmt::format("concatenate: dimension {}", spec.dim),
                         Reason::kLayoutMismatch);
      TB_ASSIGN_OR_RETURN(const BufferView here, view.Narrow(spec.dim, at, box[spec.dim].size()));
      TB_RETURN_IF_ERROR(AddPart(spec, buffer, part, here));
      at += box[spec.dim].size();
    }
    return CheckFilled(view, spec, at);
  }

  /// [n] becomes [n / (parts · block), parts, block]; part i is index i of the middle dimension.
  Status AddInterleaved(const ViewSpec& spec, const BufferSpec& buffer, const BufferView& view) {
    TB_RETURN_IF_ERROR(CheckDim(view, spec));
    const std::uint64_t count = spec.parts.size();
    const std::uint64_t n = view.extent(spec.dim);
    const bool fits = count != 0 && spec.block != 0 && spec.block <= n && count <= n / spec.block &&
                      n % (count * spec.block) == 0;
    if (!fits) {
      return Malformed(
          fmt::format("interleave: {} parts in turns of {} do not fill {}", count, spec.block, n),
          Reason::kLayoutMismatch);
    }
    TB_ASSIGN_OR_RETURN(const BufferView turns,
                        view.Split(spec.dim, {n / (count * spec.block), count, spec.block}));
    for (std::uint64_t i = 0; i < count; ++i) {
      TB_ASSIGN_OR_RETURN(const BufferView here, turns.Select(spec.dim + 1, i));
      TB_RETURN_IF_ERROR(AddPart(spec, buffer, spec.parts[i], here));
    }
    return {};
  }

  /// [n] becomes [groups, rows of a group]; each part takes its rows of every group.
  Status AddSegments(const ViewSpec& spec, const BufferSpec& buffer, const BufferView& view) {
    TB_RETURN_IF_ERROR(CheckDim(view, spec));
    const std::uint64_t n = view.extent(spec.dim);
    std::uint64_t group = 0;
    for (const PartSpec& part : spec.parts) {
      if (part.rows == 0 || part.rows > n - std::min(n, group))
        return Malformed(
            fmt::format("segments: 'rows' of tensor '{}' is {}", part.tensor, part.rows),
            Reason::kLayoutMismatch);
      group += part.rows;
    }
    if (group == 0 || n % group != 0)
      return Malformed(fmt::format("segments: groups of {} do not fill {}", group, n),
                       Reason::kLayoutMismatch);
    TB_ASSIGN_OR_RETURN(const BufferView groups, view.Split(spec.dim, {n / group, group}));
    std::uint64_t at = 0;
    for (const PartSpec& part : spec.parts) {
      TB_ASSIGN_OR_RETURN(const BufferView here, groups.Narrow(spec.dim + 1, at, part.rows));
      TB_RETURN_IF_ERROR(AddPart(spec, buffer, part, here));
      at += part.rows;
    }
    return {};
  }

  static Status CheckDim(const BufferView& view, const ViewSpec& spec) {
    if (spec.dim >= 0 && spec.dim < view.rank()) return {};
    return Malformed(fmt::format("dimension {} of a view of {}", spec.dim, view.rank()),
                     Reason::kLayoutMismatch);
  }

  static Status CheckFilled(const BufferView& view, const ViewSpec& spec, std::uint64_t used) {
    TB_RETURN_IF_ERROR(CheckDim(view, spec));
    if (view.extent(spec.dim) == used) return {};
    return Malformed(fmt::format("concatenate: parts fill {} of {}", used, view.extent(spec.dim)),
                     Reason::kLayoutMismatch);
  }

  Result<Box> BoxOf(const PartSpec& part) const {
    const auto found = tensors_.find(part.tensor);
    if (found == tensors_.end()) return Unknown("tensor", part.tensor, tensors_);
    const Shape& shape = out_.tensors[found->second].shape;
    if (part.whole) return Box::Whole(shape);
    const bool fits = part.box.size() == static_cast<std::size_t>(shape.rank());
    if (fits && Box(part.box).Fits(shape)) return Box(part.box);
    return Malformed(
        fmt::format("tensor '{}': box does not fit shape {}", part.tensor, shape.ToString()),
        Reason::kLayoutMismatch);
  }

  Status AddPart(const ViewSpec& spec, const BufferSpec& buffer, const PartSpec& part,
                 const BufferView& view) {
    TB_ASSIGN_OR_RETURN(const Box box, BoxOf(part));
    const std::uint32_t tensor = tensors_.find(part.tensor)->second;
    if (buffer.dtype != out_.tensors[tensor].dtype) {
      return Malformed(fmt::format("tensor '{}' is {}, the buffer {}", part.tensor,
                                   DTypeName(out_.tensors[tensor].dtype), DTypeName(buffer.dtype)),
                       Reason::kDtypeMismatch);
    }
    auto pieces = view.Attach(tensor, box);
    if (!pieces.ok()) return pieces.status().Annotate(fmt::format("tensor '{}'", part.tensor));
    for (const Mapped& other : mapped_[tensor]) {
      if (spec.alias || !Intersect(other.box, box)) continue;
      return Malformed(
          fmt::format("tensor '{}': box {} is mapped twice; buffer '{}' maps {} already "
                      "(say 'alias' if both are wanted)",
                      part.tensor, box.ToString(), other.buffer->name, other.box.ToString()),
          Reason::kOverlap);
    }
    mapped_[tensor].push_back({box, &buffer});
    out_.pieces.insert(out_.pieces.end(), pieces->begin(), pieces->end());
    return {};
  }

  Status CheckComplete() const {
    const std::unordered_set<std::string_view> left(file_.left_out.begin(), file_.left_out.end());
    for (std::uint32_t t = 0; t < out_.tensors.size(); ++t) {
      if (!mapped_[t].empty() || left.contains(out_.tensors[t].name)) continue;
      NearNames near(out_.tensors[t].name);
      for (const BufferSpec& buffer : file_.buffers) near.Consider(buffer.name);
      return Malformed(fmt::format("tensor '{}' is mapped by no view and not left out{}",
                                   out_.tensors[t].name, NearNames::Hint(near.Take())),
                       Reason::kUnknownTensor);
    }
    return {};
  }

  struct Mapped {
    Box box;
    const BufferSpec* buffer;
  };

  const ViewFile& file_;
  Registration out_;
  std::unordered_map<std::string_view, std::uint32_t> tensors_;
  std::unordered_map<std::string_view, const BufferSpec*> buffers_;
  std::vector<std::vector<Mapped>> mapped_;  // by tensor
};

}  // namespace

Result<Registration> ResolveViews(std::span<const TensorSpec> manifest, const ViewFile& views,
                                  std::span<const std::uint64_t> segment_bytes) {
  return ViewResolver(manifest, views).Run(segment_bytes);
}

}  // namespace tensorbus::planner
