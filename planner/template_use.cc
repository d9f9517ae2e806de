#include "planner/template_use.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <numeric>
#include <optional>
#include <set>

#include "planner/misfit.h"
#include "planner/near_names.h"
#include "tensorbus/base/malformed.h"

namespace tensorbus::planner {
namespace {

constexpr std::uint64_t kMegatronVocabularyMultiple = 128;

std::string_view Unabbreviated(std::string_view key) {
  if (key == "replicas") return "rep";
  if (key == "replicate") return "dp_replicate";
  if (key == "shard") return "fsdp";
  return key;
}

/// Name and parameters, not yet understood.
struct Spoken {
  std::string_view name;
  std::map<std::string, std::string, std::less<>> values;

  bool Has(std::string_view key) const { return values.find(key) != values.end(); }
};

Result<Spoken> Split(std::string_view text) {
  Spoken spoken;
  const std::size_t colon = text.find(':');
  spoken.name = text.substr(0, colon);
  if (colon == std::string_view::npos) return spoken;
  std::string_view rest = text.substr(colon + 1);
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos || equals == 0 || equals + 1 == item.size()) {
      return Malformed(
          fmt::format("'{}': NAME=VALUE is needed, as in '{}:tp=4,dp=2'", item, spoken.name));
    }
    const std::string_view key = Unabbreviated(item.substr(0, equals));
    if (!spoken.values.emplace(key, item.substr(equals + 1)).second)
      return Malformed(fmt::format("'{}' is given twice", key));
  }
  return spoken;
}

/// The member of a family that has the parameters given.
std::string LayoutNameOf(const Spoken& spoken) {
  const bool tp = spoken.Has("tp");
  const bool dp = spoken.Has("dp");
  const bool ep = spoken.Has("ep");
  if (spoken.name == "vllm") {
    if (spoken.Has("pp")) return "vllm_tp_pp";
    if (dp) return tp ? "vllm_tp_dp_ep" : "vllm_dp_ep";
    return ep ? "vllm_tp_ep" : "vllm_tp";
  }
  if (spoken.name == "fsdp") {
    if (spoken.Has("dp_replicate")) return "hsdp";
    if (ep) return "fsdp_ep";
    if (tp) return "fsdp_tp";
  }
  return std::string(spoken.name);
}

class UseReader {
 public:
  UseReader(const LayoutBook& book, const Manifest& model) : book_(book), model_(model) {}

  Result<TemplateUse> Run(std::string_view text) {
    TB_ASSIGN_OR_RETURN(spoken_, Split(text));
    TB_RETURN_IF_ERROR(Find());
    const auto rest = [&]() -> Status {
      TB_RETURN_IF_ERROR(ReadValues());
      TB_RETURN_IF_ERROR(FillIn());
      return CheckRules();
    };
    const Status status = rest();
    if (!status.ok()) return status.Annotate(use_.layout);
    return std::move(use_);
  }

 private:
  Status Find() {
    use_.layout = LayoutNameOf(spoken_);
    const auto found = book_.layouts.find(use_.layout);
    if (found == book_.layouts.end()) {
      NearNames near(use_.layout);
      std::vector<std::string> names;
      for (const auto& [name, layout] : book_.layouts) {
        near.Consider(name);
        names.push_back(name);
      }
      return Malformed(fmt::format("no layout '{}'{}; there are {}, and vllm for any of vllm_*",
                                   use_.layout, NearNames::Hint(near.Take()),
                                   fmt::join(names, ", ")));
    }
    template_ = &found->second;
    for (const LayoutTemplate::Mesh& mesh : template_->meshes) {
      for (const auto& [axis, fixed] : mesh.axes) axes_.insert(axis);
    }
    for (const LayoutTemplate::Rule& rule : template_->rules) {
      for (const auto& [axis, placement] : rule.placements) {
        const std::size_t dollar = placement.find('$');
        if (dollar != std::string::npos) words_.insert(placement.substr(dollar + 1));
        staged_ = staged_ || placement == "PP";
      }
    }
    return {};
  }

  Status ReadValues() {
    for (const auto& [key, value] : spoken_.values) {
      if (key == "drop") {
        use_.drop = value;
      } else if (key == "layers" && staged_) {
        TB_RETURN_IF_ERROR(ReadLayers(value));
      } else if (words_.find(key) != words_.end()) {
        TB_RETURN_IF_ERROR(Number(key, value, kMaxTensorBytes).status());
        use_.param[key] = value;
      } else if (axes_.find(key) != axes_.end()) {
        TB_ASSIGN_OR_RETURN(const std::uint64_t size, Number(key, value, kMaxRanks));
        use_.size[key] = static_cast<std::uint32_t>(size);
      } else {
        return UnknownKey(key);
      }
    }
    return {};
  }

