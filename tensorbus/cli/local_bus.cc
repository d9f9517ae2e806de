#include "tensorbus/cli/local_bus.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <functional>
#include <ostream>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "tensorbus/base/printable.h"
#include "tensorbus/base/unique_fd.h"
#include "tensorbus/cli/admin_json.h"
#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/ordered_json.h"
#include "tensorbus/cli/output_file.h"
#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/admin_client.h"

namespace tensorbus::cli {

namespace {

using namespace std::chrono_literals;
using Steady = std::chrono::steady_clock;

constexpr auto kPoll = 20ms;
/// After SIGTERM and before SIGKILL, whatever the timeout.
constexpr auto kKillGrace = 3s;

struct Service {
  std::string name;     // "daemon", "agent"
  std::string program;  // "tensorbusd", "tensorbus-agent"
  std::vector<std::string> arguments;
  std::vector<std::string> sockets;
};

struct Paths {
  std::string dir;
  std::string Of(const Service& service, const char* suffix) const {
    return dir + "/" + service.name + suffix;
  }
  std::string target() const { return "unix:" + dir + "/daemon.sock"; }
};

std::vector<Service> ServicesOf(const LocalOptions& options) {
  const Paths paths{options.runtime_dir};
  Service daemon{.name = "daemon",
                 .program = "tensorbusd",
                 .arguments = {"--listen", paths.target(), "--log-level", options.log_level},
                 .sockets = {paths.dir + "/daemon.sock", paths.dir + "/daemon.sock.lock"}};
  Service agent{.name = "agent",
                .program = "tensorbus-agent",
                .arguments = {"--daemon", paths.target(), "--socket", paths.dir + "/agent.sock",
                              "--log-level", options.log_level},
                .sockets = {paths.dir + "/agent.sock"}};
  agent.arguments.insert(agent.arguments.end(), options.agent_arguments.begin(),
                         options.agent_arguments.end());
  return {std::move(daemon), std::move(agent)};
}

/// One `up` or `down` at a time; waits for the other one until the deadline.
Result<UniqueFd> LockRuntimeDir(const std::string& dir, Steady::time_point deadline) {
  UniqueFd lock(::open((dir + "/up.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock.valid()) return ErrnoStatus(errno, "opening " + dir + "/up.lock");
  while (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return ErrnoStatus(errno, "locking " + dir);
    if (Steady::now() >= deadline) {
      return Status(Code::kDeadlineExceeded,
                    "another `tensorbusctl up` or `down` is at work in " + dir, Reason::kBusy);
    }
    std::this_thread::sleep_for(kPoll);
  }
  return lock;
}

std::string LastLine(const std::string& path) {
  std::ifstream file(path);
  std::string last;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty()) last = line;
  }
  return last;
}

Status Stop(const ProcessMark& mark, Steady::time_point deadline) {
  // A pidfd stays with this very process, also when its number is used again.
  const UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, mark.pid, 0)));
  const std::optional<ProcessMark> now = MarkOf(mark.pid);
  if (!fd.valid() || !now || now->start_ticks != mark.start_ticks) return {};
  const auto signal = [&](int number) {
    return ::syscall(SYS_pidfd_send_signal, fd.get(), number, nullptr, 0) == 0 || errno == ESRCH;
  };
  const auto gone = [&](Steady::time_point until) {
    for (;;) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(until - Steady::now());
      pollfd wait = {.fd = fd.get(), .events = POLLIN, .revents = 0};
      const int ready = ::poll(&wait, 1, static_cast<int>(std::max<std::int64_t>(0, left.count())));
      if (ready > 0) return true;
      if (ready == 0 || errno != EINTR) return false;
    }
  };
  if (!signal(SIGTERM)) return ErrnoStatus(errno, fmt::format("stopping process {}", mark.pid));
  if (gone(std::max(deadline, Steady::now() + kKillGrace))) return {};
  signal(SIGKILL);
  if (gone(Steady::now() + kKillGrace)) return {};
  return {Code::kDeadlineExceeded, fmt::format("process {} does not end", mark.pid)};
}

/// Between fork and exec: nothing but system calls. Until `gate` says so nobody could stop us with
/// `down`; if our parent ends before, so do we.
[[noreturn]] void BecomeService(char* const* argv, int parents_end, int gate, int nothing,
                                int log) {
  ::close(parents_end);
  ::setsid();
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  char go = 0;
  if (::read(gate, &go, 1) != 1) ::_exit(EXIT_FAILURE);
  if (::dup2(nothing, 0) < 0 || ::dup2(log, 1) < 0 || ::dup2(log, 2) < 0) ::_exit(EXIT_FAILURE);
  ::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);  // no pipe of our caller stays open
  ::execve(argv[0], argv, environ);
  const char* const why = ::strerrordesc_np(errno);
  ::_exit(::write(2, why, std::strlen(why)) < 0 ? 126 : 127);
}

