#include "tensorbus/formats/layout_file.h"

#include <fmt/format.h>
#include <unordered_map>
#include <unordered_set>

#include "tensorbus/base/malformed.h"
#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json.h"
#include "tensorbus/formats/json_fields.h"
#include "tensorbus/types/placement.h"

namespace tensorbus::formats {
namespace {

constexpr std::string_view kLayoutFormat = "tensorbus-layout-1";

/// A box, `[[lo, hi], …]`. Its text form appears in no message: it may be long.
Result<Box> ParseBox(const Json& json, const Shape& shape) {
  if (!json.is_array() || json.size() != static_cast<std::size_t>(shape.rank())) {
    return Malformed(
        fmt::format("a list of {} pairs is needed, not {}", shape.rank(), Describe(json)));
  }
  Box box = Box::Whole(shape);
  for (int d = 0; d < shape.rank(); ++d) {
    const Json& pair = json[static_cast<std::size_t>(d)];
    if (!pair.is_array() || pair.size() != 2)
      return Malformed(fmt::format("a pair [lo, hi] is needed, not {}", Describe(pair)));
    TB_ASSIGN_OR_RETURN(box[d].lo, AsUint(pair[0], "lo", kMaxTensorBytes));
    TB_ASSIGN_OR_RETURN(box[d].hi, AsUint(pair[1], "hi", kMaxTensorBytes));
  }
  if (!box.Fits(shape)) {
    return Malformed(fmt::format("{} does not fit shape {}", box.ToString(), shape.ToString()),
                     Reason::kLayoutMismatch);
  }
  return box;
}

/// `boxes`: per rank a list of boxes. Empty ones hold nothing and are left out.
Result<Holding> ParseBoxes(const Json& json, const Shape& shape, std::uint32_t rank_count) {
  TB_RETURN_IF_ERROR(CheckArray(json, "field 'boxes'"));
  if (json.size() != rank_count) {
    return Malformed(
        fmt::format("field 'boxes': {} ranks, the job has {}", json.size(), rank_count));
  }
  Holding holding;
  for (std::uint32_t rank = 0; rank < rank_count; ++rank) {
    RankBoxes held{rank, {}};
    TB_RETURN_IF_ERROR(
        CheckArray(json[rank], "field 'boxes'").Annotate(fmt::format("rank {}", rank)));
    for (std::size_t b = 0; b < json[rank].size(); ++b) {
      auto box = ParseBox(json[rank][b], shape);
      if (!box.ok())
        return box.status().Annotate(fmt::format("rank {}: field 'boxes': box {}", rank, b));
      if (!box->empty()) held.boxes.push_back(*box);
    }
    if (!held.boxes.empty()) holding.ranks.push_back(std::move(held));
  }
  return holding;
}

Result<DeviceMesh> ParseMesh(const Json& entry) {
  DeviceMesh mesh;
  TB_ASSIGN_OR_RETURN(const Json* axes, ArrayField(entry, "mesh"));
  for (const Json& axis : *axes) {
    if (!axis.is_array() || axis.size() != 2) {
      return Malformed(
          fmt::format("field 'mesh': a pair [name, size] is needed, not {}", Describe(axis)));
    }
    TB_ASSIGN_OR_RETURN(std::string name, AsString(axis[0], "field 'mesh': name"));
    TB_ASSIGN_OR_RETURN(const std::uint64_t size, AsUint(axis[1], "field 'mesh': size", kMaxRanks));
    mesh.axes.push_back({std::move(name), static_cast<std::uint32_t>(size)});
  }
  if (!entry.contains("rank_ids")) return mesh;
  TB_ASSIGN_OR_RETURN(const Json* ids, ArrayField(entry, "rank_ids"));
  if (ids->empty()) return Malformed("field 'rank_ids': an empty list");
  for (const Json& id : *ids) {
    TB_ASSIGN_OR_RETURN(const std::uint64_t rank, AsUint(id, "field 'rank_ids'", kMaxRanks));
    mesh.rank_ids.push_back(static_cast<std::uint32_t>(rank));
  }
  return mesh;
}

Result<Holding> ParseMeshHolding(const Json& entry, const Shape& shape, std::uint32_t rank_count) {
  TB_ASSIGN_OR_RETURN(const DeviceMesh mesh, ParseMesh(entry));
  TB_ASSIGN_OR_RETURN(const Json* list, ArrayField(entry, "placements"));
  std::vector<Placement> placements;
  for (const Json& item : *list) {
    TB_ASSIGN_OR_RETURN(const std::string text, AsString(item, "field 'placements'"));
    auto placement = ParsePlacement(text);
    if (!placement.ok()) return placement.status().Annotate("field 'placements'");
    placements.push_back(*placement);
  }
  auto holding = Resolve(mesh, placements, shape, rank_count);
  if (!holding.ok()) return holding.status().Annotate("field 'mesh' or 'placements'");
  return holding;
}

/// Reads tensors one by one; tensors placed alike are resolved once.
class Reader {
 public:
  explicit Reader(std::uint32_t rank_count) { layout_.rank_count = rank_count; }

