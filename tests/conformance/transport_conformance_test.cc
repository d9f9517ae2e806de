// What every Transport promises, whatever carries the bytes.

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <gtest/gtest.h>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>

#include "tensorbus/base/mapping.h"
#include "tensorbus/kernels/digest.h"
#include "tensorbus/transport/route_check.h"
#include "tests/conformance/foreign_world.h"
#include "tests/conformance/routes.h"
#include "tests/conformance/worlds.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/test_capability.h"

namespace tensorbus::transport {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::IsStatus;
using testing::Random;

struct Kind {
  const char* name;
  std::unique_ptr<World> (*make)(WorldOptions);
  ForeignEnds foreign = {};
};

/// Whether the kind's transport is `name`, whatever memory its ends lie in.
bool IsKindOf(const Kind& kind, const std::string& name) {
  return std::string(kind.name).compare(0, name.size(), name) == 0;
}

RouteKey Key(std::uint64_t session, std::uint32_t source = 1, std::uint32_t target = 2) {
  return {.session = SessionId{session}, .source_rank = source, .target_rank = target};
}

class TransportConformance : public ::testing::TestWithParam<Kind> {
 protected:
  void Start(WorldOptions options = {}) {
    const Kind& kind = GetParam();
    if (!kind.foreign.source && !kind.foreign.target) {
      world_ = kind.make(std::move(options));
      return;
    }
    auto world = std::make_unique<ForeignWorld>(kind.make, std::move(options), kind.foreign);
    foreign_ = &world->memory();
    world_ = std::move(world);
  }
  Transport& source() { return world_->source(); }
  Transport& target() { return world_->target(); }
  PullOptions Options(Proof proof = Proof::kReadback) { return Unhurried(world_->peer(), proof); }
  Result<PullResult> Pull(const RouteKey& key, RouteEnd end, Proof proof = Proof::kReadback) {
    return PullAndWait(target(), key, std::move(end), Options(proof));
  }

  /// Routes live longer than the world: what is exposed must stay readable.
  TestRoute& Keep(TestRoute route) {
    routes_.push_back(std::move(route));
    return routes_.back();
  }

  std::deque<TestRoute> routes_;
  std::unique_ptr<World> world_;
  FakeForeignMemory* foreign_ = nullptr;  ///< null where both ends are this process's memory
};

/// Pulls that may end in any order; Wait() gives the outcomes.
class Outcomes {
 public:
  Transport::Done Next() {
    promises_.push_back(std::make_shared<std::promise<Result<PullResult>>>());
    return [promise = promises_.back()](Result<PullResult> result) {
      promise->set_value(std::move(result));
    };
  }
  std::vector<Result<PullResult>> Wait() {
    std::vector<Result<PullResult>> out;
    for (const auto& promise : promises_) {
      auto future = promise->get_future();
      if (future.wait_for(seconds(60)) == std::future_status::ready) {
        out.push_back(future.get());
      } else {
        out.push_back(Status(Code::kInternal, "the pull never ended"));
      }
    }
    return out;
  }

