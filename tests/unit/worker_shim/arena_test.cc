#include "worker_shim/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tensorbus/base/mapping.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::worker_shim {
namespace {

using tensorbus::testing::IsStatus;

TEST(Arena, IsOneSharedMemoryThatOthersCanMap) {
  ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(10'000));
  arena.data()[9'999] = std::byte{7};
  ASSERT_OK_AND_ASSIGN(const Mapping other,
                       Mapping::Create(arena.fd(), 10'000, Mapping::Access::kRead));
  EXPECT_EQ(other.data()[9'999], std::byte{7});
  EXPECT_NE(::ftruncate(arena.fd(), 1), 0) << "not sealed against shrinking";
}

TEST(Arena, HandsOutAlignedDisjointMemory) {
  ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(1 << 20));
  ASSERT_OK_AND_ASSIGN(const std::uint64_t a, arena.Allocate(10, 64));
  ASSERT_OK_AND_ASSIGN(const std::uint64_t b, arena.Allocate(100, 4096));
  ASSERT_OK_AND_ASSIGN(const std::uint64_t c, arena.Allocate(0, 1));
  EXPECT_EQ(a, 0U);
  EXPECT_EQ(b, 4096U);
  EXPECT_EQ(c, 4196U);
  EXPECT_EQ(arena.used(), 4196U);
}

TEST(Arena, SaysWhenItIsFull) {
  ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(100));
  ASSERT_OK(arena.Allocate(100, 64));
  EXPECT_THAT(arena.Allocate(1, 1), IsStatus(Code::kResourceExhausted, Reason::kOutOfMemory));
  EXPECT_THAT(arena.Allocate(~std::uint64_t{0}, 64),
              IsStatus(Code::kResourceExhausted, Reason::kOutOfMemory));
}

TEST(Arena, RefusesSillyNumbers) {
  EXPECT_THAT(Arena::Create(0), IsStatus(Code::kInvalidArgument, Reason::kNone));
  EXPECT_THAT(Arena::Create(~std::uint64_t{0}),
              IsStatus(Code::kResourceExhausted, Reason::kOutOfMemory));
  ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(100));
  EXPECT_THAT(arena.Allocate(1, 3), IsStatus(Code::kInvalidArgument, Reason::kNone));
  EXPECT_THAT(arena.Allocate(1, 0), IsStatus(Code::kInvalidArgument, Reason::kNone));
}

TEST(Arena, BeginsAtAHugePageWhenLarge) {
  ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(Arena::kHugePagesFromBytes + 12'345));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena.data()) % Arena::kHugePageBytes, 0U);
  arena.data()[arena.size() - 1] = std::byte{1};
  Arena moved = std::move(arena);
  EXPECT_EQ(moved.data()[moved.size() - 1], std::byte{1});
}

}  // namespace
}  // namespace tensorbus::worker_shim
