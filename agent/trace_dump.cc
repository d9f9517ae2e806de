#include "agent/trace_dump.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <unistd.h>

#include "agent/trace_ring.h"
#include "tensorbus/base/clock.h"
#include "tensorbus/base/log.h"
#include "tensorbus/base/unique_fd.h"

namespace tensorbus::agent {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "session-";

/// Names begin with the time, so that they are in order.
void RemoveOldest(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().filename().string().rfind(kPrefix, 0) == 0) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (std::size_t i = 0; i + kTraceFilesMax < files.size(); ++i) fs::remove(files[i], error);
}

Status WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return ErrnoStatus(errno, "write");
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

// Signed: the clock that people read may step back.
double DurationUs(const TraceRecord& record) {
  return static_cast<double>(static_cast<std::int64_t>(record.end_ns - record.begin_ns)) / 1e3;
}

}  // namespace

std::string TracePath(const std::string& folder, SessionId session) {
  return fmt::format("{}/{}{:020}-{}-{}.trace", folder, kPrefix, RealtimeNs(), ::getpid(),
                     session.value);
}

Status WriteTrace(const std::string& path, SessionId session, const Status& why,
                  const std::vector<TraceRecord>& records) {
  std::string text = fmt::format("event=session_failed session={} error={}\n", session.value,
                                 internal::LogValue(why.ToString()));
  for (const TraceRecord& record : records) {
    text +=
        fmt::format("event=step name={} track={} session={} begin_ns={} dur_us={:.1f} bytes={}\n",
                    internal::LogValue(record.name), internal::LogValue(record.track),
                    record.session.value, record.begin_ns, DurationUs(record), record.bytes);
  }
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid()) return ErrnoStatus(errno, path);
  const Status written = WriteAll(file.get(), text).Annotate(path);
  if (!written.ok()) ::unlink(path.c_str());  // half a trace misleads, and the disk may be full
  RemoveOldest(fs::path(path).parent_path());
  return written;
}

}  // namespace tensorbus::agent
