#include "planner/templates.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <optional>
#include <unordered_map>

#include "planner/axis_rules.h"
#include "planner/name_class.h"
#include "tensorbus/base/malformed.h"

namespace tensorbus::planner {
namespace {

using Kind = AxisRule::Kind;

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

/// A mesh with all sizes known. Rank r's coordinate on axis a is r / strides[a] % sizes[a].
struct Grid {
  std::vector<std::string> axes;
  std::vector<std::uint32_t> sizes;
  std::vector<std::uint32_t> strides;
  std::uint32_t ranks = 1;
};

struct Step {
  std::size_t axis = 0;
  AxisRule rule;
};

struct Rule {
  NamePattern classes;
  const Grid* grid = nullptr;
  std::vector<Step> steps;

  bool Uses(Kind kind) const {
    return std::any_of(steps.begin(), steps.end(),
                       [kind](const Step& step) { return step.rule.kind == kind; });
  }
};

Result<Grid> MakeGrid(const LayoutTemplate::Mesh& mesh, const TemplateUse& use) {
  Grid grid;
  std::uint64_t ranks = 1;
  for (const auto& [axis, fixed] : mesh.axes) {
    const auto given = use.size.find(axis);
    const std::uint32_t size = given != use.size.end() ? given->second : fixed;
    if (size == 0) {
      return Malformed(
          fmt::format("layout '{}': size of axis '{}' is not given", use.layout, axis));
    }
    ranks *= size;
    if (ranks > kMaxRanks)
      return Malformed(fmt::format("layout '{}': more than {} ranks", use.layout, kMaxRanks));
    grid.axes.push_back(axis);
    grid.sizes.push_back(size);
  }
  grid.ranks = static_cast<std::uint32_t>(ranks);
  std::uint32_t stride = grid.ranks;
  for (const std::uint32_t size : grid.sizes) grid.strides.push_back(stride /= size);
  return grid;
}

/// Replaces every $word that `use` gives.
Result<std::string> Substitute(std::string text, const TemplateUse& use) {
  for (const auto& [word, value] : use.param) {
    const std::string key = "$" + word;
    for (std::size_t at = text.find(key); at != std::string::npos;
         at = text.find(key, at + value.size())) {
      text.replace(at, key.size(), value);
    }
  }
  if (text.find('$') == std::string::npos) return text;
  return Malformed(fmt::format("layout '{}': '{}' needs a param", use.layout, text));
}

std::uint64_t Number(const Manifest& manifest, const std::string& key) {
  const auto found = manifest.config.find(key);
  return found == manifest.config.end() || found->second < 0
             ? 0
             : static_cast<std::uint64_t>(found->second);
}

/// What the holding of a tensor depends on, besides its shape; kNone where it does not matter.
struct Situation {
  std::uint32_t rule = 0;
  std::uint32_t stage = kNone;
  std::uint32_t expert = kNone;
  QkvRole role = QkvRole::kQuery;
};

class Resolver {
 public:
  Resolver(const LayoutBook& book, const TemplateUse& use, const Manifest& manifest)
      : book_(book), use_(use), manifest_(manifest) {
    model_.head_dim = Number(manifest, "head_dim");
    model_.heads = Number(manifest, "heads");
    model_.kv_heads = Number(manifest, "kv_heads");
    model_.experts = Number(manifest, "experts");
    model_.layers = Number(manifest, "layers");
  }

  Result<JobLayout> Run() {
    TB_RETURN_IF_ERROR(Prepare());
    JobLayout layout;
    layout.rank_count = grids_.begin()->second.ranks;
    for (const TensorSpec& spec : manifest_.tensors) {
      if (drop_ && drop_->Found(spec.name)) continue;
      const auto holding = HoldingOf(spec);
      if (!holding.ok()) {
        return holding.status().Annotate(
            fmt::format("layout '{}': tensor '{}'", use_.layout, spec.name));
      }
      layout.tensors.push_back({spec, *holding});
    }
    layout.holdings = std::move(pool_).Take();
    return layout;
  }

