#include "tensorbus/cli/bench_crew.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

#include "tensorbus/base/printable.h"

namespace tensorbus::cli {
namespace {

namespace fs = std::filesystem;

/// How long an ending process has before it is killed.
constexpr auto kEndTimeout = std::chrono::seconds(8);
/// How long to look for a death behind a failure that a survivor reports.
constexpr auto kDeathWait = std::chrono::milliseconds(300);
constexpr std::size_t kTailLines = 6;

sigset_t EndSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&set, signal);
  return set;
}

int MillisecondsLeft(TimePoint deadline) {
  const auto left = deadline - Clock::Real().Now();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1;
  return static_cast<int>(std::clamp<std::int64_t>(ms, 0, 1 << 30));
}

bool Readable(int fd, int timeout_ms) {
  pollfd item = {fd, POLLIN, 0};
  return ::poll(&item, 1, timeout_ms) > 0;
}

/// Between fork and exec: nothing but system calls.
[[noreturn]] void BecomeChild(char* const* argv, char* const* environment, int input, int log,
                              std::span<const int> descriptors, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  ::setpgid(0, 0);
  const sigset_t set = EndSignals();
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
  if (::dup2(input, 0) < 0 || ::dup2(log, 1) < 0 || ::dup2(log, 2) < 0) ::_exit(127);
  for (const int fd : descriptors) ::fcntl(fd, F_SETFD, 0);
  ::execve(argv[0], argv, environment);
  ::_exit(127);
}

std::vector<std::string> EnvironmentFor(bool clean) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (clean && std::strncmp(*entry, "TENSORBUS_", 10) == 0) continue;
    result.emplace_back(*entry);
  }
  return result;
}

std::vector<char*> Pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

Result<Crew> Crew::Create() {
  const char* base = std::getenv("TMPDIR");  // NOLINT(concurrency-mt-unsafe)
  std::string folder =
      std::string(base != nullptr && *base != 0 ? base : "/tmp") + "/tensorbus-bench-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return ErrnoStatus(errno, folder);
  Crew crew;
  crew.folder_ = folder;
  const sigset_t set = EndSignals();
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  crew.masked_ = true;
  crew.signals_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!crew.signals_.valid()) return ErrnoStatus(errno, "signalfd");
  return crew;
}

Crew::Crew(Crew&& other) noexcept
    : folder_(std::exchange(other.folder_, "")),
      signals_(std::move(other.signals_)),
      masked_(std::exchange(other.masked_, false)),
      processes_(std::move(other.processes_)) {
  other.processes_.clear();
}

Crew::~Crew() {
  StopAll();
  std::error_code error;
  if (!folder_.empty()) fs::remove_all(folder_, error);
  if (!masked_) return;
  const sigset_t set = EndSignals();
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

Result<Crew::Member> Crew::Start(const CrewSpec& spec) {
  Process process;
  process.name = spec.name;
  std::vector<std::string> words = spec.argv;
  std::vector<int> descriptors = spec.descriptors;
  UniqueFd theirs;
  if (spec.speaks) {
    std::array<int, 2> pair = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()) != 0) {
      return ErrnoStatus(errno, "socketpair");
    }
    process.channel = UniqueFd(pair[0]);
    theirs = UniqueFd(pair[1]);
    descriptors.push_back(theirs.get());
    words.insert(words.end(), {"--fd", std::to_string(theirs.get())});
  }
  const Member member = processes_.size();
  processes_.push_back(std::move(process));
  const std::string log_path = LogPath(member);
  // Without them the process would write into our output and read our input.
  const UniqueFd log(::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!log.valid() || !nothing.valid()) {
    const Status failed = ErrnoStatus(errno, log.valid() ? "/dev/null" : log_path);
    processes_.pop_back();
    return failed;
  }
  std::vector<std::string> environment = EnvironmentFor(spec.clean_environment);
  const std::vector<char*> argv = Pointers(words);
  const std::vector<char*> env = Pointers(environment);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {
    BecomeChild(argv.data(), env.data(), nothing.get(), log.get(), descriptors, parent);
  }
  if (pid < 0) {
    const Status failed = ErrnoStatus(errno, "start " + spec.name);
    processes_.pop_back();
    return failed;
  }
  Process& started = processes_.back();
  started.pid = pid;
  started.pidfd = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!started.pidfd.valid()) return ErrnoStatus(errno, "pidfd_open");
  return member;
}

