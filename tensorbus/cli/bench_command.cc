#include <algorithm>
#include <chrono>
#include <fmt/format.h>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "tensorbus/cli/bench_peers.h"
#include "tensorbus/cli/bench_run.h"
#include "tensorbus/cli/bench_worker.h"
#include "tensorbus/cli/commands.h"

namespace tensorbus::cli {
namespace {

/// "a, b, c" as help and completion show a choice.
std::string Choices(std::string names) {
  std::replace(names.begin(), names.end(), ',', '|');
  std::erase(names, ' ');
  return names;
}

void AddM2n(CLI::App& bench, int* exit_code) {
  auto* command = bench.add_subcommand(
      "m2n", "Refresh a workload from M source to N target ranks, again and again, and measure");
  const auto options = std::make_shared<BenchOptions>();
  const auto timeout_s = std::make_shared<double>(60);
  command->footer(
      "Starts a daemon, agents and worker processes of its own on this host and ends them again.\n"
      "Every tensor is rewritten before every refresh and every element compared after it. The\n"
      "table goes to standard error, JSON to standard output.\n"
      "Exit status: 0 measured and verified, 1 failed, 2 bad usage.");
  WorkloadChoice& workload = options->workload;
  command->add_option("--workload", workload.name, "One of these, or all of them (default: large)")
      ->type_name(Choices(WorkloadNames() + ", all"));
  command->add_option("--source", workload.source, "Layout file of the job that has the weights");
  command->add_option("--target", workload.target, "Layout file of the job that wants them");
  command->add_option("--scenario", workload.scenario,
                      "Scenario of layouts.json in the folder of manifests, or a prefix of its id");
  command
      ->add_option("--manifests", workload.manifests,
                   "Folder of model manifests (default: the one that comes with the program)")
      ->envname("TENSORBUS_MANIFESTS");
  command->add_option("--replicas", workload.replicas, "Replicas of the target")
      ->check(CLI::Range(1U, 64U));
  command
      ->add_option("--scale", workload.scale,
                   "Divides the first dimension of every tensor, for a quick run")
      ->check(CLI::Range(1U, 1U << 20));
  BusSettings& bus = options->bus;
  command->add_option("--transport", bus.transport, "How bytes go from agent to agent")
      ->type_name("shm|tcp")
      ->capture_default_str();
  command->add_option("--memory", bus.memory, "Where tensors live, and how the agent gets there")
      ->type_name("mapped|cma|bucket")
      ->capture_default_str();
  command->add_option("--proof", bus.proof, "What a refresh proves (docs/integrity.md)")
      ->type_name("readback|stream|memory|off")
      ->capture_default_str();
  command->add_option("--flip", bus.flip, "Into the live weights, or beside them")
      ->type_name("in_place|shadow")
      ->capture_default_str();
  command->add_option("--iterations", options->iterations, "Refreshes measured after the first")
      ->check(CLI::Range(1U, 100000U))
      ->capture_default_str();
  command
      ->add_option("--peers", options->peers,
                   "Other ways to move the same bytes, measured alternating with ours")
      ->type_name(Choices(fmt::format("{}, all", fmt::join(PeerTeam::Known(), ", "))))
      ->delimiter(',');
  command
      ->add_option("--fault", options->fault,
                   "Let the second refresh go wrong, which must end the run with status 1")
      ->type_name(Choices(InjectionNames()));
  command
      ->add_option("--agent-flag", bus.agent_flags,
                   "Passed on to the agents, repeatable: --agent-flag=--copy-threads=1")
      ->allow_extra_args(false);
  AddSeconds(*command, "--timeout", timeout_s.get(), 0.1, 86400, "That any one step may take");
  command->add_flag("--json", options->json, "Print one JSON object on standard output");
  command->add_option("--html", options->html, "Write a page with a chart to this file");
  command->add_option("--log-dir", options->log_dir, "Keep the logs of all processes here");
  command->callback([options, timeout_s, exit_code] {
    options->bus.timeout =
        std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(*timeout_s));
    *exit_code = RunBench(*options, std::cout, std::cerr);
  });
}

}  // namespace

void RegisterBench(CLI::App& app, int* exit_code) {
  auto* bench = app.add_subcommand("bench", "Measure this machine and the bus on it");
  bench->require_subcommand(1);
  AddM2n(*bench, exit_code);
}

void RegisterBenchWorker(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand("bench-worker", "One rank of a benchmark; bench starts it");
  command->group("");  // not in the help
  const auto options = std::make_shared<BenchWorkerOptions>();
  command
      ->add_option_function<std::string>(
          "--role", [options](const std::string& role) { options->source = role == "source"; })
      ->check(CLI::IsMember({"source", "target"}))
      ->required();
  command->add_option("--fd", options->fd)->required();
  command->add_option("--layout", options->layout)->required();
  command->add_option("--agent-socket", options->agent_socket)->required();
  command->add_option("--channel", options->channel)->required();
  command->add_option("--rank", options->rank)->required();
  command->add_option("--replica", options->replica);
  command->add_option("--replicas", options->replicas);
  command->add_option("--flip", options->flip);
  command->add_option("--proof", options->proof);
  command->add_option("--memory", options->memory);
  command->add_option("--leave-out", options->leave_out)->allow_extra_args(false);
  command->add_option("--timeout", options->timeout_seconds);
  command->callback([options, exit_code] { *exit_code = RunBenchWorker(*options); });
}

}  // namespace tensorbus::cli