 private:
  Status Prepare() {
    const auto found = book_.layouts.find(use_.layout);
    if (found == book_.layouts.end()) {
      std::vector<std::string> names;
      for (const auto& [name, layout] : book_.layouts) names.push_back(name);
      return {Code::kNotFound,
              fmt::format("no layout '{}'; there are {}", use_.layout, fmt::join(names, ", "))};
    }
    for (const LayoutTemplate::Mesh& mesh : found->second.meshes) {
      TB_ASSIGN_OR_RETURN(grids_[mesh.name], MakeGrid(mesh, use_));
      if (grids_[mesh.name].ranks != grids_.begin()->second.ranks)
        return Malformed(fmt::format("layout '{}': its meshes differ in ranks", use_.layout));
    }
    if (grids_.empty()) return Malformed(fmt::format("layout '{}' has no mesh", use_.layout));
    for (const LayoutTemplate::Rule& rule : found->second.rules) TB_RETURN_IF_ERROR(AddRule(rule));
    for (const auto& [name, expression] : book_.classes) {
      TB_ASSIGN_OR_RETURN(NamePattern pattern, NamePattern::Create(expression));
      all_plain_ = all_plain_ && pattern.plain();
      classes_.emplace_back(name, std::move(pattern));
    }
    if (!use_.drop.empty()) {
      TB_ASSIGN_OR_RETURN(drop_, NamePattern::Create(use_.drop));
    }
    stages_ = use_.pp_layers;
    if (use_.vllm_stages > 0) {
      TB_ASSIGN_OR_RETURN(stages_, VllmStages(model_.layers, use_.vllm_stages));
    }
    return {};
  }

  Status AddRule(const LayoutTemplate::Rule& given) {
    const auto grid = grids_.find(given.mesh);
    if (grid == grids_.end()) {
      return Malformed(fmt::format("layout '{}': no mesh '{}'", use_.layout, given.mesh));
    }
    TB_ASSIGN_OR_RETURN(NamePattern classes, NamePattern::Create("^(?:" + given.classes + ")$"));
    Rule rule{std::move(classes), &grid->second, {}};
    for (const auto& [axis, placement] : given.placements) {
      const auto& axes = rule.grid->axes;
      const auto at = std::find(axes.begin(), axes.end(), axis);
      if (at == axes.end()) {
        return Malformed(
            fmt::format("layout '{}': mesh '{}' has no axis '{}'", use_.layout, given.mesh, axis));
      }
      TB_ASSIGN_OR_RETURN(const std::string text, Substitute(placement, use_));
      auto parsed = ParseAxisRule(text);
      if (!parsed.ok()) return parsed.status().Annotate(fmt::format("layout '{}'", use_.layout));
      if (parsed->kind != Kind::kReplicate)
        rule.steps.push_back({static_cast<std::size_t>(at - axes.begin()), *parsed});
    }
    rules_.push_back(std::move(rule));
    return {};
  }

  /// The class and the rule for it; both depend on the name alone.
  Result<std::pair<std::string_view, std::uint32_t>> Classify(const std::string& name) {
    for (const auto& [class_name, pattern] : classes_) {
      if (!pattern.Found(name)) continue;
      for (std::uint32_t r = 0; r < rules_.size(); ++r) {
        if (rules_[r].classes.Found(class_name)) return std::pair(std::string_view(class_name), r);
      }
      return Malformed(fmt::format("class '{}' has no rule", class_name));
    }
    return Malformed("belongs to no class");
  }

  Result<Situation> SituationOf(const TensorSpec& spec) {
    std::pair<std::string_view, std::uint32_t> found;
    const std::string plain = all_plain_ ? PlainName(spec.name) : spec.name;
    if (const auto known = by_name_.find(plain); known != by_name_.end()) {
      found = known->second;
    } else {
      TB_ASSIGN_OR_RETURN(found, Classify(spec.name));
      by_name_.emplace(plain, found);
    }
    Situation s;
    s.rule = found.second;
    const Rule& rule = rules_[s.rule];
    if (rule.Uses(Kind::kMegatronQkv)) {
      s.role = found.first == "v"   ? QkvRole::kValue
               : found.first == "k" ? QkvRole::kKey
                                    : QkvRole::kQuery;
    }
    if (rule.Uses(Kind::kStage)) {
      TB_ASSIGN_OR_RETURN(s.stage, StageOf(spec.name, found.first, stages_));
    }
    if (rule.Uses(Kind::kNamedExpert)) {
      const auto expert = ExpertOf(spec.name);
      if (!expert || *expert >= model_.experts) {
        return Malformed(
            fmt::format("placement E: no expert number below {} in its name", model_.experts));
      }
      s.expert = static_cast<std::uint32_t>(*expert);
    }
    return s;
  }

