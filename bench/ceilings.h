#pragma once

#include <cstdint>

#include "tensorbus/base/mapping.h"
#include "tensorbus/base/status.h"
#include "tensorbus/cli/bench_protocol.h"

namespace tensorbus::bench {

/// What this machine can move at best: the same number of bytes as the workload, between prefaulted
/// arenas of shared memory of the same sizes, without any slicing. Confined.
class Ceilings {
 public:
  /// A target larger than the source (replicas) takes it again from the start.
  static Result<Ceilings> Create(std::uint64_t source_bytes, std::uint64_t target_bytes);

  void Write(std::uint64_t version);
  /// Fills the reply's times: from the go flag of its threads to the end of the last one. Errors:
  /// kDeadlineExceeded naming a thread that did not come to the start; kUnavailable/kPeerLost for a
  /// broken loopback stream.
  Status Run(cli::BenchCeiling which, cli::BenchReply* reply);
  /// Whether the target is what the source is.
  Status Verify() const;

 private:
  Ceilings(Mapping source, Mapping target)
      : source_(std::move(source)), target_(std::move(target)) {}
  Status RunCopy(bool stream, cli::BenchReply* reply);
  Status RunSocket(std::uint32_t streams, cli::BenchReply* reply);

  Mapping source_;
  Mapping target_;
};

}  // namespace tensorbus::bench
