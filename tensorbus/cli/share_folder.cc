#include "tensorbus/cli/share_folder.h"

#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>

#include "tensorbus/cli/programs.h"

namespace tensorbus::cli {
namespace {

Result<std::string> Find(const char* name, const char* variable) {
  const char* named = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe)
  if (named != nullptr && *named != 0) return std::string(named);
  const std::string found = FindUpwards([name](const std::filesystem::path& folder) -> std::string {
    std::error_code error;
    for (const char* below : {"share/tensorbus", "share"}) {
      const std::filesystem::path path = folder / below / name;
      if (std::filesystem::is_directory(path, error)) return path.string();
    }
    return "";
  });
  if (!found.empty()) return found;
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
