#include "tests/conformance/routes.h"

#include <cstring>
#include <fmt/format.h>

#include "tensorbus/transport/route_check.h"
#include "tests/testing/test_capability.h"

namespace tensorbus::transport {

using testing::PlacedBlock;
using testing::Random;

RouteEnd TestRoute::source() const {
  RouteEnd end;
  for (const PlacedBlock& placed : sources) end.blocks.push_back(placed.block);
  end.capability = testing::TestCapability();
  return end;
}

RouteEnd TestRoute::target() const {
  RouteEnd end;
  for (const PlacedBlock& placed : targets) end.blocks.push_back(placed.block);
  for (std::size_t i = 0; i < aliases.size(); ++i) {
    end.aliases.push_back({.block = alias_blocks[i], .place = aliases[i].block});
  }
  return end;
}

namespace {

/// The target's memory once the source's block is in it; flat ones without the per-byte walk, which
/// takes its time under sanitizers.
std::vector<std::byte> After(const PlacedBlock& source, const PlacedBlock& target) {
  if (source.block.rank == 1 && source.block.base == source.memory.data() &&
      source.memory.size() == target.memory.size() &&
      source.block.bytes() == source.memory.size()) {
    return source.memory;
  }
  return testing::WithBytes(target, testing::BytesOf(source.block));
}

}  // namespace

void TestRoute::Expect() {
  expected_.clear();
  for (std::size_t i = 0; i < targets.size(); ++i) {
    expected_.push_back(After(sources[i], targets[i]));
  }
  for (std::size_t i = 0; i < aliases.size(); ++i) {
    expected_.push_back(After(sources[alias_blocks[i]], aliases[i]));
  }
}

bool TestRoute::Arrived() const {
  std::size_t next = 0;
  for (const auto* group : {&targets, &aliases}) {
    for (const PlacedBlock& placed : *group) {
      if (placed.memory != expected_[next++]) return false;
    }
  }
  return true;
}

TestRoute RandomRoute(Random& random, std::size_t count, std::uint64_t bytes_max) {
  TestRoute route;
  for (std::uint32_t i = 0; i < count; ++i) {
    StridedBlock box = testing::RandomBox(random, bytes_max);
    if (box.rank > 0 && testing::Pick(random, 0, 9) == 0) box.extents[0] = 0;
    route.sources.push_back(testing::Place(random, box));
    route.targets.push_back(testing::Place(random, box));
    while (testing::Pick(random, 0, 5) == 0) {
      route.aliases.push_back(testing::Place(random, box));
      route.alias_blocks.push_back(i);
    }
  }
  return route;
}

TestRoute FlatRoute(Random& random, std::size_t count, std::uint64_t bytes) {
  TestRoute route;
  for (std::size_t i = 0; i < count; ++i) {
    StridedBlock block;
    block.rank = 1;
    block.extents[0] = bytes;
    block.strides[0] = 1;
    block.stream_strides[0] = 1;
    block.key = {.a = random(), .b = random()};
    for (auto* side : {&route.sources, &route.targets}) {
      PlacedBlock placed = {.memory = std::vector<std::byte>(bytes), .block = block};
      if (side == &route.sources) {
        for (std::size_t at = 0; at + 8 <= bytes; at += 8) {
          const std::uint64_t word = random();
          std::memcpy(placed.memory.data() + at, &word, sizeof word);
        }
      }
      placed.block.base = placed.memory.data();
      side->push_back(std::move(placed));
    }
  }
  return route;
}

Status CheckResult(const RouteKey& key, const RouteEnd& target, const PullResult& result,
                   Proof proof) {
  const std::size_t blocks = target.blocks.size();
  if (result.source.blocks.size() != blocks || result.target.blocks.size() != blocks) {
    return {Code::kDataLoss,
            fmt::format("{}: receipts for {} and {} of {} blocks", RouteName(key),
                        result.source.blocks.size(), result.target.blocks.size(), blocks),
            Reason::kChecksumMismatch};
  }
  for (std::size_t i = 0; i < blocks; ++i) {
    const auto index = static_cast<std::uint32_t>(i);
    const DigestSum& from = result.source.blocks[i];
    const DigestSum& to = result.target.blocks[i];
    if (from.bytes != target.blocks[i].bytes() || to.bytes != from.bytes) {
      return BlockMismatch(key, index,
                           fmt::format("{} and {} of {} bytes accounted for", from.bytes, to.bytes,
                                       target.blocks[i].bytes()));
    }
    if (proof >= Proof::kReadback && from != to) {
      return BlockMismatch(key, index, "source and target sums differ");
    }
  }
  return {};
}

}  // namespace tensorbus::transport
