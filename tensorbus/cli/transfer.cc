#include "tensorbus/cli/transfer.h"

#include <algorithm>
#include <fmt/format.h>

#include "planner/template_use.h"
#include "planner/templates.h"
#include "tensorbus/base/malformed.h"
#include "tensorbus/cli/model_source.h"
#include "tensorbus/cli/share_folder.h"
#include "tensorbus/formats/layout_book_file.h"
#include "tensorbus/formats/layout_file.h"
#include "tensorbus/formats/manifest_file.h"
#include "tensorbus/formats/topology_file.h"

namespace tensorbus::cli {
namespace {

Status CheckOptions(const TransferOptions& o) {
  const bool files = !o.source.empty() || !o.target.empty();
  const bool book = !o.scenario.empty();
  const bool model = !o.model.empty() || !o.from.empty() || !o.to.empty();
  if (files + book + model != 1) {
    return Malformed(
        "one of --source with --target, --scenario (with --layouts), and --model with --from and "
        "--to is needed");
  }
  if (files && (o.source.empty() || o.target.empty()))
    return Malformed("--source and --target belong together");
  if (files && !o.layouts.empty()) return Malformed("--layouts belongs to --scenario or --model");
  if (model && (o.model.empty() || o.from.empty() || o.to.empty()))
    return Malformed("--model, --from and --to belong together");
  if (book && o.colocated)
    return Malformed("--colocated: a scenario says itself whether it is, or name a --topology");
  return {};
}

/// Ids that share the most with `wanted`, for an error message.
std::string NearIds(const LayoutBook& book, const std::string& wanted) {
  std::size_t best = 0;
  std::vector<std::string> near;
  for (const Scenario& scenario : book.scenarios) {
    std::size_t common = 0;
    while (common < std::min(wanted.size(), scenario.id.size()) &&
           wanted[common] == scenario.id[common]) {
      ++common;
    }
    if (common > best) near.clear();
    best = std::max(best, common);
    if (common == best) near.push_back(scenario.id);
  }
  return fmt::format("{}", fmt::join(near, ", "));
}

Result<std::vector<const Scenario*>> ChooseScenarios(const LayoutBook& book,
                                                     const std::string& wanted) {
  std::vector<const Scenario*> chosen;
  for (const Scenario& scenario : book.scenarios) {
    if (scenario.id == wanted) return std::vector<const Scenario*>{&scenario};
    const bool prefix = scenario.id.compare(0, wanted.size(), wanted) == 0;
    if (wanted == "all" || prefix) chosen.push_back(&scenario);
  }
  if (wanted == "all" || chosen.size() == 1) return chosen;
  if (chosen.empty()) {
    return Status(Code::kNotFound,
                  fmt::format("no scenario '{}'; near: {}", wanted, NearIds(book, wanted)));
  }
  return Malformed(fmt::format("scenario '{}' is ambiguous: {}", wanted, NearIds(book, wanted)));
}

Result<JobLayout> ResolveSide(const LayoutBook& book, const TemplateUse& use,
                              const Manifest& manifest, const char* side) {
  auto layout = planner::ResolveTemplate(book, use, manifest);
  if (!layout.ok()) return layout.status().Annotate(side);
  const Status status = Validate(*layout);
  if (!status.ok()) return status.Annotate(side);
  return layout;
}

class Reader {
 public:
  Reader(const TransferOptions& options, const std::function<Status(Transfer)>& use)
      : options_(options), use_(use) {}

  Status Run() {
    TB_RETURN_IF_ERROR(CheckOptions(options_));
    if (!options_.topology.empty()) {
      TB_ASSIGN_OR_RETURN(topology_, formats::ReadTopology(options_.topology));
    }
    if (!options_.source.empty()) return RunFiles();
    TB_ASSIGN_OR_RETURN(folder_, Folder());
    const std::string path =
        options_.layouts.empty() ? folder_ + "/layouts.json" : options_.layouts;
    TB_ASSIGN_OR_RETURN(const LayoutBook book, formats::ReadLayoutBook(path));
    if (!options_.model.empty()) return RunModel(book);
    TB_ASSIGN_OR_RETURN(const auto chosen, ChooseScenarios(book, options_.scenario));
    for (const Scenario* scenario : chosen) {
      const Status status = RunScenario(book, *scenario);
      if (!status.ok()) return status.Annotate(scenario->id);
    }
    return {};
  }

 private:
  Result<std::string> Folder() const {
    if (options_.layouts.empty()) return FindManifests();
    const std::size_t slash = options_.layouts.rfind('/');
    return slash == std::string::npos ? "." : options_.layouts.substr(0, slash);
  }

  Transfer Begin() const {
    Transfer transfer;
    transfer.topology = topology_;
    transfer.colocated = options_.colocated;
    return transfer;
  }

  Status RunFiles() {
    Transfer transfer = Begin();
    TB_ASSIGN_OR_RETURN(transfer.source, formats::ReadLayoutFile(options_.source));
    TB_ASSIGN_OR_RETURN(transfer.target, formats::ReadLayoutFile(options_.target));
    return use_(std::move(transfer));
  }

  Status RunModel(const LayoutBook& book) {
    Transfer transfer = Begin();
    transfer.model = options_.model;
    transfer.from = options_.from;
    transfer.to = options_.to;
    TB_ASSIGN_OR_RETURN(const Manifest manifest, LoadModel(options_.model, folder_));
    for (const auto& [flag, said, layout] : {std::tuple{"--from", &options_.from, &transfer.source},
                                             std::tuple{"--to", &options_.to, &transfer.target}}) {
      auto use = planner::ParseTemplateUse(*said, book, manifest);
      if (!use.ok()) return use.status().Annotate(flag);
      TB_ASSIGN_OR_RETURN(*layout, ResolveSide(book, *use, manifest, flag));
    }
    return use_(std::move(transfer));
  }

  Status RunScenario(const LayoutBook& book, const Scenario& scenario) {
    Transfer transfer = Begin();
    transfer.scenario = scenario.id;
    transfer.colocated = scenario.colocated;
    const Manifest* manifest = nullptr;
    TB_ASSIGN_OR_RETURN(manifest, ManifestOf(scenario.manifest));
    TB_ASSIGN_OR_RETURN(transfer.source, ResolveSide(book, scenario.source, *manifest, "source"));
    TB_ASSIGN_OR_RETURN(transfer.target, ResolveSide(book, scenario.target, *manifest, "target"));
    return use_(std::move(transfer));
  }

  Result<const Manifest*> ManifestOf(const std::string& name) {
    if (name.find('/') != std::string::npos)
      return Malformed(fmt::format("manifest '{}': a plain name is needed", name));
    if (manifest_name_ != name) {
      TB_ASSIGN_OR_RETURN(manifest_, formats::ReadManifest(folder_ + "/" + name + ".json.gz"));
      manifest_name_ = name;
    }
    return &manifest_;
  }

  const TransferOptions& options_;
  const std::function<Status(Transfer)>& use_;
  std::string folder_;
  std::optional<planner::Topology> topology_;
  std::string manifest_name_;
  Manifest manifest_;
};

}  // namespace

Status ForEachTransfer(const TransferOptions& options, const std::function<Status(Transfer)>& use) {
  return Reader(options, use).Run();
}

}  // namespace tensorbus::cli