Result<ProcessMark> Start(const Service& service, const LocalOptions& options) {
  const Paths paths{options.runtime_dir};
  const std::string program = options.bin_dir + "/" + service.program;
  if (::access(program.c_str(), X_OK) != 0) {
    return ErrnoStatus(errno, fmt::format("{} is not there or cannot be run", program));
  }
  const std::string log_path = paths.Of(service, ".log");
  std::vector<std::string> texts = {program};
  texts.insert(texts.end(), service.arguments.begin(), service.arguments.end());
  std::vector<char*> argv;
  for (std::string& text : texts) argv.push_back(text.data());
  argv.push_back(nullptr);

  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const UniqueFd log(::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  if (!nothing.valid() || !log.valid()) return ErrnoStatus(errno, "opening " + log_path);
  std::array<int, 2> pair = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) != 0) {
    return ErrnoStatus(errno, "socketpair");
  }
  UniqueFd ours(pair[0]);
  UniqueFd theirs(pair[1]);
  const pid_t pid = ::fork();
  if (pid == 0) BecomeService(argv.data(), ours.get(), theirs.get(), nothing.get(), log.get());
  if (pid < 0) return ErrnoStatus(errno, "starting " + program);
  theirs.reset();
  const std::optional<ProcessMark> mark = MarkOf(pid);
  const Status written = mark ? WriteFile(fmt::format("{} {}\n", mark->pid, mark->start_ticks),
                                          paths.Of(service, ".pid"))
                              : Status();
  if (!mark || !written.ok()) {
    ours.reset();  // which ends it
    ::waitpid(pid, nullptr, 0);
    TB_RETURN_IF_ERROR(written);
    return Status(Code::kUnavailable, service.program + " ended at once", Reason::kNotRunning);
  }
  // If it is gone already, waiting for its answer says so.
  static_cast<void>(::send(ours.get(), "", 1, MSG_NOSIGNAL));
  return *mark;
}

/// Whether the service answers; for the agent: whether the daemon knows it.
bool Answers(const Service& service, const Paths& paths, const std::optional<ProcessMark>& mark) {
  auto client = rpc::AdminClient::Create({.target = paths.target()}, 500ms);
  if (!client.ok()) return false;
  const Result<proto::StatusReply> status = (*client)->GetStatus({});
  if (!status.ok()) return false;
  if (service.name == "daemon") return true;
  return std::any_of(status->agents().begin(), status->agents().end(), [&](const auto& agent) {
    return !mark || agent.pid() == static_cast<std::uint32_t>(mark->pid);
  });
}

Status Await(const Service& service, const Paths& paths, const ProcessMark& mark,
             Steady::time_point deadline) {
  while (!Answers(service, paths, mark)) {
    const std::string log = paths.Of(service, ".log");
    ::waitpid(mark.pid, nullptr, WNOHANG);  // ours, if we have just started it
    if (!MarkOf(mark.pid)) {
      return {Code::kUnavailable,
              fmt::format("{} ended: {} (log: {})", service.program, LastLine(log), log),
              Reason::kNotRunning};
    }
    if (Steady::now() >= deadline) {
      return {Code::kDeadlineExceeded,
              fmt::format("{} (process {}) does not answer yet; its log is {}", service.program,
                          mark.pid, log),
              Reason::kMissingRank};
    }
    std::this_thread::sleep_for(kPoll);
  }
  return {};
}

int Report(const LocalOptions& options, const Status& status, const OrderedJson& result,
           std::ostream& out, std::ostream& err) {
  if (options.json) out << Dump(status.ok() ? result : ErrorJson(status)) << '\n';
  if (status.ok()) return kExitFine;
  err << "error: " << Printable(status.message()) << '\n';
  return status.code() == Code::kInvalidArgument ? kExitUsage : kExitFailed;
}

