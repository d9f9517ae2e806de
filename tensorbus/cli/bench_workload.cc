#include "tensorbus/cli/bench_workload.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <span>

#include "tensorbus/cli/bench_pattern.h"
#include "tensorbus/cli/share_folder.h"
#include "tensorbus/cli/transfer.h"
#include "tensorbus/formats/layout_file.h"
#include "tensorbus/formats/manifest_file.h"
#include "tensorbus/types/placement.h"

namespace tensorbus::cli {
namespace {

Status BadChoice(std::string message, Code code = Code::kInvalidArgument) {
  return {code, std::move(message), Reason::kMalformed};
}

constexpr Placement kWhole = {};
constexpr Placement Shard(int dim) {
  return {.kind = Placement::Kind::kShard, .dim = dim};
}

/// One side of a workload under construction: tensors cut over one axis of `ranks` ranks.
class SideBuilder {
 public:
  SideBuilder(std::uint32_t ranks, std::uint32_t scale) : scale_(scale) {
    layout_.rank_count = ranks;
  }

  Status Add(const std::string& name, DType dtype, std::span<const std::uint64_t> dims,
             const Placement& placement) {
    std::vector<std::uint64_t> scaled(dims.begin(), dims.end());
    if (!scaled.empty()) scaled[0] = (scaled[0] + scale_ - 1) / scale_;
    JobLayout::Tensor tensor;
    tensor.spec.name = name;
    tensor.spec.dtype = dtype;
    TB_ASSIGN_OR_RETURN(tensor.spec.shape, Shape::Create(scaled));
    const DeviceMesh mesh = {.axes = {{"ranks", layout_.rank_count}}, .rank_ids = {}};
    const std::array<Placement, 1> placements = {placement};
    TB_ASSIGN_OR_RETURN(Holding holding,
                        Resolve(mesh, placements, tensor.spec.shape, layout_.rank_count));
    tensor.holding = pool_.Intern(std::move(holding));
    layout_.tensors.push_back(std::move(tensor));
    return {};
  }

  JobLayout Take() && {
    layout_.holdings = std::move(pool_).Take();
    return std::move(layout_);
  }

 private:
  std::uint32_t scale_;
  JobLayout layout_;
  HoldingPool pool_;
};

/// Tensors of one shape.
struct Group {
  const char* prefix;
  std::uint32_t count;
  std::array<std::uint64_t, 2> shape;
};

/// A workload of the table that needs no manifest.
struct Plain {
  const char* name;
  std::vector<Group> groups;
  std::uint32_t source_ranks;
  Placement source;
  std::uint32_t target_ranks;
  Placement target;
  std::uint32_t replicas;
};

const std::vector<Plain>& PlainWorkloads() {
  static const std::vector<Plain> kWorkloads = {
      {"large", {{"large", 8, {4096, 2048}}}, 2, Shard(0), 2, Shard(1), 1},
      {"small", {{"small", 1000, {128, 128}}}, 2, Shard(0), 2, Shard(1), 1},
      {"replicas", {{"large", 8, {4096, 2048}}}, 1, Shard(0), 1, kWhole, 2},
      {"uneven",
       {{"large", 8, {4099, 2053}}, {"small", 200, {131, 67}}},
       3,
       Shard(0),
       2,
       Shard(1),
       1},
  };
  return kWorkloads;
}

constexpr const char* kModelWorkload = "qwen3-0.6b";
constexpr std::array<const char*, 5> kNames = {"large", "small", kModelWorkload, "replicas",
                                               "uneven"};

Result<Workload> MakePlain(const Plain& plain, std::uint32_t scale) {
  SideBuilder source(plain.source_ranks, scale);
  SideBuilder target(plain.target_ranks, scale);
  for (const Group& group : plain.groups) {
    for (std::uint32_t i = 0; i < group.count; ++i) {
      const std::string name = fmt::format("{}.{}", group.prefix, i);
      TB_RETURN_IF_ERROR(source.Add(name, DType::kF32, group.shape, plain.source));
      TB_RETURN_IF_ERROR(target.Add(name, DType::kF32, group.shape, plain.target));
    }
  }
  return Workload{.name = plain.name,
                  .source = std::move(source).Take(),
                  .target = std::move(target).Take(),
                  .replicas = plain.replicas};
}

/// How an engine with two tensor-parallel ranks cuts a tensor of a Llama-shaped model.
Placement EnginePlacement(const std::string& name) {
  const auto has = [&name](const char* part) { return name.find(part) != std::string::npos; };
  if (has("o_proj") || has("down_proj")) return Shard(1);
  for (const char* part : {"embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}) {
    if (has(part)) return Shard(0);
  }
  return kWhole;
}

Result<Workload> MakeModel(const std::string& folder, std::uint32_t scale) {
  const std::string path = folder + "/" + kModelWorkload + ".json.gz";
  TB_ASSIGN_OR_RETURN(const Manifest manifest, formats::ReadManifest(path));
  SideBuilder source(2, scale);
  SideBuilder target(2, scale);
  for (const TensorSpec& spec : manifest.tensors) {
    if (spec.name == "lm_head.weight") continue;  // tied to the embedding
    const auto dims = spec.shape.dims();
    TB_RETURN_IF_ERROR(source.Add(spec.name, spec.dtype, dims, Shard(0)));
    TB_RETURN_IF_ERROR(target.Add(spec.name, spec.dtype, dims, EnginePlacement(spec.name)));
  }
  return Workload{.name = kModelWorkload,
                  .source = std::move(source).Take(),
                  .target = std::move(target).Take(),
                  .replicas = 1};
}

Result<std::string> ManifestFolder(const WorkloadChoice& choice) {
  if (!choice.manifests.empty()) return choice.manifests;
  return FindManifests();
}

Result<Workload> MakeNamed(const std::string& name, const WorkloadChoice& choice) {
  for (const Plain& plain : PlainWorkloads()) {
    if (plain.name == name) return MakePlain(plain, choice.scale);
  }
  if (name == kModelWorkload) {
    TB_ASSIGN_OR_RETURN(const std::string folder, ManifestFolder(choice));
    return MakeModel(folder, choice.scale);
  }
  return BadChoice(fmt::format("no workload '{}'; known are {} and all", name, WorkloadNames()));
}

Result<Workload> MakeFromFiles(const WorkloadChoice& choice) {
  Workload workload;
  workload.name = choice.source + " -> " + choice.target;
  TB_ASSIGN_OR_RETURN(workload.source, formats::ReadLayoutFile(choice.source));
  TB_ASSIGN_OR_RETURN(workload.target, formats::ReadLayoutFile(choice.target));
  return workload;
}

/// Leaves out what the target does not take at all, so that only that is asked which can be had.
void DropUnheld(JobLayout& layout) {
  auto& tensors = layout.tensors;
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(),
                               [&layout](const JobLayout::Tensor& tensor) {
                                 return layout.HoldingOf(tensor).ranks.empty();
                               }),
                tensors.end());
}

Result<Workload> MakeFromScenario(const WorkloadChoice& choice) {
  if (choice.scenario == "all") return BadChoice("--scenario all: one at a time is measured");
  TB_ASSIGN_OR_RETURN(const std::string folder, ManifestFolder(choice));
  TransferOptions options;
  options.layouts = folder + "/layouts.json";
  options.scenario = choice.scenario;
  Workload workload;
  TB_RETURN_IF_ERROR(ForEachTransfer(options, [&workload](Transfer transfer) -> Status {
    workload.name = std::move(transfer.scenario);
    workload.source = std::move(transfer.source);
    workload.target = std::move(transfer.target);
    return {};
  }));
  DropUnheld(workload.source);
  DropUnheld(workload.target);
  return workload;
}

Status CheckChoice(const WorkloadChoice& choice) {
  const bool files = !choice.source.empty() || !choice.target.empty();
  const int ways =
      (choice.name.empty() ? 0 : 1) + (files ? 1 : 0) + (choice.scenario.empty() ? 0 : 1);
  if (ways > 1) {
    return BadChoice("one of --workload, --scenario and --source with --target is enough");
  }
  if (files && (choice.source.empty() || choice.target.empty())) {
    return BadChoice("--source and --target belong together");
  }
  if (choice.scale != 1 && (files || !choice.scenario.empty())) {
    return BadChoice("--scale is for the named workloads; a layout is what its file says");
  }
  return {};
}

}  // namespace

