#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/plan_run.h"

namespace tensorbus::cli {

void AddTransferOptions(CLI::App& command, TransferOptions* options) {
  command.add_option("--source", options->source, "Layout file of the job that has the weights");
  command.add_option("--target", options->target, "Layout file of the job that wants them");
  command.add_option(
      "--layouts", options->layouts,
      "Layouts file; manifests (NAME.json.gz) lie beside it; default: the shipped one");
  command.add_option("--scenario", options->scenario,
                     "Scenario of the layouts file: an id, a unique prefix of one, or 'all'");
  command.add_option("--model", options->model,
                     "A manifest's name, a folder of safetensors files, or a config.json");
  command.add_option("--from", options->from,
                     "How the source holds the model: LAYOUT:NAME=VALUE,…");
  command.add_option("--to", options->to, "How the target holds it, in the same form");
  command.add_flag("--colocated", options->colocated,
                   "Source rank i and target rank i are one device");
  command.add_option("--topology", options->topology,
                     "JSON file of nodes and shared devices; default: nodes of eight ranks");
}

void RegisterPlan(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand(
      "plan", "Plan a transfer between two layouts, check the plan and say what it costs");
  const auto options = std::make_shared<PlanOptions>();
  command->footer(
      "Layouts come from two files (--source, --target), from a scenario of a layouts file\n"
      "(--scenario), or from a model and how each side holds it, as in\n"
      "  --model qwen3-235b-a22b --from megatron:tp=4,pp=4,ep=8,dp=8 --to vllm:tp=8,dp=2,ep=16\n"
      "The table goes to standard error, JSON to standard output.\n"
      "Exit status: 0 planned and proven, 1 no such plan can be made, 2 bad input or usage.");
  AddTransferOptions(*command, &options->transfer);
  command->add_option("--ops", options->ops, "Write every copy op to this file, one JSON a line");
  command->add_option("--explain", options->explain, "Say who sends a tensor's parts, and why");
  command
      ->add_option("--relays", options->relays,
                   "Targets pass on what they received; auto: where it unburdens the busiest "
                   "device or port (default: off)")
      ->type_name("off|on|auto");
  command->add_option("--costs", options->costs,
                      "JSON file of transports' costs: say how each would move the routes");
  command->add_flag("--json", options->json, "Print one JSON object on standard output");
  command->add_option("--html", options->html, "Write a page with the routes and the rounds");
  command->callback([options, exit_code] { *exit_code = RunPlan(*options, std::cout, std::cerr); });
}

}  // namespace tensorbus::cli
