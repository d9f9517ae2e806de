#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "tensorbus/base/status.h"
#include "tensorbus/types/intervals.h"

namespace tensorbus::planner {

/// How a class of parameters lies along one axis: the placements of a layouts file, a superset of
/// DTensor's (share/manifests/layouts.md, section 2, defines each).
struct AxisRule {
  enum class Kind : std::uint8_t {
    kReplicate,    ///< R
    kChunk,        ///< S<d>
    kEven,         ///< EVEN<d>
    kVocabulary,   ///< V<d>:m
    kHeads,        ///< KV<d>
    kGranular,     ///< G<d>:g
    kSegments,     ///< SEG<d>:s
    kRowExperts,   ///< X<d>
    kMegatronQkv,  ///< MQKV<d>
    kNamedExpert,  ///< E
    kStage,        ///< PP
    kFirstOnly,    ///< O
  };

  Kind kind = Kind::kReplicate;
  int dim = 0;
  std::uint64_t number = 0;  ///< what follows the colon
};

/// Reads "EVEN1" or "V0:64". Error: kInvalidArgument naming the known ones.
Result<AxisRule> ParseAxisRule(std::string_view text);

/// Which rows of a packed query-key-value tensor a checkpoint tensor is.
enum class QkvRole : std::uint8_t { kQuery, kKey, kValue };

/// The numbers of a model that rules need; 0 where the manifest has none.
struct ModelNumbers {
  std::uint64_t head_dim = 0;
  std::uint64_t heads = 0;
  std::uint64_t kv_heads = 0;
  std::uint64_t experts = 0;
  std::uint64_t layers = 0;
};

/// What `coordinate` of an axis of `size` keeps of a dimension. Not for the kinds that concern
/// whole tensors (kReplicate, kNamedExpert, kStage, kFirstOnly). Error: kInvalidArgument when the
/// rule does not fit the dimension.
Result<IntervalList> Keep(const AxisRule& rule, const IntervalList& list, std::uint64_t size,
                          std::uint64_t coordinate, const ModelNumbers& model, QkvRole role);

/// vLLM's layers per pipeline stage: the remainder goes to the stages before the last, last first.
Result<std::vector<std::uint32_t>> VllmStages(std::uint64_t layers, std::uint32_t stages);

}  // namespace tensorbus::planner
