#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/plan_run.h"

namespace tensorbus::cli {

void RegisterPlan(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand(
      "plan", "Plan a transfer between two layouts, check the plan and say what it costs");
  const auto options = std::make_shared<PlanOptions>();
  command->footer(
      "Layouts come from two files (--source, --target) or from a scenario of a layouts file\n"
      "(--layouts, --scenario). The table goes to standard error, JSON to standard output.\n"
      "Exit status: 0 planned and proven, 1 no such plan can be made, 2 bad input or usage.");
  command->add_option("--source", options->source, "Layout file of the job that has the weights");
  command->add_option("--target", options->target, "Layout file of the job that wants them");
  command->add_option("--layouts", options->layouts,
                      "Layouts file; manifests (NAME.json.gz) lie beside it");
  command->add_option("--scenario", options->scenario,
                      "Scenario of the layouts file: an id, a unique prefix of one, or 'all'");
  command->add_option("--topology", options->topology,
                      "JSON file of nodes and shared devices; default: nodes of eight ranks");
  command->add_option("--ops", options->ops, "Write every copy op to this file, one JSON a line");
  command->add_option("--explain", options->explain, "Say where a tensor's parts come from");
  command->add_option("--relays", options->relays,
                      "off, on, or auto: on where it unburdens the busiest device or port");
  command->add_option("--costs", options->costs,
                      "JSON file of transports' costs: say how each would move the routes");
  command->add_flag("--json", options->json, "Print one JSON object on standard output");
  const auto later = [command](const char* flag) {
    command->add_option_function<std::string>(
        flag,
        [flag](const std::string&) { throw CLI::ValidationError(flag, "is not supported yet"); },
        "Not supported yet");
  };
  for (const char* flag : {"--model", "--from", "--to", "--html"}) later(flag);
  command->callback([options, exit_code] { *exit_code = RunPlan(*options, std::cout, std::cerr); });
}

}  // namespace tensorbus::cli
