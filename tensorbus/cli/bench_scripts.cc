#include "tensorbus/cli/bench_scripts.h"

#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <unistd.h>

#include "tensorbus/cli/output_file.h"
#include "tensorbus/cli/programs.h"
#include "tensorbus/formats/layout_file.h"

namespace tensorbus::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kScript = "torch_peer.py";

std::string FindScript() {
  return FindUpwards([](const fs::path& folder) -> std::string {
    std::error_code error;
    for (const char* below : {"share/tensorbus/bench", "bench/peers"}) {
      if (fs::exists(folder / below / kScript, error)) return (folder / below / kScript).string();
    }
    return "";
  });
}

std::string FindPython() {
  const char* named = std::getenv("TENSORBUS_PYTHON");  // NOLINT(concurrency-mt-unsafe)
  if (named != nullptr && *named != 0) return named;
  const char* venv = std::getenv("VIRTUAL_ENV");  // NOLINT(concurrency-mt-unsafe)
  if (venv != nullptr && *venv != 0) return std::string(venv) + "/bin/python";
  const std::string near = FindUpwards([](const fs::path& folder) -> std::string {
    for (const char* below : {"python", ".venv/bin/python"}) {
      if (::access((folder / below).c_str(), X_OK) == 0 && !fs::is_directory(folder / below)) {
        return (folder / below).string();
      }
    }
    return "";
  });
  if (!near.empty()) return near;
  const auto on_path = FindProgram("python3");
  return on_path.ok() ? *on_path : "";
}

/// Whether this Python can import torch.distributed; asked of it, once a run.
bool HasTorch(const std::string& python) {
  const std::string command =
      fmt::format("'{}' -c 'import torch.distributed, numpy' >/dev/null 2>&1 </dev/null", python);
  return std::system(command.c_str()) == 0;  // NOLINT(concurrency-mt-unsafe)
}

}  // namespace

Result<ScriptPeer> PrepareScriptPeer(const Crew& crew, const std::string& kind,
                                     const Workload& workload) {
  const std::string script = FindScript();
  if (script.empty()) return Status(Code::kUnavailable, std::string(kScript) + " is not installed");
  const std::string python = FindPython();
  if (python.empty() || python.find('\'') != std::string::npos || !HasTorch(python)) {
    return Status(Code::kUnavailable,
                  fmt::format("no Python with torch and numpy ({} has not); scripts/setup makes "
                              "one, or name one with $TENSORBUS_PYTHON",
                              python.empty() ? "python3" : python));
  }
  const std::string stem = crew.folder() + "/" + kind;
  TB_RETURN_IF_ERROR(WriteFile(formats::WriteLayoutFile(workload.source), stem + "-source.json"));
  TB_RETURN_IF_ERROR(WriteFile(formats::WriteLayoutFile(workload.target), stem + "-target.json"));
  ScriptPeer peer;
  peer.argv = {python,
               script,
               kind,
               "--source",
               stem + "-source.json",
               "--target",
               stem + "-target.json",
               "--replicas",
               std::to_string(workload.replicas),
               "--store",
               stem + "-store"};
  peer.process_count = workload.source.rank_count + workload.target_processes();
  return peer;
}

}  // namespace tensorbus::cli
