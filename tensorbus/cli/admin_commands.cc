#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "tensorbus/cli/admin_run.h"
#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/option_checks.h"
#include "tensorbus/rpc/address.h"

namespace tensorbus::cli {

namespace {

constexpr char kFooter[] =
    "What is for people goes to standard error, JSON to standard output.\n"
    "Exit status: 0 fine, 1 failed or nobody answered in time, 2 bad usage.";

/// The flags every command that asks the daemon has.
void AddAdminFlags(CLI::App& command, const std::shared_ptr<AdminOptions>& options) {
  options->daemon.target = rpc::DefaultDaemonTarget();
  command.footer(kFooter);
  command
      .add_option("--daemon,--socket", options->daemon.target,
                  "Where tensorbusd listens: unix:PATH or HOST:PORT")
      ->envname("TENSORBUS_DAEMON")
      ->transform([](std::string text) {
        return text.starts_with('/') ? "unix:" + text : text;  // a bare path is a socket
      })
      ->check([](const std::string& target) { return rpc::CheckTarget(target).message(); }, "")
      ->capture_default_str();
  command.add_option("--token-file", options->daemon.token_file, "Shared token for TCP")
      ->envname("TENSORBUS_TOKEN_FILE");
  command.add_option("--tls-ca", options->daemon.ca_file, "mTLS: certificate authority (PEM)")
      ->envname("TENSORBUS_TLS_CA");
  command.add_option("--tls-cert", options->daemon.cert_file, "mTLS: our certificate (PEM)")
      ->envname("TENSORBUS_TLS_CERT");
  command.add_option("--tls-key", options->daemon.key_file, "mTLS: our key (PEM)")
      ->envname("TENSORBUS_TLS_KEY");
  AddSeconds(command, "--timeout", &options->timeout_seconds, 0.01, 86400, "To wait for an answer");
  command.add_flag("--json", options->json, "Print one JSON object on standard output");
}

std::shared_ptr<std::string> AddChannel(CLI::App& command) {
  auto channel = std::make_shared<std::string>();
  command.add_option("--channel", *channel, "Channel; not needed while there is only one");
  return channel;
}

}  // namespace

void RegisterStatus(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand("status", "Who is there, what is live where, what runs");
  const auto options = std::make_shared<AdminOptions>();
  const auto watch = std::make_shared<WatchOptions>();
  AddAdminFlags(*command, options);
  command->add_flag("--watch", watch->watch, "Show it again and again, until interrupted");
  AddSeconds(*command, "--interval", &watch->interval_seconds, 0.05, 3600, "Between two updates");
  command->add_option("--updates", watch->updates, "With --watch: stop after this many");
  command->callback([options, watch, exit_code] {
    *exit_code = RunStatus(*options, *watch, std::cout, std::cerr);
  });
}

void RegisterVersions(CLI::App& app, int* exit_code) {
  auto* command =
      app.add_subcommand("versions", "Which versions are kept, and where they are live");
  const auto options = std::make_shared<AdminOptions>();
  AddAdminFlags(*command, options);
  const auto channel = AddChannel(*command);
  command->callback([options, channel, exit_code] {
    *exit_code = RunVersions(*options, *channel, std::cout, std::cerr);
  });
}

void RegisterRollback(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand(
      "rollback", "Make a kept version the one that replicas get, until a newer one is published");
  const auto options = std::make_shared<AdminOptions>();
  const auto version = std::make_shared<std::uint64_t>(0);
  AddAdminFlags(*command, options);
  const auto channel = AddChannel(*command);
  command->add_option("--to", *version, "Version to go back to")->required()->check(IsVersion(1));
  command->callback([options, channel, version, exit_code] {
    *exit_code = RunRollback(*options, *channel, *version, std::cout, std::cerr);
  });
}

void RegisterExplain(CLI::App& app, int* exit_code) {
  auto* command =
      app.add_subcommand("explain", "Who holds which part of a tensor, and who gets it from whom");
  const auto options = std::make_shared<AdminOptions>();
  const auto tensor = std::make_shared<std::string>();
  AddAdminFlags(*command, options);
  const auto channel = AddChannel(*command);
  command->add_option("tensor", *tensor, "Name of the tensor")->required();
  command->callback([options, channel, tensor, exit_code] {
    *exit_code = RunExplain(*options, *channel, *tensor, std::cout, std::cerr);
  });
}

void RegisterWhoIsMissing(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand("who-is-missing", "What waits, for whom, and what helps");
  const auto options = std::make_shared<AdminOptions>();
  AddAdminFlags(*command, options);
  command->callback(
      [options, exit_code] { *exit_code = RunWhoIsMissing(*options, std::cout, std::cerr); });
}

void RegisterVerify(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand(
      "verify", "Compare the digests of everybody who holds a version, part by part");
  const auto options = std::make_shared<AdminOptions>();
  const auto version = std::make_shared<std::uint64_t>(0);
  AddAdminFlags(*command, options);
  const auto channel = AddChannel(*command);
  command->add_option("--version", *version, "Version; default: the newest that is live")
      ->check(IsVersion(0));
  command->callback([options, channel, version, exit_code] {
    *exit_code = RunVerify(*options, *channel, *version, std::cout, std::cerr);
  });
}

void RegisterTrace(CLI::App& app, int* exit_code) {
  auto* command =
      app.add_subcommand("trace", "Write what daemon and agents did last, for Perfetto");
  const auto options = std::make_shared<AdminOptions>();
  const auto path = std::make_shared<std::string>();
  AddAdminFlags(*command, options);
  command->add_option("--out", *path, "File to write")->required();
  command->callback(
      [options, path, exit_code] { *exit_code = RunTrace(*options, *path, std::cout, std::cerr); });
}

}  // namespace tensorbus::cli
