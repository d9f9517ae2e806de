#include "agent/cma_memory.h"

#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <optional>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tensorbus/kernels/copy.h"
#include "tests/testing/deadline.h"
#include "tests/testing/random_blocks.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::agent {
namespace {

using testing::IsStatus;
using testing::Random;
using testing::Soon;
using transport::ForeignPart;

constexpr std::uint64_t kArenaBytes = std::uint64_t{8} << 20;

/// Private memory, and a child process that has a copy of it at the same address.
class Owner {
 public:
  Owner() {
    void* const mapped =
        ::mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory_ = {static_cast<std::byte*>(mapped), kArenaBytes};
    Random random(1);
    for (std::byte& byte : memory_) byte = static_cast<std::byte>(random());
  }
  ~Owner() {
    Kill();
    ::munmap(memory_.data(), memory_.size());
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  std::span<std::byte> memory() { return memory_; }
  pid_t pid() const { return pid_; }

  /// Starts the child, which runs `prepare` and then lives until Kill(). What happens to memory()
  /// from then on happens here only.
  void Start(const std::function<void(std::span<std::byte>)>& prepare = nullptr) {
    int ready[2] = {};
    ASSERT_EQ(::pipe(ready), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      if (prepare) prepare(memory_);
      const char byte = 1;
      if (::write(ready[1], &byte, 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    ::close(ready[0]);
    ::close(ready[1]);
  }
  void Kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  std::span<std::byte> memory_;
  pid_t pid_ = 0;
};

class Cma : public ::testing::Test {
 protected:
  Result<std::shared_ptr<CmaMemory>> Open(bool writable, std::uint64_t bytes = kArenaBytes) {
    TB_ASSIGN_OR_RETURN(ProcessHandle process,
                        ProcessHandle::Open(owner_.pid(), ::getuid(), "trainer rank 3"));
    const PrivateSegment segment = {.address = AddressOf(0), .bytes = bytes};
    return CmaMemory::Create(std::move(process), {&segment, 1}, writable, stages_);
  }
  std::uint64_t AddressOf(std::uint64_t offset) {
    return reinterpret_cast<std::uintptr_t>(owner_.memory().data()) + offset;
  }
  /// Random boxes inside the owner's memory, none over another.
  std::vector<StridedBlock> Blocks(Random& random) {
    std::vector<StridedBlock> blocks;
    std::uint64_t at = 0;
    for (;;) {
      const testing::PlacedBlock placed =
          testing::Place(random, testing::RandomBox(random, 200000));
      if (at + placed.memory.size() > kArenaBytes) return blocks;
      blocks.push_back(placed.block);
      blocks.back().base = owner_.memory().data() + at + (placed.block.base - placed.memory.data());
      at += placed.memory.size();
    }
  }

  Owner owner_;
  std::shared_ptr<transport::StagingBudget> budget_ =
      transport::StagingBudget::Create(std::uint64_t{8} << 20);
  std::shared_ptr<StagePool> stages_ = StagePool::Create(budget_, 2);
};

TEST_F(Cma, ReadsWhatTheOwnerHoldsInAnyStrides) {
  owner_.Start();
  ASSERT_OK_AND_ASSIGN(const auto memory, Open(false));
  Random random(2);
  const std::vector<StridedBlock> blocks = Blocks(random);
  std::vector<ForeignPart> parts;
  std::vector<std::byte> want;
  for (const StridedBlock& block : blocks) {
    const std::uint64_t bytes = block.bytes();
    const std::uint64_t first = testing::Pick(random, 0, bytes / 3);
    const std::uint64_t count = testing::Pick(random, 0, bytes - first);
    parts.push_back({.block = &block, .first = first, .count = count});
    std::vector<std::byte> packed(count);
    kernels::PackRange(block, first, packed);
    want.insert(want.end(), packed.begin(), packed.end());
  }
  std::memset(owner_.memory().data(), 0, kArenaBytes);  // ours, not the child's
  std::vector<std::byte> got(want.size());
  ASSERT_OK(memory->Read(parts, got, Soon()));
  EXPECT_TRUE(got == want);
}

TEST_F(Cma, WritesWhereItShouldAndNowhereElse) {
  owner_.Start();
  ASSERT_OK_AND_ASSIGN(const auto memory, Open(true));
  Random random(3);
  const std::vector<StridedBlock> blocks = Blocks(random);
  std::vector<ForeignPart> parts;
  std::vector<std::byte> sent;
  for (const StridedBlock& block : blocks) {
    std::vector<std::byte> bytes(block.bytes());
    testing::FillRandom(random, bytes);
    kernels::UnpackRange(bytes, 0, block);  // ours: what the child's should become
    parts.push_back({.block = &block, .first = 0, .count = bytes.size()});
    sent.insert(sent.end(), bytes.begin(), bytes.end());
  }
  ASSERT_OK(memory->Write(parts, sent, Soon()));
  StridedBlock all;
  all.base = owner_.memory().data();
  all.rank = 1;
  all.extents[0] = kArenaBytes;
  all.strides[0] = 1;
  const ForeignPart whole = {.block = &all, .first = 0, .count = kArenaBytes};
  std::vector<std::byte> got(kArenaBytes);
  ASSERT_OK(memory->Read({&whole, 1}, got, Soon()));
  EXPECT_EQ(std::memcmp(got.data(), owner_.memory().data(), kArenaBytes), 0);
}

TEST_F(Cma, ProbingChangesNothingAndMeasuresASpeed) {
  owner_.Start();
  ASSERT_OK_AND_ASSIGN(const auto memory, Open(true));
  const PrivateSegment segment = {.address = AddressOf(0), .bytes = kArenaBytes};
  EXPECT_GT(memory->MeasureSpeed({&segment, 1}), 0.0);
  StridedBlock all;
  all.base = owner_.memory().data();
  all.rank = 1;
  all.extents[0] = kArenaBytes;
  all.strides[0] = 1;
  const ForeignPart whole = {.block = &all, .first = 0, .count = kArenaBytes};
  std::vector<std::byte> got(kArenaBytes);
  ASSERT_OK(memory->Read({&whole, 1}, got, Soon()));
  EXPECT_EQ(std::memcmp(got.data(), owner_.memory().data(), kArenaBytes), 0);
}

TEST_F(Cma, RefusesMemoryThatIsNotThere) {
  owner_.Start([](std::span<std::byte> memory) {
    ::munmap(memory.data() + kArenaBytes / 2, kArenaBytes / 2);
  });
  EXPECT_THAT(Open(false), IsStatus(Code::kInvalidArgument, Reason::kMovedMemory));
  ASSERT_OK_AND_ASSIGN(const auto memory, Open(false, kArenaBytes / 2));
  StridedBlock all;
  all.base = owner_.memory().data();
  all.rank = 1;
  all.extents[0] = kArenaBytes;
  all.strides[0] = 1;
  const ForeignPart beyond = {.block = &all, .first = kArenaBytes / 2 - 10, .count = 20};
  std::vector<std::byte> got(20);
  const Status read = memory->Read({&beyond, 1}, got, Soon());
  EXPECT_THAT(read, IsStatus(Code::kInvalidArgument, Reason::kMovedMemory));
  EXPECT_NE(read.message().find("trainer rank 3"), std::string::npos) << read;
}

TEST_F(Cma, RefusesATargetThatCannotBeWritten) {
  owner_.Start([](std::span<std::byte> memory) {
    ::mprotect(memory.data() + kArenaBytes / 2, 4096, PROT_READ);
  });
  EXPECT_OK(Open(false));
  EXPECT_THAT(Open(true), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(Cma, TellsThatTheOwnerIsGone) {
  owner_.Start();
  ASSERT_OK_AND_ASSIGN(const auto memory, Open(false));
  owner_.Kill();
  StridedBlock one;
  one.base = owner_.memory().data();
  const ForeignPart part = {.block = &one, .first = 0, .count = 1};
  std::byte byte{};
  EXPECT_THAT(memory->Read({&part, 1}, {&byte, 1}, Soon()),
              IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_THAT(Open(false), IsStatus(Code::kUnavailable, Reason::kPeerLost));
}

TEST_F(Cma, RespectsTheDeadline) {
  owner_.Start();
  ASSERT_OK_AND_ASSIGN(const auto memory, Open(false));
  StridedBlock one;
  one.base = owner_.memory().data();
  const ForeignPart part = {.block = &one, .first = 0, .count = 1};
  std::byte byte{};
  EXPECT_THAT(memory->Read({&part, 1}, {&byte, 1}, TimePoint{}),
              IsStatus(Code::kDeadlineExceeded, Reason::kNone));
}

TEST_F(Cma, SaysWhenTheKernelForbidsIt) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root, to become somebody else";
  owner_.Start();
  // Another user's process tries: the outcome comes back as its exit status.
  const pid_t other = ::fork();
  if (other == 0) {
    if (::setresuid(65534, 65534, 65534) != 0) ::_exit(2);
    const auto memory = Open(false);
    const bool refused = !memory.ok() && memory.status().code() == Code::kPermissionDenied &&
                         memory.status().reason() == Reason::kUnsupported;
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(other, &status, 0), other);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(Cma, StagesAreCountedAndBounded) {
  EXPECT_LE(stages_->stage_bytes(), budget_->limit_bytes() / 4);
  ASSERT_OK_AND_ASSIGN(transport::ForeignStage first, stages_->Borrow(Soon()));
  {
    ASSERT_OK_AND_ASSIGN(const transport::ForeignStage second, stages_->Borrow(Soon()));
    EXPECT_EQ(budget_->used_bytes(), 2 * stages_->stage_bytes());
    EXPECT_THAT(stages_->Borrow(std::chrono::steady_clock::now()),
                IsStatus(Code::kDeadlineExceeded, Reason::kOutOfMemory));
  }
  EXPECT_OK(stages_->Borrow(Soon()));
  EXPECT_EQ(budget_->used_bytes_max(), 2 * stages_->stage_bytes());
}

}  // namespace
}  // namespace tensorbus::agent
