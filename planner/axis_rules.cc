#include "planner/axis_rules.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fmt/format.h>

#include "planner/misfit.h"

namespace tensorbus::planner {
namespace {

using Kind = AxisRule::Kind;

struct Spelling {
  std::string_view name;
  Kind kind;
  bool has_dim;
  bool has_number;
};

constexpr std::array<Spelling, 12> kSpellings = {{{"R", Kind::kReplicate, false, false},
                                                  {"S", Kind::kChunk, true, false},
                                                  {"EVEN", Kind::kEven, true, false},
                                                  {"V", Kind::kVocabulary, true, true},
                                                  {"KV", Kind::kHeads, true, false},
                                                  {"G", Kind::kGranular, true, true},
                                                  {"SEG", Kind::kSegments, true, true},
                                                  {"X", Kind::kRowExperts, true, false},
                                                  {"MQKV", Kind::kMegatronQkv, true, false},
                                                  {"E", Kind::kNamedExpert, false, false},
                                                  {"PP", Kind::kStage, false, false},
                                                  {"O", Kind::kFirstOnly, false, false}}};

template <typename Number>
bool ParseWhole(std::string_view text, Number* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

Status CheckDivides(std::uint64_t n, std::uint64_t parts, std::string_view what) {
  if (parts != 0 && n % parts == 0) return {};
  return Misfit(fmt::format("{} {} does not divide by {}", what, n, parts));
}

Result<IntervalList> KeepVocabulary(const AxisRule& rule, const IntervalList& list,
                                    std::uint64_t size, std::uint64_t coordinate) {
  const std::uint64_t n = LengthOf(list);
  const std::uint64_t padded = (n + rule.number - 1) / rule.number * rule.number;
  TB_RETURN_IF_ERROR(CheckDivides(padded, size, "padded size"));
  const std::uint64_t part = padded / size;
  return Slice(list, std::min(n, part * coordinate), std::min(n, part * (coordinate + 1)));
}

Result<IntervalList> KeepHeads(const IntervalList& list, std::uint64_t size,
                               std::uint64_t coordinate, const ModelNumbers& model) {
  TB_RETURN_IF_ERROR(CheckDivides(LengthOf(list), model.head_dim, "size"));
  const std::uint64_t heads = LengthOf(list) / model.head_dim;
  if (heads == 0) return IntervalList();
  if (size >= heads) {
    TB_RETURN_IF_ERROR(CheckDivides(size, heads, "axis size"));
    const std::uint64_t head = coordinate / (size / heads);
    return Slice(list, head * model.head_dim, (head + 1) * model.head_dim);
  }
  TB_RETURN_IF_ERROR(CheckDivides(heads, size, "number of heads"));
  const std::uint64_t rows = heads / size * model.head_dim;
  return Slice(list, rows * coordinate, rows * (coordinate + 1));
}

Result<IntervalList> KeepSegments(const AxisRule& rule, const IntervalList& list,
                                  std::uint64_t size, std::uint64_t coordinate) {
  if (rule.number > kMaxIntervals)
    return Misfit(fmt::format("more than {} segments", kMaxIntervals));
  const std::uint64_t segment = LengthOf(list) / rule.number;
  TB_RETURN_IF_ERROR(CheckDivides(LengthOf(list), rule.number, "size"));
  TB_RETURN_IF_ERROR(CheckDivides(segment, size, "segment size"));
  const std::uint64_t rows = segment / size;
  IntervalList kept;
  for (std::uint64_t s = 0; s < rule.number; ++s) {
    const std::uint64_t lo = s * segment + rows * coordinate;
    for (const Range& range : Slice(list, lo, lo + rows)) Append(&kept, range);
  }
  return kept;
}

/// Megatron packs rows by query group, [q… k v][q… k v]…, and cuts the packed rows evenly; this
/// maps the cut back to rows of q, k or v alone.
Result<IntervalList> KeepMegatronQkv(std::uint64_t size, std::uint64_t coordinate,
                                     const ModelNumbers& model, QkvRole role) {
  if (model.head_dim == 0 || model.kv_heads == 0 || model.heads % model.kv_heads != 0 ||
      model.kv_heads > kMaxIntervals || model.heads > kMaxIntervals) {
    return Misfit("needs head_dim, heads and kv_heads of the model, heads a multiple of kv_heads");
  }
  const std::uint64_t per_group = model.heads / model.kv_heads;
  const std::uint64_t rows = (model.heads + 2 * model.kv_heads) * model.head_dim;
  TB_RETURN_IF_ERROR(CheckDivides(rows, size, "number of packed rows"));
  const Range mine = {rows / size * coordinate, rows / size * (coordinate + 1)};
  IntervalList kept;
  for (std::uint64_t group = 0; group < model.kv_heads; ++group) {
    const std::uint64_t packed = group * (per_group + 2) * model.head_dim;
    std::uint64_t begin = packed;  // of this role's rows among the packed ones
    std::uint64_t heads = per_group;
    if (role != QkvRole::kQuery) {
      begin += (per_group + (role == QkvRole::kValue ? 1 : 0)) * model.head_dim;
      heads = 1;
    }
    const std::uint64_t own = group * heads * model.head_dim;  // in the checkpoint's tensor
    const std::uint64_t lo = std::max(mine.lo, begin);
    const std::uint64_t hi = std::min(mine.hi, begin + heads * model.head_dim);
    if (lo < hi) Append(&kept, {own + (lo - begin), own + (hi - begin)});
  }
  return kept;
}

}  // namespace

Result<AxisRule> ParseAxisRule(std::string_view text) {
  const std::size_t colon = text.find(':');
  const std::string_view head = text.substr(0, colon);
  const std::size_t letters = std::min(head.find_first_of("0123456789"), head.size());
  for (const Spelling& spelling : kSpellings) {
    if (head.substr(0, letters) != spelling.name) continue;
    AxisRule rule{spelling.kind, 0, 0};
    const bool dim_fine = spelling.has_dim ? ParseWhole(head.substr(letters), &rule.dim) &&
                                                 rule.dim >= 0 && rule.dim < kMaxDims
                                           : letters == head.size();
    const bool has_number = colon != std::string_view::npos;
    const bool number_fine = spelling.has_number
                                 ? has_number && ParseWhole(text.substr(colon + 1), &rule.number) &&
                                       rule.number >= 1 && rule.number <= kMaxTensorBytes
                                 : !has_number;
    if (dim_fine && number_fine) return rule;
  }
  return Status(Code::kInvalidArgument,
                fmt::format("unknown placement '{}'; known: R, S<d>, EVEN<d>, V<d>:m, KV<d>, "
                            "G<d>:g, SEG<d>:s, X<d>, E, MQKV<d>, PP, O",
                            text.substr(0, 40)),
                Reason::kMalformed);
}

Result<IntervalList> Keep(const AxisRule& rule, const IntervalList& list, std::uint64_t size,
                          std::uint64_t coordinate, const ModelNumbers& model, QkvRole role) {
  const std::uint64_t n = LengthOf(list);
  switch (rule.kind) {
    case Kind::kChunk: {
      const Range part = ChunkOf(n, size, coordinate);
      return Slice(list, part.lo, part.hi);
    }
    case Kind::kEven: {
      TB_RETURN_IF_ERROR(CheckDivides(n, size, "size"));
      return Slice(list, n / size * coordinate, n / size * (coordinate + 1));
    }
    case Kind::kVocabulary:
      return KeepVocabulary(rule, list, size, coordinate);
    case Kind::kHeads:
      return KeepHeads(list, size, coordinate, model);
    case Kind::kGranular: {
      TB_RETURN_IF_ERROR(CheckDivides(n, rule.number, "size"));
      const Range part = ChunkOf(n / rule.number, size, coordinate);
      return Slice(list, part.lo * rule.number, part.hi * rule.number);
    }
    case Kind::kSegments:
      return KeepSegments(rule, list, size, coordinate);
    case Kind::kRowExperts: {
      const Range part = EvenPartOf(n, size, coordinate);
      return Slice(list, part.lo, part.hi);
    }
    case Kind::kMegatronQkv:
      return KeepMegatronQkv(size, coordinate, model, role);
    case Kind::kReplicate:
    case Kind::kNamedExpert:
    case Kind::kStage:
    case Kind::kFirstOnly:
      break;
  }
  return list;
}

Result<std::vector<std::uint32_t>> VllmStages(std::uint64_t layers, std::uint32_t stages) {
  if (stages == 0 || layers < stages || layers > kMaxTensorBytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("pp_layers: {} layers over {} stages", layers, stages),
                  Reason::kLayoutMismatch);
  }
  std::vector<std::uint32_t> counts(stages, static_cast<std::uint32_t>(layers / stages));
  const auto rest = static_cast<std::uint32_t>(layers % stages);
  for (std::uint32_t i = 0; i < rest; ++i) ++counts[(2 * stages - 2 - i) % stages];
  return counts;
}

}  // namespace tensorbus::planner
