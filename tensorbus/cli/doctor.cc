#include "tensorbus/cli/doctor.h"

#include <cstdlib>
#include <fmt/format.h>
#include <ostream>
#include <sys/stat.h>
#include <unistd.h>

#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/ordered_json.h"
#include "tensorbus/cli/table.h"
#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/admin_client.h"

namespace tensorbus::cli {

namespace {

using Level = Finding::Level;

Finding CheckRuntimeDir() {
  const std::string dir = rpc::DefaultRuntimeDir();
  struct stat info = {};
  if (::lstat(dir.c_str(), &info) != 0) {
    return {"runtime_folder", Level::kFine, dir + " (made when needed)", ""};
  }
  const Status status = rpc::EnsurePrivateDir(dir);
  if (!status.ok()) return {"runtime_folder", Level::kFault, dir, status.message()};
  return {"runtime_folder", Level::kFine, dir, ""};
}

Finding CheckProgram(const std::string& dir, const std::string& program) {
  const std::string path = dir + "/" + program;
  if (::access(path.c_str(), X_OK) == 0) return {program, Level::kFine, path, ""};
  return {program, Level::kFault, path + " is not there",
          "install it beside tensorbusctl; `up` starts it from there"};
}

Finding CheckAgentSocket() {
  const char* named = std::getenv("TENSORBUS_AGENT_SOCKET");  // NOLINT(concurrency-mt-unsafe)
  const std::string path =
      named != nullptr && *named != 0 ? named : rpc::DefaultRuntimeDir() + "/agent.sock";
  const Status status = rpc::ProbeSocket(path);
  if (status.ok()) return {"agent_socket", Level::kFine, path + " answers", ""};
  return {"agent_socket", Level::kWarning, fmt::format("{}: {}", path, status.message()),
          status.reason() == Reason::kNotRunning ? "tensorbusctl up" : "run as the agent's user"};
}

std::string_view LevelName(Level level) {
  return level == Level::kFine ? "fine" : level == Level::kWarning ? "warning" : "fault";
}

}  // namespace

std::vector<Finding> CheckBus(const DoctorOptions& options) {
  std::vector<Finding> out = {CheckRuntimeDir(), CheckProgram(options.bin_dir, "tensorbusd"),
                              CheckProgram(options.bin_dir, "tensorbus-agent")};
  const auto timeout = std::chrono::duration_cast<Nanos>(
      std::chrono::duration<double>(options.admin.timeout_seconds));
  auto client = rpc::AdminClient::Create(options.admin.daemon, timeout);
  if (!client.ok()) {
    out.push_back({"daemon", Level::kFault, "the flags do not fit", client.status().message()});
    return out;
  }
  const Result<proto::StatusReply> status = (*client)->GetStatus({});
  if (!status.ok()) {
    const bool absent = status.status().reason() == Reason::kNotRunning;
    out.push_back({"daemon", absent ? Level::kWarning : Level::kFault,
                   absent ? "not running" : "does not answer", status.status().message()});
    return out;
  }
  out.push_back({"daemon", Level::kFine,
                 fmt::format("up {}, {}", HumanSeconds(status->uptime_seconds()),
                             Count(static_cast<std::uint64_t>(status->channels_size()), "channel")),
                 ""});
  out.push_back({"agents", status->agents_size() > 0 ? Level::kFine : Level::kWarning,
                 fmt::format("{} attached", status->agents_size()),
                 status->agents_size() > 0 ? "" : "start one: tensorbusctl up"});
  out.push_back(CheckAgentSocket());
  return out;
}

int RunDoctor(const DoctorOptions& options, std::ostream& out, std::ostream& err) {
  std::vector<Finding> findings = CheckMachine();
  for (Finding& finding : CheckBus(options)) findings.push_back(std::move(finding));
  if (options.measure) {
    for (Finding& finding : Measure()) findings.push_back(std::move(finding));
  }
  std::uint64_t faults = 0;
  std::uint64_t warnings = 0;
  Table table({"CHECK", "", "FOUND", "REMEDY"});
  OrderedJson checks = OrderedJson::array();
  for (const Finding& finding : findings) {
    faults += finding.level == Level::kFault ? 1 : 0;
    warnings += finding.level == Level::kWarning ? 1 : 0;
    const Colour colour = finding.level == Level::kFine      ? Colour::kGreen
                          : finding.level == Level::kWarning ? Colour::kYellow
                                                             : Colour::kRed;
    table.Add({finding.name, Cell(std::string(LevelName(finding.level)), colour), finding.value,
               finding.remedy});
    checks.push_back({{"check", finding.name},
                      {"level", std::string(LevelName(finding.level))},
                      {"found", finding.value},
                      {"remedy", finding.remedy}});
  }
  if (options.admin.json) {
    out << Dump({{"faults", faults}, {"warnings", warnings}, {"checks", std::move(checks)}})
        << '\n';
  } else {
    table.Print(err);
    err << fmt::format("{}, {}\n", Count(faults, "fault"), Count(warnings, "warning"));
  }
  return faults == 0 ? kExitFine : kExitFailed;
}

}  // namespace tensorbus::cli