Result<int> Crew::RunToEnd(const CrewSpec& spec, Nanos timeout) {
  const TimePoint deadline = Clock::Real().Now() + timeout;
  TB_ASSIGN_OR_RETURN(const Member member, Start(spec));
  Process& process = processes_[member];
  std::array<pollfd, 2> items = {{{signals_.get(), POLLIN, 0}, {process.pidfd.get(), POLLIN, 0}}};
  Status failed;
  while (failed.ok() && items[1].revents == 0) {
    const int ready = ::poll(items.data(), items.size(), MillisecondsLeft(deadline));
    const int poll_error = ready < 0 && errno != EINTR ? errno : 0;
    failed = ReadSignal();
    if (failed.ok() && poll_error != 0) failed = ErrnoStatus(poll_error, "poll " + spec.name);
    if (failed.ok() && Clock::Real().Now() >= deadline && items[1].revents == 0) {
      failed = Status(Code::kDeadlineExceeded, spec.name + " did not end in time");
    }
  }
  if (!failed.ok()) ::kill(process.pid, SIGKILL);
  int status = 0;
  ::waitpid(process.pid, &status, 0);
  process.pid = -1;
  if (!failed.ok()) return failed;
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string Crew::LogPath(Member member) const {
  std::string file = processes_[member].name;
  std::replace_if(
      file.begin(), file.end(), [](char c) { return c == ' ' || c == '/'; }, '-');
  return fmt::format("{}/{:03}-{}.log", folder_, member, file);
}

std::string Crew::LogTails() const {
  std::string text;
  for (Member m = 0; m < processes_.size(); ++m) {
    std::ifstream file(LogPath(m));
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) {
      lines.push_back(std::move(line));
      if (lines.size() > kTailLines) lines.erase(lines.begin());
    }
    for (const std::string& line : lines) {
      text += fmt::format("  [{}] {}\n", name(m), Printable(line));
    }
  }
  return text;
}

Status Crew::DescribeEnd(Process& process) {
  int status = 0;
  ::waitpid(process.pid, &status, 0);
  process.pid = -1;
  if (WIFSIGNALED(status)) {
    return {Code::kUnavailable,
            fmt::format("{} was ended by signal {} ({})", process.name, WTERMSIG(status),
                        ::strsignal(WTERMSIG(status))),  // NOLINT(concurrency-mt-unsafe)
            Reason::kPeerLost};
  }
  return {Code::kUnavailable,
          fmt::format("{} ended with status {}", process.name, WEXITSTATUS(status)),
          Reason::kPeerLost};
}

Status Crew::CheckAlive() {
  Status first;
  for (Process& process : processes_) {
    if (process.pid < 0 || !Readable(process.pidfd.get(), 0)) continue;
    const Status end = DescribeEnd(process);
    if (first.ok()) first = end;
  }
  return first;
}

