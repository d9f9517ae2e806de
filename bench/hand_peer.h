#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/base/mapping.h"
#include "tensorbus/base/status.h"
#include "tensorbus/cli/bench_pattern.h"
#include "tensorbus/cli/bench_protocol.h"

#include "bench/hand_runs.h"

namespace tensorbus::bench {

/// What one process of a hand-written peer is told on its command line.
struct HandOptions {
  bool cma = false;    ///< private memory read with process_vm_readv; else shared memory and memcpy
  std::string source;  ///< layout files
  std::string target;
  std::uint32_t rank = 0;
  int go = -1;              ///< descriptor of the shared BenchGo
  std::uint32_t slot = 0;   ///< ours in it
  std::vector<int> arenas;  ///< descriptors of the source ranks' arenas, for shared memory
};

/// A source rank: holds the weights and rewrites them when told.
class HandSource {
 public:
  static Result<HandSource> Create(const HandOptions& options);
  void Write(std::uint64_t version);
  std::byte* data() const { return memory_.data(); }

 private:
  JobLayout layout_;
  cli::RankArena arena_;
  Mapping mapping_;
  std::span<std::byte> memory_;
};

/// A target rank: everything worked out beforehand, then one copy after the other.
class HandTarget {
 public:
  static Result<HandTarget> Create(const HandOptions& options);
  /// hand-cma: where a source rank's memory is.
  Status SetPeer(std::uint32_t rank, std::uint64_t address, pid_t pid);
  /// Says that it is ready, waits for the go flag to become `go`, copies. Fills the reply's times.
  Status Move(std::uint32_t go, cli::BenchReply* reply);
  Status Verify(std::uint64_t version) const;

 private:
  struct Peer {
    const std::byte* mapped = nullptr;
    std::uint64_t address = 0;
    pid_t pid = 0;
  };
  void CopyShared() const;
  Status CopyForeign() const;

  bool cma_ = false;
  std::uint32_t slot_ = 0;
  JobLayout layout_;
  cli::RankArena arena_;
  std::vector<Run> runs_;
  std::uint64_t bytes_ = 0;
  Mapping go_;
  std::vector<Mapping> sources_;
  std::vector<Peer> peers_;
  Mapping mapping_;
  std::span<std::byte> memory_;
};

}  // namespace tensorbus::bench