std::string WorkloadNames() {
  return fmt::format("{}", fmt::join(kNames, ", "));
}

Result<std::vector<Workload>> ChooseWorkloads(const WorkloadChoice& choice) {
  TB_RETURN_IF_ERROR(CheckChoice(choice));
  std::vector<Workload> chosen;
  if (!choice.source.empty()) {
    TB_ASSIGN_OR_RETURN(Workload workload, MakeFromFiles(choice));
    chosen.push_back(std::move(workload));
  } else if (!choice.scenario.empty()) {
    TB_ASSIGN_OR_RETURN(Workload workload, MakeFromScenario(choice));
    chosen.push_back(std::move(workload));
  } else {
    const std::string name = choice.name.empty() ? kNames.front() : choice.name;
    for (const char* known : kNames) {
      if (name != "all" && name != known) continue;
      TB_ASSIGN_OR_RETURN(Workload workload, MakeNamed(known, choice));
      chosen.push_back(std::move(workload));
    }
    if (chosen.empty()) return MakeNamed(name, choice).status();
  }
  for (Workload& workload : chosen) {
    if (choice.replicas != 0) workload.replicas = choice.replicas;
  }
  return chosen;
}

Result<Workload> TriggerWorkload(const Workload& like) {
  const std::uint64_t sources = like.source.rank_count;
  const std::uint64_t targets = like.target.rank_count;
  const std::array<std::uint64_t, 2> shape = {std::max<std::uint64_t>(sources, 64),
                                              std::max<std::uint64_t>(targets, 64)};
  SideBuilder source(like.source.rank_count, 1);
  SideBuilder target(like.target.rank_count, 1);
  TB_RETURN_IF_ERROR(source.Add("trigger", DType::kF32, shape, Shard(0)));
  TB_RETURN_IF_ERROR(target.Add("trigger", DType::kF32, shape, Shard(1)));
  return Workload{.name = "trigger",
                  .source = std::move(source).Take(),
                  .target = std::move(target).Take(),
                  .replicas = like.replicas};
}

std::uint64_t ArrivingBytes(const Workload& workload) {
  std::uint64_t bytes = 0;
  for (const JobLayout::Tensor& tensor : workload.target.tensors) {
    for (const RankBoxes& held : workload.target.HoldingOf(tensor).ranks) {
      for (const Box& box : held.boxes) bytes += box.volume() * ItemBytes(tensor.spec.dtype);
    }
  }
  return bytes * workload.replicas;
}

std::uint64_t ArenaBytes(const Workload& workload) {
  std::uint64_t bytes = 0;
  for (std::uint32_t r = 0; r < workload.source.rank_count; ++r) {
    bytes += PlaceRank(workload.source, r).bytes;
  }
  for (std::uint32_t r = 0; r < workload.target.rank_count; ++r) {
    bytes += PlaceRank(workload.target, r).bytes * workload.replicas;
  }
  return bytes;
}

}  // namespace tensorbus::cli
