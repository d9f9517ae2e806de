#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "planner/templates.h"
#include "tensorbus/formats/layout_book_file.h"
#include "tensorbus/formats/manifest_file.h"

namespace tensorbus::planner {

/// Both sides of a scenario of share/manifests.
struct ShippedScenario {
  std::string id;
  JobLayout source;
  JobLayout target;
  bool colocated = false;
};

/// The first scenario whose id begins with `prefix`. `folder` has the layout book and manifests.
inline Result<ShippedScenario> LoadScenario(const std::string& folder, std::string_view prefix) {
  TB_ASSIGN_OR_RETURN(const LayoutBook book, formats::ReadLayoutBook(folder + "/layouts.json"));
  const auto found =
      std::find_if(book.scenarios.begin(), book.scenarios.end(),
                   [&](const Scenario& scenario) { return scenario.id.starts_with(prefix); });
  if (found == book.scenarios.end())
    return Status(Code::kNotFound, "no scenario " + std::string(prefix));
  TB_ASSIGN_OR_RETURN(const Manifest manifest,
                      formats::ReadManifest(folder + "/" + found->manifest + ".json.gz"));
  ShippedScenario scenario;
  scenario.id = found->id;
  scenario.colocated = found->colocated;
  TB_ASSIGN_OR_RETURN(scenario.source, ResolveTemplate(book, found->source, manifest));
  TB_ASSIGN_OR_RETURN(scenario.target, ResolveTemplate(book, found->target, manifest));
  return scenario;
}

}  // namespace tensorbus::planner
