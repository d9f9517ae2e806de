#include "tensorbus/rpc/address.h"

#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "tensorbus/base/unique_fd.h"

namespace tensorbus::rpc {

namespace {

constexpr std::size_t kMaxSmallFileBytes = std::size_t{1} << 20;
constexpr std::size_t kMinTokenBytes = 16;
constexpr std::size_t kMaxSocketPath = sizeof sockaddr_un::sun_path - 1;

Result<std::string> ReadAll(int fd, const std::string& path) {
  std::string text;
  char chunk[4096];
  for (;;) {
    const ssize_t got = ::read(fd, chunk, sizeof chunk);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "reading " + path);
    if (got == 0) return text;
    text.append(chunk, static_cast<std::size_t>(got));
    if (text.size() > kMaxSmallFileBytes) {
      return Status(Code::kInvalidArgument, path + " is larger than 1 MiB");
    }
  }
}

}  // namespace

std::string DefaultRuntimeDir() {
  // NOLINTBEGIN(concurrency-mt-unsafe): read at start, nobody sets the environment
  if (const char* dir = std::getenv("TENSORBUS_RUNTIME_DIR"); dir != nullptr && *dir != 0) {
    return dir;
  }
  if (const char* dir = std::getenv("XDG_RUNTIME_DIR"); dir != nullptr && *dir != 0) {
    return std::string(dir) + "/tensorbus";
  }
  // NOLINTEND(concurrency-mt-unsafe)
  return fmt::format("/tmp/tensorbus-{}", ::getuid());
}

std::string DefaultDaemonTarget() {
  return "unix:" + DefaultRuntimeDir() + "/daemon.sock";
}

std::string UnixPathOf(std::string_view target) {
  constexpr std::string_view kScheme = "unix:";
  if (!target.starts_with(kScheme)) return "";
  target.remove_prefix(kScheme.size());
  if (target.starts_with("///")) target.remove_prefix(2);
  return std::string(target);
}

Status CheckTarget(std::string_view target) {
  if (target.starts_with("unix:")) {
    const std::string path = UnixPathOf(target);
    if (!path.empty() && path.size() <= kMaxSocketPath) return {};
    return {Code::kInvalidArgument,
            fmt::format("{}: the path of a socket has 1 to {} bytes, not {}", target,
                        kMaxSocketPath, path.size())};
  }
  const std::size_t colon = target.rfind(':');
  if (colon != std::string_view::npos && colon != 0) {
    const std::string_view digits = target.substr(colon + 1);
    std::uint16_t port = 0;
    const char* end = digits.data() + digits.size();
    const auto [parsed, error] = std::from_chars(digits.data(), end, port);
    if (error == std::errc() && parsed == end) return {};
  }
  return {Code::kInvalidArgument,
          fmt::format("'{}' is no address: unix:PATH or HOST:PORT is needed, the port up to 65535",
                      target)};
}

Status EnsurePrivateDir(const std::string& dir) {
  if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, "creating " + dir);
  }
  struct stat info = {};
  if (::lstat(dir.c_str(), &info) != 0) return ErrnoStatus(errno, "looking at " + dir);
  if (!S_ISDIR(info.st_mode)) {
    return {Code::kFailedPrecondition, dir + " is not a directory"};
  }
  if (info.st_uid != ::geteuid()) {
    return {Code::kPermissionDenied,
            fmt::format("{} belongs to user {}, not to us ({}); choose another folder with "
                        "TENSORBUS_RUNTIME_DIR",
                        dir, info.st_uid, ::geteuid())};
  }
  if ((info.st_mode & 0022) != 0) {
    return {Code::kPermissionDenied,
            fmt::format("others may write to {} (mode {:o}); run: chmod 700 {}", dir,
                        info.st_mode & 07777, dir)};
  }
  return {};
}

Status ProbeSocket(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() > kMaxSocketPath) {
    return {Code::kInvalidArgument,
            fmt::format("socket path {} is longer than {} bytes", path, kMaxSocketPath)};
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return ErrnoStatus(errno, "socket");
  if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    return {};
  }
  switch (errno) {
    case ENOENT:
    case ENOTDIR:
      return {Code::kUnavailable, "there is no such socket", Reason::kNotRunning, errno};
    case ECONNREFUSED:
      return {Code::kUnavailable, "nobody listens on that socket any more", Reason::kNotRunning,
              errno};
    case EACCES:
    case EPERM:
      return {Code::kPermissionDenied,
              fmt::format("no permission for the socket {} (we are user {}); run as the daemon's "
                          "user, or start the daemon with --allow-uid {}",
                          path, ::geteuid(), ::geteuid()),
              Reason::kNone, errno};
    default: {
      const Status other = ErrnoStatus(errno, "connecting");
      return {Code::kUnavailable, other.message(), Reason::kNotRunning, other.native()};
    }
  }
}

Status DiagnoseUnreachable(const std::string& target, const std::string& otherwise) {
  const std::string path = UnixPathOf(target);
  const Status probed = path.empty() ? Status() : ProbeSocket(path);
  if (!probed.ok() && probed.reason() != Reason::kNotRunning) return probed;
  const std::string usual = DefaultDaemonTarget();
  return {Code::kUnavailable,
          fmt::format(
              "no daemon answers at {}: {}; start one with `tensorbusctl up`{}, or say where it "
              "is with --daemon",
              target, probed.ok() ? otherwise : probed.message(),
              target == usual ? "" : fmt::format(" (it listens at {} then)", usual)),
          Reason::kNotRunning, probed.native()};
}

Result<std::string> ReadTokenFile(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "opening the token file " + path);
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "looking at " + path);
  if ((info.st_mode & 0077) != 0) {
    return Status(Code::kInvalidArgument,
                  fmt::format("others may read the token file {}; run: chmod 600 {}", path, path));
  }
  TB_ASSIGN_OR_RETURN(std::string text, ReadAll(fd.get(), path));
  const auto blank = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
  while (!text.empty() && blank(text.back())) text.pop_back();
  std::size_t begin = 0;
  while (begin < text.size() && blank(text[begin])) ++begin;
  text.erase(0, begin);
  if (text.size() < kMinTokenBytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("the token in {} has {} bytes; at least {} are needed (for example: "
                              "openssl rand -hex 32)",
                              path, text.size(), kMinTokenBytes));
  }
  for (const char c : text) {
    if (c < 0x21 || c > 0x7e) {
      return Status(Code::kInvalidArgument,
                    "the token in " + path + " has blanks or unprintable characters");
    }
  }
  return text;
}

Result<std::string> ReadSmallFile(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "opening " + path);
  return ReadAll(fd.get(), path);
}

bool EqualSecrets(std::string_view a, std::string_view b) {
  // Walks over all of `a` whatever `b` is; the length of a token is no secret.
  volatile unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const char other = b.empty() ? '\0' : b[i % b.size()];
    difference = static_cast<unsigned char>(difference | (a[i] ^ other));
  }
  return difference == 0;
}

}  // namespace tensorbus::rpc
