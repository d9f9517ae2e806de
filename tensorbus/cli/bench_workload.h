#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::cli {

/// What a benchmark moves: one job's layout to each of some equal replicas.
struct Workload {
  std::string name;
  JobLayout source;
  JobLayout target;
  std::uint32_t replicas = 1;

  std::uint32_t target_processes() const { return target.rank_count * replicas; }
};

/// Which workload, as the command line says it; empty strings were not given.
struct WorkloadChoice {
  std::string name;            ///< of the table in docs/benchmarks.md, or "all"
  std::string source;          ///< layout file
  std::string target;          ///< layout file
  std::string scenario;        ///< id, or unique prefix of one, of the layouts file
  std::string manifests;       ///< folder of manifests and layouts.json; "": FindManifests()
  std::uint32_t replicas = 0;  ///< 0: what the workload says
  std::uint32_t scale = 1;     ///< divides first dimensions, for a quick run
};

/// "large, small, …".
std::string WorkloadNames();

/// The workloads that `choice` asks for. Errors: kInvalidArgument or kNotFound for what does not
/// exist, does not go together or is not well formed.
Result<std::vector<Workload>> ChooseWorkloads(const WorkloadChoice& choice);

/// A model of one small tensor, cut over as many ranks as `like`: what a refresh costs when there
/// is next to nothing to copy.
Result<Workload> TriggerWorkload(const Workload& like);

/// Bytes that arrive at the target ranks of all replicas, and those that all arenas take.
std::uint64_t ArrivingBytes(const Workload& workload);
std::uint64_t ArenaBytes(const Workload& workload);

}  // namespace tensorbus::cli