  Status Add(const Json& entry) {
    TB_ASSIGN_OR_RETURN(TensorSpec spec, ParseTensorSpec(entry));
    const auto holding = HoldingOf(entry, spec.shape);
    if (!holding.ok()) return holding.status().Annotate(QuotedTensor(spec.name));
    layout_.tensors.push_back({std::move(spec), *holding});
    return {};
  }

  Result<JobLayout> Finish() && {
    layout_.holdings = std::move(pool_).Take();
    TB_RETURN_IF_ERROR(Validate(layout_));
    return std::move(layout_);
  }

 private:
  Result<std::uint32_t> HoldingOf(const Json& entry, const Shape& shape) {
    const bool has_mesh = entry.contains("mesh") || entry.contains("placements");
    if (entry.contains("boxes")) {
      if (has_mesh) return Malformed("fields 'boxes' and 'mesh' exclude each other");
      TB_ASSIGN_OR_RETURN(Holding holding, ParseBoxes(entry["boxes"], shape, layout_.rank_count));
      TB_RETURN_IF_ERROR(Count(holding));
      return pool_.Intern(std::move(holding));
    }
    if (!has_mesh) return Malformed("needs 'mesh' and 'placements', or 'boxes'");
    const Json ids = entry.contains("rank_ids") ? entry["rank_ids"] : Json();
    const std::string key =
        Json{entry.value("mesh", Json()), entry.value("placements", Json()), ids}.dump(
            -1, ' ', false, Json::error_handler_t::replace) +
        shape.ToString();
    if (const auto known = known_.find(key); known != known_.end()) return known->second;
    TB_ASSIGN_OR_RETURN(Holding holding, ParseMeshHolding(entry, shape, layout_.rank_count));
    TB_RETURN_IF_ERROR(Count(holding));
    return known_[key] = pool_.Intern(std::move(holding));
  }

  /// Tensors of one class are counted once, explicit boxes each time.
  Status Count(const Holding& holding) {
    for (const RankBoxes& held : holding.ranks) box_count_ += held.boxes.size();
    if (box_count_ <= kMaxBoxesPerLayout) return {};
    return {Code::kResourceExhausted, fmt::format("more than {} boxes in all", kMaxBoxesPerLayout),
            Reason::kUnsupported};
  }

  JobLayout layout_;
  std::uint64_t box_count_ = 0;
  HoldingPool pool_;
  std::unordered_map<std::string, std::uint32_t> known_;
};

Json BoxToJson(const Box& box) {
  Json json = Json::array();
  for (const Range& range : box.ranges()) json.push_back({range.lo, range.hi});
  return json;
}

}  // namespace

Result<JobLayout> ParseLayoutFile(std::string_view text) {
  TB_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  TB_RETURN_IF_ERROR(CheckObject(json, "a layout file"));
  TB_ASSIGN_OR_RETURN(const std::string format, StringField(json, "format"));
  if (format != kLayoutFormat)
    return Malformed(fmt::format("field 'format': '{}', not '{}'", format, kLayoutFormat));
  TB_ASSIGN_OR_RETURN(const std::uint64_t ranks, UintField(json, "ranks", kMaxRanks));
  if (ranks == 0) return Malformed("field 'ranks': a job has at least one rank");
  TB_ASSIGN_OR_RETURN(const Json* tensors, ArrayField(json, "tensors"));
  Reader reader(static_cast<std::uint32_t>(ranks));
  for (std::size_t i = 0; i < tensors->size(); ++i) {
    const Status status = reader.Add((*tensors)[i]);
    if (!status.ok()) return status.Annotate(fmt::format("tensors[{}]", i));
  }
  return std::move(reader).Finish();
}

Result<JobLayout> ReadLayoutFile(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  auto layout = ParseLayoutFile(text);
  if (!layout.ok()) return layout.status().Annotate(path);
  return layout;
}

std::string WriteLayoutFile(const JobLayout& layout) {
  Json tensors = Json::array();
  for (const JobLayout::Tensor& tensor : layout.tensors) {
    Json boxes(layout.rank_count, Json::array());
    for (const RankBoxes& held : layout.HoldingOf(tensor).ranks) {
      for (const Box& box : held.boxes) boxes[held.rank].push_back(BoxToJson(box));
    }
    tensors.push_back({{"name", tensor.spec.name},
                       {"dtype", DTypeName(tensor.spec.dtype)},
                       {"shape", tensor.spec.shape.dims()},
                       {"boxes", std::move(boxes)}});
  }
  return Json{
      {"format", kLayoutFormat}, {"ranks", layout.rank_count}, {"tensors", std::move(tensors)}}
      .dump();
}

}  // namespace tensorbus::formats