  Result<std::uint32_t> HoldingOf(const TensorSpec& spec) {
    TB_ASSIGN_OR_RETURN(const Situation s, SituationOf(spec));
    const Rule& rule = rules_[s.rule];
    const std::vector<std::uint32_t> expert_at = ExpertCoordinates(rule, s.expert);
    std::string key = fmt::format("{} {} {} {} {}", s.rule, s.stage, static_cast<int>(s.role),
                                  fmt::join(spec.shape.dims(), "x"), fmt::join(expert_at, "."));
    if (const auto known = known_.find(key); known != known_.end()) return known->second;
    Holding holding;
    for (std::uint32_t rank = 0; rank < rule.grid->ranks; ++rank) {
      TB_ASSIGN_OR_RETURN(std::vector<Box> boxes, BoxesAt(rule, rank, s, expert_at, spec.shape));
      box_count_ += boxes.size();
      if (box_count_ > kMaxBoxesPerLayout) {
        return Status(Code::kResourceExhausted,
                      fmt::format("more than {} boxes in all", kMaxBoxesPerLayout),
                      Reason::kUnsupported);
      }
      if (!boxes.empty()) holding.ranks.push_back({rank, std::move(boxes)});
    }
    return known_[key] = pool_.Intern(std::move(holding));
  }

  /// By step: the coordinate at which the expert is, for steps that place experts by name.
  std::vector<std::uint32_t> ExpertCoordinates(const Rule& rule, std::uint32_t expert) const {
    std::vector<std::uint32_t> at;
    Range block = {0, model_.experts};
    for (const Step& step : rule.steps) {
      if (step.rule.kind != Kind::kNamedExpert) continue;
      const std::uint64_t size = rule.grid->sizes[step.axis];
      std::uint32_t c = 0;
      Range part = EvenPartOf(block.size(), size, c);
      while (block.lo + part.hi <= expert && c + 1 < size)
        part = EvenPartOf(block.size(), size, ++c);
      at.push_back(c);
      block = {block.lo + part.lo, block.lo + part.hi};
    }
    return at;
  }

  Result<std::vector<Box>> BoxesAt(const Rule& rule, std::uint32_t rank, const Situation& s,
                                   std::span<const std::uint32_t> expert_at,
                                   const Shape& shape) const {
    std::array<IntervalList, kMaxDims> dims;
    for (int d = 0; d < shape.rank(); ++d)
      Append(&dims[static_cast<std::size_t>(d)], {0, shape[d]});
    std::size_t expert_step = 0;
    for (const Step& step : rule.steps) {
      const std::uint32_t size = rule.grid->sizes[step.axis];
      const std::uint32_t coordinate = rank / rule.grid->strides[step.axis] % size;
      const Kind kind = step.rule.kind;
      if (kind == Kind::kStage && coordinate != s.stage) return std::vector<Box>();
      if (kind == Kind::kFirstOnly && coordinate != 0) return std::vector<Box>();
      if (kind == Kind::kNamedExpert && expert_at[expert_step++] != coordinate)
        return std::vector<Box>();
      const bool whole_tensor = kind == Kind::kStage || kind == Kind::kFirstOnly ||
                                kind == Kind::kNamedExpert || step.rule.dim >= shape.rank();
      if (whole_tensor) continue;
      IntervalList& list = dims[static_cast<std::size_t>(step.rule.dim)];
      TB_ASSIGN_OR_RETURN(list, Keep(step.rule, list, size, coordinate, model_, s.role));
    }
    return BoxesOf(std::span(dims).first(static_cast<std::size_t>(shape.rank())));
  }

  const LayoutBook& book_;
  const TemplateUse& use_;
  const Manifest& manifest_;
  ModelNumbers model_;
  std::map<std::string, Grid> grids_;
  std::vector<Rule> rules_;
  std::vector<std::pair<std::string, NamePattern>> classes_;
  std::optional<NamePattern> drop_;
  std::vector<std::uint32_t> stages_;
  bool all_plain_ = true;  // the class of a name does not depend on its layer or expert number
  std::unordered_map<std::string, std::pair<std::string_view, std::uint32_t>> by_name_;
  std::unordered_map<std::string, std::uint32_t> known_;
  HoldingPool pool_;
  std::uint64_t box_count_ = 0;
};

}  // namespace

Result<JobLayout> ResolveTemplate(const LayoutBook& book, const TemplateUse& use,
                                  const Manifest& manifest) {
  return Resolver(book, use, manifest).Run();
}

}  // namespace tensorbus::planner
