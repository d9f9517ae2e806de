#include "tensorbus/cli/programs.h"

#include <cstdlib>
#include <fmt/format.h>
#include <sstream>
#include <unistd.h>

namespace tensorbus::cli {
namespace {

namespace fs = std::filesystem;

/// Folders that FindUpwards() asks for: a build folder's bin/ is three below the source tree.
constexpr int kFoldersUp = 6;

}  // namespace

std::string OwnPath() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).string();
}

std::string OwnFolder() {
  return fs::path(OwnPath()).parent_path().string();
}

Result<std::string> FindProgram(const std::string& name) {
  const fs::path beside = fs::path(OwnFolder()) / name;
  if (::access(beside.c_str(), X_OK) == 0) return beside.string();
  const char* path = std::getenv("PATH");  // NOLINT(concurrency-mt-unsafe)
  std::istringstream folders(path != nullptr ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const fs::path there = fs::path(folder) / name;
    if (::access(there.c_str(), X_OK) == 0) return there.string();
  }
  return Status(Code::kNotFound,
                fmt::format("{} is not installed: not in {} and not on PATH", name, OwnFolder()));
}

std::string FindUpwards(const std::function<std::string(const std::filesystem::path&)>& find) {
  fs::path folder = OwnFolder();
  for (int up = 0; up < kFoldersUp && !folder.empty(); ++up, folder = folder.parent_path()) {
    std::string path = find(folder);
    if (!path.empty()) return path;
  }
  return "";
}

}  // namespace tensorbus::cli
