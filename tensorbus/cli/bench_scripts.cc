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

Result<std::string> FindPython() {
  const char* named = std::getenv("TENSORBUS_PYTHON");  // NOLINT(concurrency-mt-unsafe)
  if (named != nullptr && *named != 0) return std::string(named);
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
  return FindProgram("python3");
}

/// Asked of it: error kUnavailable when it cannot import torch.distributed and numpy.
Status CheckPython(Crew& crew, const std::string& python, Nanos timeout) {
  const CrewSpec check = {.name = "python with torch",
                          .argv = {python, "-c", "import torch.distributed, numpy"},
                          .speaks = false};
  TB_ASSIGN_OR_RETURN(const int status, crew.RunToEnd(check, timeout));
  if (status == 0) return {};
  return {Code::kUnavailable,
          fmt::format("no Python with torch and numpy ({} has not); scripts/setup makes one, or "
                      "name one with $TENSORBUS_PYTHON",
                      python)};
}

}  // namespace

Result<ScriptPeer> PrepareScriptPeer(Crew& crew, const std::string& kind, const Workload& workload,
                                     Nanos timeout) {
  const std::string script = FindScript();
  if (script.empty()) return Status(Code::kUnavailable, std::string(kScript) + " is not installed");
  TB_ASSIGN_OR_RETURN(const std::string python, FindPython());
  TB_RETURN_IF_ERROR(CheckPython(crew, python, timeout));
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