Status Crew::ReadSignal() {
  signalfd_siginfo info = {};
  if (::read(signals_.get(), &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return {};
  return {Code::kCancelled, fmt::format("stopped by signal {}", info.ssi_signo), Reason::kCancelled,
          static_cast<std::int64_t>(info.ssi_signo)};
}

Status Crew::Send(Member member, const BenchMessage& message) {
  const Status sent = SendBench(processes_[member].channel.get(), message);
  if (sent.ok()) return sent;
  if (Readable(processes_[member].pidfd.get(), 1000)) TB_RETURN_IF_ERROR(CheckAlive());
  return sent.Annotate(name(member));
}

Result<std::vector<BenchReply>> Crew::Collect(std::span<const Member> members, TimePoint deadline,
                                              const std::string& what) {
  std::vector<BenchReply> replies(members.size());
  std::vector<bool> there(members.size(), false);
  for (std::size_t missing = members.size(); missing > 0;) {
    std::vector<pollfd> items = {{signals_.get(), POLLIN, 0}};
    std::vector<std::size_t> waiting;
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (there[i]) continue;
      waiting.push_back(i);
      items.push_back({processes_[members[i]].channel.get(), POLLIN, 0});
    }
    for (const Process& process : processes_) {
      if (process.pid > 0) items.push_back({process.pidfd.get(), POLLIN, 0});
    }
    const int ready = ::poll(items.data(), items.size(), MillisecondsLeft(deadline));
    // Also who closed its channel and lives on is always ready.
    if (ready == 0 || Clock::Real().Now() >= deadline) {
      std::vector<std::string> names;
      for (const std::size_t i : waiting) names.push_back(name(members[i]));
      return Status(Code::kDeadlineExceeded,
                    fmt::format("no answer in time from {} ({})", fmt::join(names, ", "), what));
    }
    TB_RETURN_IF_ERROR(ReadSignal());
    bool progress = false;
    for (std::size_t w = 0; w < waiting.size(); ++w) {
      if (items[w + 1].revents == 0) continue;
      const std::size_t i = waiting[w];
      const auto reply = ReceiveReply(processes_[members[i]].channel.get());
      if (!reply.ok()) continue;  // its end; the pidfd says how
      replies[i] = *reply;
      there[i] = true;
      progress = true;
      --missing;
      const Status said = StatusOf(*reply);
      if (said.ok()) continue;
      // Who reports a lost peer may be heard before the loss itself is seen.
      for (const Process& process : processes_) {
        if (process.pid > 0 && Readable(process.pidfd.get(), 0)) TB_RETURN_IF_ERROR(CheckAlive());
      }
      ReapWithin({}, kDeathWait);
      TB_RETURN_IF_ERROR(CheckAlive());
      return said.Annotate(name(members[i]) + ", " + what);
    }
    if (!progress) TB_RETURN_IF_ERROR(CheckAlive());
  }
  return replies;
}

Result<std::vector<BenchReply>> Crew::Ask(std::span<const Member> members,
                                          const BenchMessage& message, TimePoint deadline,
                                          const std::string& what) {
  for (const Member member : members) TB_RETURN_IF_ERROR(Send(member, message));
  return Collect(members, deadline, what);
}

Status Crew::Await(const std::function<bool()>& there, TimePoint deadline,
                   const std::string& what) {
  while (!there()) {
    if (MillisecondsLeft(deadline) == 0) {
      return {Code::kDeadlineExceeded, fmt::format("not in time: {}", what)};
    }
    std::vector<pollfd> items = {{signals_.get(), POLLIN, 0}};
    for (const Process& process : processes_) {
      if (process.pid > 0) items.push_back({process.pidfd.get(), POLLIN, 0});
    }
    if (::poll(items.data(), items.size(), 1) == 0) continue;
    TB_RETURN_IF_ERROR(ReadSignal());
    TB_RETURN_IF_ERROR(CheckAlive());
  }
  return {};
}

void Crew::ReapWithin(std::span<const Member> members, Nanos timeout) {
  const TimePoint deadline = Clock::Real().Now() + timeout;
  if (members.empty()) {
    std::vector<pollfd> items;
    for (const Process& process : processes_) {
      if (process.pid > 0) items.push_back({process.pidfd.get(), POLLIN, 0});
    }
    ::poll(items.data(), items.size(), MillisecondsLeft(deadline));
    return;
  }
  for (const Member member : members) {
    Process& process = processes_[member];
    if (process.pid > 0 && Readable(process.pidfd.get(), MillisecondsLeft(deadline))) {
      static_cast<void>(DescribeEnd(process));
    }
  }
}

void Crew::Stop(std::span<const Member> members) {
  for (const Member member : members) {
    Process& process = processes_[member];
    if (process.pid < 0) continue;
    if (process.channel.valid()) {
      static_cast<void>(
          SendBench(process.channel.get(), BenchMessage{.command = BenchCommand::kQuit}));
      process.channel.reset();
    } else {
      ::kill(process.pid, SIGTERM);
    }
  }
  ReapWithin(members, kEndTimeout);
  for (const Member member : members) {
    Process& process = processes_[member];
    if (process.pid < 0) continue;
    ::kill(process.pid, SIGKILL);
    static_cast<void>(DescribeEnd(process));
  }
}

void Crew::StopAll() {
  // Workers before the agents they are connected to, agents before the daemon.
  std::vector<Member> speaking;
  std::vector<Member> silent;
  for (Member m = processes_.size(); m-- > 0;) {
    (processes_[m].channel.valid() ? speaking : silent).push_back(m);
  }
  // One that still speaks now may wait for what never comes: SIGTERM ends it at once.
  for (const Member member : speaking) {
    if (processes_[member].pid > 0) ::kill(processes_[member].pid, SIGTERM);
  }
  if (!speaking.empty()) Stop(speaking);
  for (const Member member : silent) Stop(std::span(&member, 1));
}

std::uint64_t Crew::CpuNs(Member member) const {
  const pid_t pid = processes_[member].pid;
  clockid_t clock = 0;
  timespec now = {};
  if (pid < 0 || ::clock_getcpuclockid(pid, &clock) != 0 || ::clock_gettime(clock, &now) != 0) {
    return 0;
  }
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

std::uint64_t Crew::PeakRssBytes(Member member) const {
  if (processes_[member].pid < 0) return 0;
  std::ifstream status(fmt::format("/proc/{}/status", processes_[member].pid));
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
  }
  return 0;
}

}  // namespace tensorbus::cli
