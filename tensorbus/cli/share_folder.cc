#include "tensorbus/cli/share_folder.h"

#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>

namespace tensorbus::cli {
namespace {

namespace fs = std::filesystem;

/// Highest folders above the program that are looked into.
constexpr int kFoldersUp = 6;

Result<std::string> Find(const char* name, const char* variable) {
  const char* named = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe)
  if (named != nullptr && *named != 0) return std::string(named);
  std::error_code error;
  fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (int up = 0; up < kFoldersUp && !folder.empty(); ++up, folder = folder.parent_path()) {
    for (const char* below : {"share/tensorbus", "share"}) {
      if (fs::is_directory(folder / below / name, error)) return (folder / below / name).string();
    }
  }
  return Status(Code::kNotFound,
                fmt::format("the folder of {} is not found beside this program; name it with ${}",
                            name, variable));
}

}  // namespace

Result<std::string> FindManifests() {
  return Find("manifests", "TENSORBUS_MANIFESTS");
}

Result<std::string> FindClusters() {
  return Find("clusters", "TENSORBUS_CLUSTERS");
}

}  // namespace tensorbus::cli