  static Result<std::uint64_t> Number(std::string_view key, std::string_view text,
                                      std::uint64_t most) {
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && end == text.data() + text.size() && number >= 1 && number <= most)
      return number;
    return Malformed(fmt::format("{}={}: a whole number from 1 to {} is needed", key, text, most));
  }

  Status ReadLayers(std::string_view text) {
    for (std::size_t at = 0; at <= text.size();) {
      const std::size_t plus = std::min(text.find('+', at), text.size());
      TB_ASSIGN_OR_RETURN(const std::uint64_t count,
                          Number("layers", text.substr(at, plus - at), kMaxTensors));
      use_.pp_layers.push_back(static_cast<std::uint32_t>(count));
      if (use_.pp_layers.size() > kMaxRanks) return Malformed("layers: too many stages");
      at = plus + 1;
    }
    return {};
  }

  Status UnknownKey(std::string_view key) const {
    std::vector<std::string> known(axes_.begin(), axes_.end());
    known.insert(known.end(), words_.begin(), words_.end());
    if (staged_) known.emplace_back("layers");
    known.emplace_back("drop");
    NearNames near(key);
    for (const std::string& name : known) near.Consider(name);
    return Malformed(fmt::format("no parameter '{}'{}; it takes {}", key,
                                 NearNames::Hint(near.Take()), fmt::join(known, ", ")));
  }

  /// The size of an axis, 1 where the layout has no such axis or nobody says it.
  std::uint64_t Size(const char* axis) const {
    const auto found = use_.size.find(axis);
    return found == use_.size.end() ? 1 : found->second;
  }
  bool Given(const char* axis) const { return use_.size.find(axis) != use_.size.end(); }
  /// Sets what the others determine, or checks it where it was said.
  Status Settle(const char* axis, std::uint64_t size, std::string_view rule) {
    if (size > kMaxRanks)
      return Misfit(fmt::format("{} = {}: more than {} ranks", rule, size, kMaxRanks));
    if (Given(axis) && Size(axis) != size)
      return Misfit(fmt::format("{}={}: {} = {} is needed", axis, Size(axis), rule, size));
    use_.size[axis] = static_cast<std::uint32_t>(size);
    return {};
  }
  static Status CheckDivides(std::uint64_t whole, std::uint64_t part, std::string_view what,
                             std::string_view by) {
    if (part != 0 && whole % part == 0) return {};
    return Misfit(fmt::format("{}={} does not divide {} = {}", by, part, what, whole));
  }

  Status FillIn() {
    if (use_.layout == "megatron") return FillMegatron();
    if (use_.layout == "fsdp_ep" || use_.layout == "fsdp_ep_shard1") return FillFsdpEp();
    if (use_.layout == "vllm_tp_ep")
      return Settle("ep", Size("tp"), "tp, as experts are spread over the tensor parallel ranks,");
    if (use_.layout == "vllm_dp_ep")
      return Settle("ep", Size("dp"), "dp, as experts are spread over all ranks of the engine,");
    if (use_.layout == "vllm_tp_dp_ep") {
      return Settle("ep", Size("tp") * Size("dp"),
                    "tp * dp, as experts are spread over all ranks of the engine,");
    }
    if (use_.layout == "vllm_tp_pp" && use_.pp_layers.empty())
      use_.vllm_stages = static_cast<std::uint32_t>(Size("pp"));
    return {};
  }

  Status FillMegatron() {
    for (const char* axis : {"pp", "dp", "tp", "ep", "etp"}) {
      if (!Given(axis)) use_.size[axis] = 1;
    }
    const std::uint64_t stage_ranks = Size("dp") * Size("tp");
    const std::uint64_t expert_ranks = Size("ep") * Size("etp");
    if (stage_ranks % expert_ranks != 0) {
      return Misfit(fmt::format("ep * etp = {} does not divide dp * tp = {}, the ranks of a stage",
                                expert_ranks, stage_ranks));
    }
    TB_RETURN_IF_ERROR(Settle("edp", stage_ranks / expert_ranks, "dp * tp / (ep * etp)"));
    if (use_.param.find("vpad") == use_.param.end())
      use_.param["vpad"] = std::to_string(kMegatronVocabularyMultiple * Size("tp"));
    return FillStages();
  }

  /// Layers by stage: evenly, or with embedding and loss counted as a layer each.
  Status FillStages() {
    const std::uint64_t layers = Model("layers");
    const std::uint64_t stages = Size("pp");
    if (!use_.pp_layers.empty()) return {};
    if (layers == 0) return Misfit("the model's number of layers is not known; say layers=N+N+…");
    if (layers % stages == 0) {
      use_.pp_layers.assign(stages, static_cast<std::uint32_t>(layers / stages));
      return {};
    }
    if ((layers + 2) % stages == 0 && (layers + 2) / stages >= 2) {
      use_.pp_layers.assign(stages, static_cast<std::uint32_t>((layers + 2) / stages));
      --use_.pp_layers.front();
      --use_.pp_layers.back();
      return {};
    }
    return Misfit(fmt::format(
        "pp={} does not divide the model's {} layers; say which stage has how many: layers=N+N+…",
        stages, layers));
  }

  Status FillFsdpEp() {
    TB_RETURN_IF_ERROR(CheckDivides(Size("fsdp"), Size("ep"), "fsdp", "ep"));
    TB_RETURN_IF_ERROR(Settle("efsdp", Size("fsdp") / Size("ep"), "fsdp / ep"));
    if (use_.layout == "fsdp_ep" && Size("fsdp") > Model("experts")) {
      if (spoken_.name == "fsdp") {
        use_.layout = "fsdp_ep_shard1";
      } else {
        return Misfit(
            fmt::format("efsdp * ep = {} exceeds the model's {} experts; fsdp_ep_shard1 "
                        "cuts inside experts",
                        Size("fsdp"), Model("experts")));
      }
    }
    return {};
  }

  std::uint64_t Model(const char* number) const {
    const auto found = model_.config.find(number);
    return found == model_.config.end() || found->second < 0
               ? 0
               : static_cast<std::uint64_t>(found->second);
  }

  Status CheckRules() {
    TB_RETURN_IF_ERROR(CheckHeads());
    TB_RETURN_IF_ERROR(CheckExperts());
    return CheckStages();
  }

  /// Trainers and engines give a rank whole heads. Plain tensor parallel FSDP cuts rows.
  Status CheckHeads() const {
    const std::uint64_t heads = Model("heads");
    const std::uint64_t tp = Size("tp");
    if (heads == 0 || use_.layout == "fsdp_tp" || heads % tp == 0) return {};
    return Misfit(
        fmt::format("tp={} does not divide the {} attention heads of {}", tp, heads, model_.model));
  }

  Status CheckExperts() const {
    const bool parallel = axes_.find("ep") != axes_.end() && Size("ep") > 1;
    const std::uint64_t experts = Model("experts");
    if (!parallel) return {};
    if (experts == 0) {
      return Misfit(fmt::format("ep={}: {} has no experts, or their number is not known",
                                Size("ep"), model_.model));
    }
    // vLLM gives the first ranks one expert more; trainers want the same number everywhere.
    const bool trainer = use_.layout.compare(0, 4, "vllm") != 0;
    if (!trainer || experts % Size("ep") == 0) return {};
    return Misfit(fmt::format("ep={} does not divide the {} experts of {}", Size("ep"), experts,
                              model_.model));
  }

  Status CheckStages() const {
    if (use_.pp_layers.empty()) return {};
    if (use_.pp_layers.size() != Size("pp")) {
      return Misfit(
          fmt::format("layers: {} stages are given, pp={}", use_.pp_layers.size(), Size("pp")));
    }
    const std::uint64_t sum =
        std::accumulate(use_.pp_layers.begin(), use_.pp_layers.end(), std::uint64_t{0});
    if (Model("layers") == 0 || sum == Model("layers")) return {};
    return Misfit(fmt::format("layers: the stages have {} layers, {} has {}", sum, model_.model,
                              Model("layers")));
  }

  const LayoutBook& book_;
  const Manifest& model_;
  Spoken spoken_;
  TemplateUse use_;
  const LayoutTemplate* template_ = nullptr;
  std::set<std::string, std::less<>> axes_;
  std::set<std::string, std::less<>> words_;  // that its placements need
  bool staged_ = false;
};

}  // namespace

Result<TemplateUse> ParseTemplateUse(std::string_view text, const LayoutBook& book,
                                     const Manifest& model) {
  auto use = UseReader(book, model).Run(text);
  if (!use.ok()) return use.status().Annotate(fmt::format("'{}'", text.substr(0, 200)));
  return use;
}

}  // namespace tensorbus::planner