Status Up(const LocalOptions& options, OrderedJson* result, std::ostream& err) {
  const auto deadline = Steady::now() + std::chrono::duration_cast<Steady::duration>(
                                            std::chrono::duration<double>(options.timeout_seconds));
  const Paths paths{options.runtime_dir};
  TB_RETURN_IF_ERROR(rpc::EnsurePrivateDir(paths.dir));
  TB_ASSIGN_OR_RETURN(const UniqueFd lock, LockRuntimeDir(paths.dir, deadline));
  for (const Service& service : ServicesOf(options)) {
    std::optional<ProcessMark> mark = ReadPidFile(paths.Of(service, ".pid"));
    const bool running = mark.has_value() || Answers(service, paths, std::nullopt);
    if (!running) {
      TB_ASSIGN_OR_RETURN(mark, Start(service, options));
    }
    if (mark) TB_RETURN_IF_ERROR(Await(service, paths, *mark, deadline));
    (*result)[service.name] = {{"state", running ? "running" : "started"},
                               {"pid", mark ? mark->pid : 0},
                               {"log", paths.Of(service, ".log")}};
    err << fmt::format("{} {}{}\n", service.program, running ? "runs already" : "started",
                       mark ? fmt::format(" (process {})", mark->pid) : "");
  }
  (*result)["address"] = paths.target();
  (*result)["agent_socket"] = paths.dir + "/agent.sock";
  return {};
}

Status Down(const LocalOptions& options, OrderedJson* result, std::ostream& err) {
  const auto deadline = Steady::now() + std::chrono::duration_cast<Steady::duration>(
                                            std::chrono::duration<double>(options.timeout_seconds));
  const Paths paths{options.runtime_dir};
  if (::access(paths.dir.c_str(), F_OK) != 0) {
    err << "nothing runs here\n";
    return {};
  }
  TB_RETURN_IF_ERROR(rpc::EnsurePrivateDir(paths.dir));
  TB_ASSIGN_OR_RETURN(const UniqueFd lock, LockRuntimeDir(paths.dir, deadline));
  std::vector<Service> services = ServicesOf(options);
  std::reverse(services.begin(), services.end());  // the agent first: it tells its workers
  for (const Service& service : services) {
    const std::optional<ProcessMark> mark = ReadPidFile(paths.Of(service, ".pid"));
    if (mark) TB_RETURN_IF_ERROR(Stop(*mark, deadline));
    const bool foreign = !mark && Answers(service, paths, std::nullopt);
    if (!foreign) {
      for (const std::string& socket : service.sockets) ::unlink(socket.c_str());
    }
    ::unlink(paths.Of(service, ".pid").c_str());
    const char* state = mark ? "stopped" : foreign ? "not ours" : "not running";
    (*result)[service.name] = {{"state", state}, {"pid", mark ? mark->pid : 0}};
    err << fmt::format("{} {}\n", service.program,
                       foreign ? "was not started by `up` and is left alone" : state);
  }
  return {};
}

}  // namespace

std::optional<ProcessMark> MarkOf(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // The name in brackets may hold anything; fields are counted from behind it.
  const auto close = line.rfind(')');
  if (close == std::string::npos || close + 2 >= line.size()) return std::nullopt;
  std::vector<std::string> fields;
  std::string field;
  for (const char c : line.substr(close + 2) + " ") {
    if (c != ' ') {
      field += c;
    } else if (!field.empty()) {
      fields.push_back(std::exchange(field, {}));
    }
  }
  constexpr std::size_t kState = 0;
  constexpr std::size_t kStartTime = 19;  // field 22 of proc(5)
  if (fields.size() <= kStartTime || fields[kState] == "Z" || fields[kState] == "X") {
    return std::nullopt;
  }
  return ProcessMark{.pid = pid,
                     .start_ticks = std::strtoull(fields[kStartTime].c_str(), nullptr, 10)};
}

std::optional<ProcessMark> ReadPidFile(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return std::nullopt;  // a pipe has no end
  std::ifstream file(path);
  ProcessMark said;
  if (!(file >> said.pid >> said.start_ticks) || said.pid <= 0) return std::nullopt;
  const std::optional<ProcessMark> now = MarkOf(said.pid);
  if (!now || now->start_ticks != said.start_ticks) return std::nullopt;
  return now;
}

int RunUp(const LocalOptions& options, std::ostream& out, std::ostream& err) {
  OrderedJson result = OrderedJson::object();
  const Status status = Up(options, &result, err);
  return Report(options, status, result, out, err);
}

int RunDown(const LocalOptions& options, std::ostream& out, std::ostream& err) {
  OrderedJson result = OrderedJson::object();
  const Status status = Down(options, &result, err);
  return Report(options, status, result, out, err);
}

}  // namespace tensorbus::cli
