#pragma once

#include <cstdint>
#include <vector>

#include "tensorbus/transport/transport.h"
#include "tests/testing/random_blocks.h"

namespace tensorbus::transport {

/// A route with memory on both sides, for tests.
struct TestRoute {
  std::vector<testing::PlacedBlock> sources;
  std::vector<testing::PlacedBlock> targets;
  std::vector<testing::PlacedBlock> aliases;
  std::vector<std::uint32_t> alias_blocks;

  RouteEnd source() const;
  RouteEnd target() const;
  /// Call before the pull: what every target memory must hold after it.
  void Expect();
  /// Whether it does, gaps and aliases included.
  bool Arrived() const;

 private:
  std::vector<std::vector<std::byte>> expected_;
};

/// `count` random boxes, each placed at random on both sides, some with an alias.
TestRoute RandomRoute(testing::Random& random, std::size_t count, std::uint64_t bytes_max);
/// `count` one-dimensional blocks of `bytes` bytes with random content.
TestRoute FlatRoute(testing::Random& random, std::size_t count, std::uint64_t bytes);

/// What the caller of Pull() can check about a result without trusting the transport: a sum per
/// block, every byte counted, and (from kReadback on) both receipts equal. Error:
/// kDataLoss/kChecksumMismatch naming the block.
Status CheckResult(const RouteKey& key, const RouteEnd& target, const PullResult& result,
                   Proof proof);

}  // namespace tensorbus::transport
