#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/doctor.h"
#include "tensorbus/cli/local_bus.h"
#include "tensorbus/cli/programs.h"
#include "tensorbus/rpc/address.h"

namespace tensorbus::cli {

namespace {

std::shared_ptr<LocalOptions> AddLocalFlags(CLI::App& command) {
  auto options = std::make_shared<LocalOptions>();
  options->runtime_dir = rpc::DefaultRuntimeDir();
  options->bin_dir = OwnFolder();
  command
      .add_option("--runtime-dir", options->runtime_dir, "Folder of sockets, logs and pid files")
      ->envname("TENSORBUS_RUNTIME_DIR")
      ->capture_default_str();
  AddSeconds(command, "--timeout", &options->timeout_seconds, 0.01, 3600,
             "Until both must answer or end");
  command.add_flag("--json", options->json, "Print one JSON object on standard output");
  return options;
}

}  // namespace

void RegisterUp(CLI::App& app, int* exit_code) {
  auto* command =
      app.add_subcommand("up", "Start daemon and agent for this host in the background");
  const auto options = AddLocalFlags(*command);
  command->add_option("--log-level", options->log_level, "debug, info, warn or error")
      ->envname("TENSORBUS_LOG_LEVEL")
      ->check(CLI::IsMember({"debug", "info", "warn", "error"}))
      ->capture_default_str();
  command
      ->add_option(
          "--agent-arg", options->agent_arguments,
          "Argument to pass on to tensorbus-agent, repeatable: --agent-arg=--staging-mib=64")
      ->take_all();
  command->footer("Running again is fine: what runs already is left alone. `down` stops it.");
  command->callback([options, exit_code] { *exit_code = RunUp(*options, std::cout, std::cerr); });
}

void RegisterDown(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand("down", "Stop the daemon and agent that `up` started");
  const auto options = AddLocalFlags(*command);
  command->callback([options, exit_code] { *exit_code = RunDown(*options, std::cout, std::cerr); });
}

void RegisterDoctor(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand("doctor", "Find what is misconfigured here, and what helps");
  const auto options = std::make_shared<DoctorOptions>();
  options->admin.daemon.target = rpc::DefaultDaemonTarget();
  options->bin_dir = OwnFolder();
  command
      ->add_option("--daemon", options->admin.daemon.target,
                   "Where tensorbusd should listen: unix:PATH or HOST:PORT")
      ->envname("TENSORBUS_DAEMON")
      ->capture_default_str();
  command->add_option("--token-file", options->admin.daemon.token_file, "Shared token for TCP")
      ->envname("TENSORBUS_TOKEN_FILE");
  AddSeconds(*command, "--timeout", &options->admin.timeout_seconds, 0.01, 3600,
             "To wait for the daemon");
  command->add_flag("--measure", options->measure, "Also measure memory speed (about a second)");
  command->add_flag("--json", options->admin.json, "Print one JSON object on standard output");
  command->footer("Exit status: 0 no fault (there may be warnings), 1 a fault, 2 bad usage.");
  command->callback(
      [options, exit_code] { *exit_code = RunDoctor(*options, std::cout, std::cerr); });
}

}  // namespace tensorbus::cli