 private:
  std::vector<std::shared_ptr<std::promise<Result<PullResult>>>> promises_;
};

TEST_P(TransportConformance, BringsRandomBlocksInEveryProof) {
  Start();
  Random random(21);
  for (std::uint64_t round = 0; round < 24; ++round) {
    SCOPED_TRACE(round);
    TestRoute route =
        RandomRoute(random, testing::Pick(random, 1, 12), round % 4 == 0 ? 200000 : 4000);
    route.Expect();
    const Proof proof = static_cast<Proof>(1 + round % 4);
    ASSERT_OK(source().Expose(Key(round), route.source()));
    ASSERT_OK_AND_ASSIGN(const PullResult result, Pull(Key(round), route.target(), proof));
    source().Withdraw(Key(round));
    ASSERT_TRUE(route.Arrived());
    ASSERT_OK(CheckResult(Key(round), route.target(), result, proof));
    if (proof == Proof::kOff) continue;
    for (std::size_t i = 0; i < route.sources.size(); ++i) {
      const DigestSum want = kernels::DigestBlock(route.sources[i].block);
      ASSERT_EQ(result.source.blocks[i], want);
      ASSERT_EQ(result.target.blocks[i], want);
    }
    EXPECT_LE(result.first_byte, result.last_byte);
  }
}

TEST_P(TransportConformance, BringsAnEmptyRoute) {
  Start();
  ASSERT_OK(source().Expose(Key(1), {.capability = testing::TestCapability()}));
  ASSERT_OK_AND_ASSIGN(const PullResult result, Pull(Key(1), {}));
  EXPECT_TRUE(result.source.blocks.empty());
  EXPECT_GT(result.first_byte, Nanos{});
  EXPECT_GE(result.last_byte, result.first_byte);
  StridedBlock nothing;
  nothing.rank = 1;
  ASSERT_OK(source().Expose(
      Key(2), {.blocks = {nothing, nothing}, .capability = testing::TestCapability()}));
  ASSERT_OK_AND_ASSIGN(const PullResult zeros, Pull(Key(2), {.blocks = {nothing, nothing}}));
  EXPECT_EQ(zeros.target.total(), DigestSum{});
}

TEST_P(TransportConformance, BringsABigBlockInBothOrders) {
  Start();
  Random random(22);
  TestRoute& route = Keep(FlatRoute(random, 1, (std::uint64_t{9} << 20) + 5));
  // The same bytes as a matrix of 2-byte items that the target holds transposed.
  StridedBlock box;
  box.rank = 2;
  box.item_bytes = 2;
  box.extents = {700, 501};
  box.stream_strides = {1002, 2};
  box.strides = {1002, 2};
  testing::PlacedBlock from = {std::vector<std::byte>(700 * 1002), box};
  testing::FillRandom(random, from.memory);
  testing::PlacedBlock to = {std::vector<std::byte>(700 * 1002), box};
  to.block.strides = {2, 1400};
  from.block.base = from.memory.data();
  to.block.base = to.memory.data();
  route.sources.push_back(std::move(from));
  route.targets.push_back(std::move(to));
  route.Expect();
  ASSERT_OK(source().Expose(Key(1), route.source()));
  ASSERT_OK(Pull(Key(1), route.target()));
  EXPECT_TRUE(route.Arrived());
}

TEST_P(TransportConformance, BringsThousandsOfTinyBlocks) {
  Start();
  Random random(23);
  TestRoute& route = Keep(FlatRoute(random, 20000, 12));
  route.Expect();
  ASSERT_OK(source().Expose(Key(1), route.source()));
  ASSERT_OK(Pull(Key(1), route.target()));
  EXPECT_TRUE(route.Arrived());
}

TEST_P(TransportConformance, ServesSeveralPullsAtOnceAndTheSameRouteAgain) {
  Start();
  Random random(24);
  std::deque<TestRoute>& routes = routes_;
  for (int i = 0; i < 6; ++i) {
    routes.push_back(i % 2 == 0 ? FlatRoute(random, 3, 1500000) : RandomRoute(random, 30, 9000));
  }
  for (int round = 0; round < 2; ++round) {
    Outcomes outcomes;
    for (std::uint32_t i = 0; i < routes.size(); ++i) {
      routes[i].Expect();
      if (round == 0) {
        ASSERT_OK(source().Expose(Key(1, i, 2), routes[i].source()));
      }
      target().Pull(Key(1, i, 2), routes[i].target(), Options(), outcomes.Next());
    }
    for (const auto& outcome : outcomes.Wait()) ASSERT_OK(outcome);
    for (const TestRoute& route : routes) ASSERT_TRUE(route.Arrived());
  }
}

TEST_P(TransportConformance, ServesTwoTargetsOfOneSource) {
  Start();
  Random random(25);
  TestRoute& first = Keep(RandomRoute(random, 20, 20000));
  TestRoute& second = Keep(first);
  for (auto* side : {&second.targets, &second.aliases}) {
    for (auto& placed : *side) placed = testing::Place(random, placed.block);
  }
  first.Expect();
  second.Expect();
  ASSERT_OK(source().Expose(Key(1), first.source()));
  ASSERT_THAT(source().Expose(Key(1), first.source()),
              IsStatus(Code::kAlreadyExists, Reason::kNone));
  Outcomes outcomes;
  target().Pull(Key(1), first.target(), Options(), outcomes.Next());
  target().Pull(Key(1), second.target(), Options(), outcomes.Next());
  for (const auto& outcome : outcomes.Wait()) ASSERT_OK(outcome);
  EXPECT_TRUE(first.Arrived());
  EXPECT_TRUE(second.Arrived());
}

TEST_P(TransportConformance, RefusesARouteThatIsNotExposed) {
  Start();
  Random random(26);
  TestRoute& route = Keep(FlatRoute(random, 1, 100));
  EXPECT_THAT(Pull(Key(9), route.target()), IsStatus(Code::kNotFound, Reason::kNone));
  ASSERT_OK(source().Expose(Key(9), route.source()));
  source().Withdraw(Key(9));
  source().Withdraw(Key(9));
  EXPECT_THAT(Pull(Key(9), route.target()), IsStatus(Code::kNotFound, Reason::kNone));
  EXPECT_THAT(Pull(Key(9), {}), IsStatus(Code::kNotFound, Reason::kNone));
}

/// Pages that nobody may read.
class Unreadable {
 public:
  static constexpr std::size_t kBytes = 1 << 16;

