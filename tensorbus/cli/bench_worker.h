#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/ids.h"

namespace tensorbus::cli {

/// What one rank of our own side of a benchmark is told on its command line.
struct BenchWorkerOptions {
  int fd = -1;  ///< the bench channel
  bool source = false;
  std::string layout;  ///< file: the job's layout as Serialize() writes it
  std::string agent_socket;
  std::string channel;
  std::uint32_t rank = 0;
  std::uint32_t replica = 0;
  std::uint32_t replicas = 1;  ///< source: how many must have a version before its memory is free
  std::string flip = "in_place";
  std::string proof = "readback";
  std::string memory = "mapped";
  std::vector<std::string> leave_out;  ///< target: tensors of the channel that it does not take
  double timeout_seconds = 60;
};

/// The names that the command line and the reports use. Error: kInvalidArgument naming the known.
Result<FlipMode> ParseFlipMode(const std::string& text);
Result<Proof> ParseProof(const std::string& text);
Result<MemoryMode> ParseMemoryMode(const std::string& text);
const char* MemoryModeName(MemoryMode mode);

/// One trainer or engine rank of `tensorbusctl bench`: does what it is told on its bench channel
/// until that ends. Returns an exit code.
int RunBenchWorker(const BenchWorkerOptions& options);

}  // namespace tensorbus::cli
