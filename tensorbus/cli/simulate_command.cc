#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/simulate_run.h"

namespace tensorbus::cli {

void RegisterSimulate(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand(
      "simulate", "Predict how long a planned transfer takes on a cluster, and what holds it back");
  const auto options = std::make_shared<SimulateOptions>();
  command->footer(
      "Names the transfer as 'plan' does, plans it, and runs the plan in virtual time: routes are\n"
      "flows over the links between the seats of their ranks. What comes out is a prediction from\n"
      "the numbers in the cluster's file (docs/planner.md); nothing is measured.\n"
      "Exit status: 0 predicted, 1 no such plan can be made, 2 bad input or usage.");
  AddTransferOptions(*command, &options->transfer);
  command
      ->add_option("--cluster", options->cluster, "h100-8x400g, gb200-nvl72, tcp-pair, or a file")
      ->capture_default_str();
  command
      ->add_option("--wire", options->wire,
                   "as-is, or fp8-block: linear layers as fp8 with a scale a block of 128 x 128")
      ->capture_default_str();
  command
      ->add_option("--sharing", options->sharing,
                   "How routes share a link: remaining (by what each has left), equal, or rounds "
                   "(a rank sends one and receives one at a time)")
      ->capture_default_str();
  command
      ->add_option(
          "--relays", options->relays,
          "off, on (targets pass on what they received), or auto: on where that is predicted to "
          "take less time")
      ->capture_default_str();
  command->add_option("--html", options->html, "Write a page with the links' use over time");
  command->add_flag("--json", options->json, "Print one JSON object on standard output");
  command->callback(
      [options, exit_code] { *exit_code = RunSimulate(*options, std::cout, std::cerr); });
}

}  // namespace tensorbus::cli