  Unreadable() : pages_(::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    TB_CHECK(pages_ != MAP_FAILED);
  }
  ~Unreadable() { ::munmap(pages_, kBytes); }
  Unreadable(const Unreadable&) = delete;
  Unreadable& operator=(const Unreadable&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(pages_); }

 private:
  void* pages_;
};

// It has the token and knows every number; one byte read of the source would end the process.
TEST_P(TransportConformance, APeerWithTheTokenButWithoutTheCapabilityReadsNothing) {
  const Unreadable unreadable;
  Start();
  Random random(40);
  TestRoute& route = Keep(FlatRoute(random, 2, Unreadable::kBytes / 2));
  RouteEnd secret = route.source();
  secret.blocks[0].base = unreadable.data();
  secret.blocks[1].base = unreadable.data() + Unreadable::kBytes / 2;
  ASSERT_OK(source().Expose(Key(1), secret));
  const std::vector<std::byte> before = route.targets[0].memory;
  RouteEnd fewer = route.target();
  fewer.blocks.pop_back();
  fewer.aliases.clear();
  for (const Capability& shown : {Capability(), testing::TestCapability('x')}) {
    for (const RouteEnd& end : {route.target(), fewer}) {
      PullOptions options = Options();
      options.capability = shown;
      const auto result = PullAndWait(target(), Key(1), end, options);
      EXPECT_THAT(result, IsStatus(Code::kPermissionDenied, Reason::kNone));
      EXPECT_NE(result.status().message().find("session 1 route 1 -> 2"), std::string::npos);
      EXPECT_EQ(result.status().message().find("xxxx"), std::string::npos) << "a secret";
    }
  }
  EXPECT_EQ(route.targets[0].memory, before);
  if (foreign_ != nullptr) {
    EXPECT_EQ(foreign_->calls(), 0U);
  }
  source().Withdraw(Key(1));
  // It is the capability that was missing, and whoever has it is not kept out by who tried before.
  route.Expect();
  ASSERT_OK(source().Expose(Key(1), route.source()));
  EXPECT_OK(Pull(Key(1), route.target()));
  EXPECT_TRUE(route.Arrived());
}

TEST_P(TransportConformance, ExposesNothingWithoutACapability) {
  Start();
  Random random(41);
  TestRoute& route = Keep(FlatRoute(random, 1, 100));
  RouteEnd open = route.source();
  open.capability = {};
  EXPECT_EQ(source().Expose(Key(1), open).code(), Code::kInvalidArgument);
  EXPECT_THAT(Pull(Key(1), route.target()), IsStatus(Code::kNotFound, Reason::kNone));
}

TEST_P(TransportConformance, RefusesEndsThatDiffer) {
  Start();
  Random random(27);
  TestRoute& route = Keep(FlatRoute(random, 3, 100));
  ASSERT_OK(source().Expose(Key(1), route.source()));
  const auto mismatch = IsStatus(Code::kInvalidArgument, Reason::kPlanMismatch);
  RouteEnd fewer = route.target();
  fewer.blocks.pop_back();
  EXPECT_THAT(Pull(Key(1), fewer), mismatch);
  EXPECT_THAT(Pull(Key(1), {}), mismatch);
  RouteEnd shorter = route.target();
  shorter.blocks[1].extents[0] = 99;
  EXPECT_THAT(Pull(Key(1), shorter), mismatch);
  RouteEnd moved = shorter;  // as many bytes in all
  moved.blocks[2].extents[0] = 101;
  EXPECT_THAT(Pull(Key(1), moved), mismatch);
  RouteEnd recut = route.target();
  recut.blocks[0].rank = 2;
  recut.blocks[0].extents = {50, 2};
  recut.blocks[0].strides = {2, 1};
  EXPECT_THAT(Pull(Key(1), recut), mismatch);
}

TEST_P(TransportConformance, RefusesATargetThatContradictsItself) {
  Start();
  Random random(28);
  TestRoute& route = Keep(FlatRoute(random, 2, 64));
  ASSERT_OK(source().Expose(Key(1), route.source()));
  const auto malformed = IsStatus(Code::kInvalidArgument, Reason::kMalformed);
  RouteEnd stray = route.target();
  stray.aliases.push_back({.block = 2, .place = stray.blocks[0]});
  EXPECT_THAT(Pull(Key(1), stray), malformed);
  RouteEnd unequal = route.target();
  unequal.aliases.push_back({.block = 1, .place = unequal.blocks[0]});
  unequal.aliases[0].place.extents[0] = 63;
  EXPECT_THAT(Pull(Key(1), unequal), malformed);
  RouteEnd askew = route.target();
  askew.aliases.push_back({.block = 1, .place = askew.blocks[0], .readback = askew.blocks[1]});
  askew.aliases[0].readback->extents[0] = 63;
  EXPECT_THAT(Pull(Key(1), askew), malformed);
  RouteEnd half = route.target();
  half.readback = {half.blocks[0]};
  EXPECT_THAT(Pull(Key(1), half), malformed);
}

TEST_P(TransportConformance, FailsAtTheDeadline) {
  Start();
  Random random(29);
  TestRoute& route = Keep(FlatRoute(random, 2, 3000000));
  ASSERT_OK(source().Expose(Key(4), route.source()));
  PullOptions options = Options();
  options.deadline = steady_clock::now() - milliseconds(1);
  const auto result = PullAndWait(target(), Key(4), route.target(), options);
  EXPECT_THAT(result, IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  EXPECT_NE(result.status().message().find("session 4 route 1 -> 2"), std::string::npos);
}

/// Holds transport threads at the first landing until released, so that "meanwhile" is not a race.
class Gatekeeper {
 public:
  LandingHook Hook() {
    return [this](const RouteKey&, std::uint32_t, const StridedBlock&, kernels::ByteRange) {
      std::unique_lock lock(mutex_);
      reached_ = true;
      changed_.notify_all();
      changed_.wait_for(lock, seconds(30), [this] { return open_; });
    };
  }
  bool WaitReached() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, seconds(30), [this] { return reached_; });
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  bool open_ = false;
};

TEST_P(TransportConformance, CancelFailsThePullsOfOneSession) {
  Gatekeeper gate;
  Start({.landing_hook = gate.Hook()});
  Random random(30);
  TestRoute& cancelled = Keep(FlatRoute(random, 8, 2000000));
  TestRoute& kept = Keep(FlatRoute(random, 2, 100000));
  kept.Expect();
  ASSERT_OK(source().Expose(Key(1), cancelled.source()));
  ASSERT_OK(source().Expose(Key(2), kept.source()));
  Outcomes outcomes;
  target().Pull(Key(1), cancelled.target(), Options(), outcomes.Next());
  target().Pull(Key(2), kept.target(), Options(), outcomes.Next());
  ASSERT_TRUE(gate.WaitReached());
  target().Cancel(SessionId{1});
  target().Cancel(SessionId{1});
  gate.Open();
  const auto results = outcomes.Wait();
  EXPECT_THAT(results[0], IsStatus(Code::kCancelled, Reason::kCancelled));
  EXPECT_OK(results[1]);
  EXPECT_TRUE(kept.Arrived());
  source().Withdraw(Key(1));  // windows that nobody takes any more may still be on their way
}

TEST_P(TransportConformance, ADeadlinePassesWhileBytesMove) {
  Gatekeeper gate;
  Start({.landing_hook = gate.Hook()});
  Random random(31);
  TestRoute& route = Keep(FlatRoute(random, 8, 2000000));
  ASSERT_OK(source().Expose(Key(1), route.source()));
  PullOptions options = Options();
  options.deadline = steady_clock::now() + milliseconds(150);
  Outcomes outcomes;
  target().Pull(Key(1), route.target(), options, outcomes.Next());
  ASSERT_TRUE(gate.WaitReached());
  while (steady_clock::now() < options.deadline) std::this_thread::yield();
  gate.Open();
  EXPECT_THAT(outcomes.Wait()[0], IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  source().Withdraw(Key(1));
}

TEST_P(TransportConformance, WithdrawDuringAPullStopsTheReading) {
  Start();
  constexpr std::uint64_t kBytes = std::uint64_t{48} << 20;
  Random random(32);
  TestRoute& route = Keep(FlatRoute(random, 1, kBytes));
  // The source becomes unreadable right after Withdraw(): a late reader would crash.
  ASSERT_OK_AND_ASSIGN(const UniqueFd fd, CreateMemfd("conformance", kBytes));
  ASSERT_OK_AND_ASSIGN(const Mapping memory,
                       Mapping::Create(fd.get(), kBytes, Mapping::Access::kReadWrite));
  std::memset(memory.data(), 7, kBytes);
  for (std::uint64_t round = 0; round < 4; ++round) {
    RouteEnd from = route.source();
    from.blocks[0].base = memory.data();
    ASSERT_OK(source().Expose(Key(round), from));
    Outcomes outcomes;
    target().Pull(Key(round), route.target(), Options(), outcomes.Next());
    for (std::uint64_t i = 0; i < round * 400; ++i) std::this_thread::yield();
    source().Withdraw(Key(round));
    ASSERT_EQ(::mprotect(memory.data(), kBytes, PROT_NONE), 0);
    const auto result = outcomes.Wait()[0];
    if (!result.ok()) {
      EXPECT_THAT(result, IsStatus(Code::kNotFound, Reason::kNone));
    }
    ASSERT_EQ(::mprotect(memory.data(), kBytes, PROT_READ | PROT_WRITE), 0);
  }
}

TEST_P(TransportConformance, ReadbackNamesTheFirstDamagedBlock) {
  for (const bool alias : {false, true}) {
    TestRoute& route = Keep({});
    const auto damage = [&](const RouteKey&, std::uint32_t block, const StridedBlock& place,
                            kernels::ByteRange range) {
      const bool is_alias = place.base != route.targets[block].block.base;
      if (block == 3 && is_alias == alias && range.first <= 777 &&
          777 < range.first + range.count) {
        place.base[777] ^= std::byte{0x10};
      }
    };
    Start({.landing_hook = damage});
    Random random(33);
    route = FlatRoute(random, 6, 3000);
    route.aliases.push_back(route.targets[3]);
    route.aliases[0].block.base = route.aliases[0].memory.data();
    route.alias_blocks.push_back(3);
    ASSERT_OK(source().Expose(Key(1), route.source()));
    const auto result = Pull(Key(1), route.target());
    EXPECT_THAT(result, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
    EXPECT_NE(result.status().message().find("block 3"), std::string::npos) << result.status();
    // What `stream` does not see: damage between landing and check.
    EXPECT_OK(Pull(Key(1), route.target(), Proof::kStream));
  }
}

TEST_P(TransportConformance, ReadbackFollowsTheRegistrationNotTheCopy) {
  Start();
  Random random(34);
  TestRoute& route = Keep(FlatRoute(random, 4, 5000));
  ASSERT_OK(source().Expose(Key(1), route.source()));
  RouteEnd good = route.target();
  good.readback = good.blocks;
  EXPECT_OK(Pull(Key(1), good));
  RouteEnd swapped = good;
  std::swap(swapped.blocks[1].base, swapped.blocks[2].base);
  EXPECT_THAT(Pull(Key(1), swapped), IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  EXPECT_OK(Pull(Key(1), swapped, Proof::kStream));
}

TEST_P(TransportConformance, MemoryProofSeesWhatHappensAfterTheLastCheck) {
  Start({.threads = 1});  // one after the other
  Random random(35);
  // Two blocks in one place: the second overwrites the first after its check.
  TestRoute& route = Keep(FlatRoute(random, 2, 2 << 20));
  ASSERT_OK(source().Expose(Key(1), route.source()));
  RouteEnd overlapping = route.target();
  overlapping.blocks[1].base = overlapping.blocks[0].base;
  EXPECT_THAT(Pull(Key(1), overlapping, Proof::kMemory),
              IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  EXPECT_OK(Pull(Key(1), route.target(), Proof::kMemory));
}

TEST_P(TransportConformance, PullsFromADoneOfAnotherPull) {
  Start();
  Random random(36);
  TestRoute& route = Keep(FlatRoute(random, 2, 70000));
  route.Expect();
  ASSERT_OK(source().Expose(Key(1), route.source()));
  Outcomes outcomes;
  const auto second = outcomes.Next();
  target().Pull(Key(1), route.target(), Options(), [&](Result<PullResult> first) {
    if (!first.ok()) return second(first.status());
    source().Withdraw(Key(7));
    target().Pull(Key(1), route.target(), Options(), second);
  });
  ASSERT_OK(outcomes.Wait()[0]);
  EXPECT_TRUE(route.Arrived());
}

TEST_P(TransportConformance, DestructionEndsWhatIsNotDone) {
  Start();
  Random random(37);
  Outcomes outcomes;
  for (std::uint32_t i = 1; i <= 4; ++i) {  // each into memory of its own
    TestRoute& route = Keep(FlatRoute(random, 4, 1 << 20));
    ASSERT_OK(source().Expose(Key(1, i), route.source()));
    target().Pull(Key(1, i), route.target(), Options(), outcomes.Next());
  }
  if (IsKindOf(GetParam(), "fake")) {
    target().Cancel(SessionId{1});  // its tasks are the executor's, which must not drop them
    outcomes.Wait();
    return;
  }
  world_.reset();
  for (const auto& result : outcomes.Wait()) {
    if (!result.ok()) {
      EXPECT_NE(result.status().code(), Code::kInternal) << result.status();
    }
  }
}

TEST_P(TransportConformance, AskForeignMemoryForManyBlocksAtATime) {
  Start();
  if (foreign_ == nullptr) GTEST_SKIP() << "no foreign memory";
  Random random(38);
  TestRoute route = FlatRoute(random, 1000, 1000);
  route.Expect();
  ASSERT_OK(source().Expose(Key(1), route.source()));
  ASSERT_OK(Pull(Key(1), route.target(), Proof::kMemory));
  EXPECT_TRUE(route.Arrived());
  // A million bytes through stages of 100,000, at most four times (read, write, read back, and at
  // the end), and what the cut into parts adds; not one call a block.
  EXPECT_LE(foreign_->calls(), 120U);
}

TEST_P(TransportConformance, AFailureOfForeignMemoryIsThePulls) {
  Start();
  if (foreign_ == nullptr) GTEST_SKIP() << "no foreign memory";
  Random random(39);
  const TestRoute route = FlatRoute(random, 3, 400000);
  ASSERT_OK(source().Expose(Key(1), route.source()));
  foreign_->Break(Status(Code::kUnavailable, "worker 7 is gone", Reason::kPeerLost));
  const auto result = Pull(Key(1), route.target());
  EXPECT_THAT(result, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_NE(result.status().message().find("worker 7 is gone"), std::string::npos);
  foreign_->Break({});
  EXPECT_OK(Pull(Key(1), route.target())) << "the next pull suffers from it";
  source().Withdraw(Key(1));
}

constexpr ForeignEnds kForeignSource = {.source = true};
constexpr ForeignEnds kForeignTarget = {.target = true};
constexpr ForeignEnds kForeignBoth = {.source = true, .target = true};

INSTANTIATE_TEST_SUITE_P(All, TransportConformance,
                         ::testing::Values(Kind{"fake", MakeFakeWorld}, Kind{"shm", MakeShmWorld},
                                           Kind{"tcp", MakeTcpWorld},
                                           Kind{"faulty", MakeFaultlessFaultyWorld},
                                           Kind{"fake_foreign_both", MakeFakeWorld, kForeignBoth},
                                           Kind{"shm_foreign_source", MakeShmWorld, kForeignSource},
                                           Kind{"shm_foreign_target", MakeShmWorld, kForeignTarget},
                                           Kind{"shm_foreign_both", MakeShmWorld, kForeignBoth},
                                           Kind{"tcp_foreign_source", MakeTcpWorld, kForeignSource},
                                           Kind{"tcp_foreign_target", MakeTcpWorld, kForeignTarget},
                                           Kind{"tcp_foreign_both", MakeTcpWorld, kForeignBoth}),
                         [](const auto& kind) { return std::string(kind.param.name); });

}  // namespace
}  // namespace tensorbus::transport
