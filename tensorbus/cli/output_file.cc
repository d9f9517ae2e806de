#include "tensorbus/cli/output_file.h"

#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace tensorbus::cli {
namespace {

constexpr mode_t kMode = 0666;  // less the umask
constexpr int kLinksMax = 40;   // as the kernel follows

/// What `path` names, through links, also through one to a file that is not there yet.
Result<std::string> PlaceOf(const std::string& path) {
  std::filesystem::path place = path;
  std::error_code error;
  for (int links = 0; std::filesystem::is_symlink(place, error); ++links) {
    if (links == kLinksMax) return ErrnoStatus(ELOOP, path);
    const std::filesystem::path target = std::filesystem::read_symlink(place, error);
    if (error) return ErrnoStatus(error.value(), path);
    place = place.parent_path() / target;
  }
  return place.string();
}

}  // namespace

Result<OutputFile> OutputFile::Create(const std::string& path) {
  OutputFile out;
  out.path_ = path;
  struct stat info = {};
  const bool there = ::stat(path.c_str(), &info) == 0;
  if (there && !S_ISREG(info.st_mode)) {
    out.file_ = UniqueFd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (!out.file_.valid()) return ErrnoStatus(errno, path);
    return out;
  }
  TB_ASSIGN_OR_RETURN(out.place_, PlaceOf(path));
  static std::atomic<int> drafts = 0;  // two may be for one file
  const std::string draft = fmt::format("{}.new-{}-{}", out.place_, ::getpid(), ++drafts);
  ::unlink(draft.c_str());  // of a process of the same number that was killed
  out.file_ = UniqueFd(::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kMode));
  if (!out.file_.valid()) return ErrnoStatus(errno, path);
  out.draft_ = draft;
  if (there && ::fchmod(out.file_.get(), info.st_mode & 07777) != 0) {
    return ErrnoStatus(errno, path);
  }
  return out;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      place_(std::move(other.place_)),
      draft_(std::exchange(other.draft_, "")),
      file_(std::move(other.file_)) {}

OutputFile::~OutputFile() {
  if (!draft_.empty()) ::unlink(draft_.c_str());
}

Status OutputFile::Write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file_.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return ErrnoStatus(errno, path_);
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

Status OutputFile::Finish() {
  // Some file systems find out here that there was no room.
  if (::close(file_.release()) != 0) return ErrnoStatus(errno, path_);
  if (draft_.empty()) return {};
  if (::rename(draft_.c_str(), place_.c_str()) != 0) return ErrnoStatus(errno, path_);
  draft_.clear();
  return {};
}

Status WriteFile(std::string_view text, const std::string& path) {
  TB_ASSIGN_OR_RETURN(OutputFile file, OutputFile::Create(path));
  TB_RETURN_IF_ERROR(file.Write(text));
  return file.Finish();
}

}  // namespace tensorbus::cli
