#include <array>
#include <cstring>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <random>
#include <sys/mman.h>
#include <unistd.h>

#include "agent/binding.h"
#include "agent/memory_access.h"
#include "agent/memory_left.h"
#include "agent/piece_work.h"
#include "agent/receipts.h"
#include "agent/registered_place.h"
#include "agent/registration.h"
#include "tensorbus/kernels/digest.h"
#include "tests/testing/deadline.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_dir.h"

// A rank's memory: segments from outside, pieces as blocks, copies and digests of all pieces.
namespace tensorbus::agent {
namespace {

using testing::IsStatus;

SegmentOffer OfferOf(std::uint32_t index, std::uint64_t bytes, UniqueFd fd) {
  SegmentOffer offer;
  offer.attach.segment = index;
  offer.attach.mapped = true;
  offer.attach.bytes = bytes;
  offer.fd = std::move(fd);
  return offer;
}

TEST(SegmentCollector, MapsSegmentsInOrderAndClosesTheirDescriptors) {
  SegmentCollector collector(Mapping::Access::kReadWrite);
  ASSERT_OK(collector.Add(OfferOf(0, 4096, *CreateMemfd("a", 4096))));
  ASSERT_OK(collector.Add(OfferOf(1, 100, *CreateMemfd("b", 100))));
  const auto memory = collector.Finish();
  EXPECT_EQ(memory->mode(), MemoryMode::kMapped);
  ASSERT_EQ(memory->bases().size(), 2U);
  EXPECT_EQ(memory->segment_bytes()[1], 100U);
  EXPECT_EQ(collector.segment_count(), 0U);
}

TEST(SegmentCollector, RefusesWhatCannotBeRight) {
  SegmentCollector collector(Mapping::Access::kReadWrite);
  EXPECT_THAT(collector.Add(OfferOf(1, 10, *CreateMemfd("a", 10))),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed))
      << "out of order";
  EXPECT_THAT(collector.Add(OfferOf(0, 10, UniqueFd())),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed))
      << "no descriptor";
  EXPECT_THAT(collector.Add(OfferOf(0, 11, *CreateMemfd("a", 10))),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed))
      << "shorter than announced";
  SegmentOffer nowhere = OfferOf(0, 10, UniqueFd());
  nowhere.attach.mapped = false;
  EXPECT_THAT(collector.Add(std::move(nowhere)),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed))
      << "private memory at no address";
  SegmentOffer beyond = OfferOf(0, 10, UniqueFd());
  beyond.attach.mapped = false;
  beyond.attach.address = ~std::uint64_t{0} - 5;
  EXPECT_THAT(collector.Add(std::move(beyond)),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed))
      << "past the end of all addresses";
}

TEST(SegmentCollector, OnePrivateSegmentMakesTheRankPrivate) {
  SegmentCollector collector(Mapping::Access::kReadWrite);
  SegmentOffer mapped = OfferOf(0, 4096, *CreateMemfd("a", 4096));
  mapped.attach.address = 0x1000;
  ASSERT_OK(collector.Add(std::move(mapped)));
  SegmentOffer owned = OfferOf(1, 10, UniqueFd());
  owned.attach.mapped = false;
  owned.attach.address = 0x9000;
  ASSERT_OK(collector.Add(std::move(owned)));
  const auto memory = collector.Finish();
  EXPECT_FALSE(memory->addressable());
  EXPECT_EQ(memory->foreign(), nullptr) << "no way was looked for yet";
  ASSERT_EQ(memory->bases().size(), 2U);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->bases()[0]), 0x1000U)
      << "where the worker has it";
  EXPECT_EQ(memory->segment_bytes()[1], 10U);
}

TEST(MapForeign, RefusesMemoryThatItsOwnerCanCutShort) {
  const testing::TempDir dir;
  UniqueFd file(::open(dir.Join("f").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::ftruncate(file.get(), 4096), 0);
  EXPECT_THAT(MapForeign(file.get(), 4096, Mapping::Access::kRead),
              IsStatus(Code::kFailedPrecondition, Reason::kUnsupported));
}

TEST(MapForeign, SealsAMemfdThatAllowsIt) {
  UniqueFd fd(::memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), 4096), 0);
  ASSERT_OK(MapForeign(fd.get(), 4096, Mapping::Access::kRead));
  EXPECT_NE(::ftruncate(fd.get(), 1), 0) << "cannot shrink any more";
}

Box BoxOf(std::initializer_list<Range> ranges) {
  return Box(std::span<const Range>(ranges.begin(), ranges.size()));
}

/// One tensor [8, 6] f32; its box [2:6, 1:5] lies transposed, with gaps, at offset 12.
Registration Transposed() {
  Registration registration;
  const std::array<std::uint64_t, 2> dims = {8, 6};
  registration.tensors.push_back(
      {.name = "t", .dtype = DType::kF32, .shape = *Shape::Create(dims)});
  registration.segment_bytes = {4096};
  Piece piece;
  piece.box = BoxOf({{2, 6}, {1, 5}});
  piece.offset = 12;
  piece.strides[0] = 8;
  piece.strides[1] = 40;
  registration.pieces.push_back(piece);
  return registration;
}

TEST(PieceIndex, PlacesAPartWithItsStreamPosition) {
  const PieceIndex pieces(Transposed(), "policy");
  const PlacedBlock placed = pieces.Place(0, BoxOf({{3, 5}, {2, 5}}));
  EXPECT_EQ(placed.offset, 12U + 1 * 8 + 1 * 40);
  EXPECT_EQ(placed.block.stream_offset, (3U * 6 + 2) * 4);
  EXPECT_EQ(placed.block.stream_strides[0], 24U);
  EXPECT_EQ(placed.block.stream_strides[1], 4U);
  EXPECT_EQ(placed.block.bytes(), 2U * 3 * 4);
  EXPECT_EQ(placed.block.key, kernels::MakeDigestKey("policy", "t", DType::kF32));
}

TEST(RegisteredPlaces, FindTheSamePlaceByAnotherWay) {
  const Registration registration = Transposed();
  const PieceIndex pieces(registration, "policy");
  const RegisteredPlaces places(registration);
  for (const Box& box :
       {BoxOf({{2, 6}, {1, 5}}), BoxOf({{3, 5}, {2, 5}}), BoxOf({{5, 6}, {4, 5}})}) {
    const PlacedBlock a = pieces.Place(0, box);
    const std::vector<PlacedBlock> found = places.Find(0, box, pieces.KeyOf(0));
    ASSERT_EQ(found.size(), 1U);
    const PlacedBlock& b = found[0];
    EXPECT_EQ(a.offset, b.offset);
    EXPECT_EQ(a.block.stream_offset, b.block.stream_offset);
    EXPECT_EQ(a.block.extents, b.block.extents);
    EXPECT_EQ(a.block.strides, b.block.strides);
    EXPECT_EQ(a.block.stream_strides, b.block.stream_strides);
    EXPECT_EQ(a.block.key, b.block.key);
  }
}

TEST(RegisteredPlaces, FindEveryAliasAndNothingThatIsHeldInPart) {
  Registration registration = Transposed();
  registration.pieces.push_back(registration.pieces[0]);  // the same place once more
  registration.pieces.push_back(registration.pieces[0]);
  registration.pieces[2].offset = 2048;
  const RegisteredPlaces places(registration);
  const std::vector<PlacedBlock> found = places.Find(0, BoxOf({{3, 5}, {2, 5}}), {});
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found[1].offset, found[0].offset);
  EXPECT_EQ(found[2].piece, 2U);
  EXPECT_EQ(found[2].offset - found[0].offset, 2048U - 12);
  EXPECT_TRUE(places.Find(0, BoxOf({{1, 5}, {2, 5}}), {}).empty());
}

TEST(CutBlock, PartsDigestToTheWhole) {
  const PieceIndex pieces(Transposed(), "policy");
  std::vector<std::byte> memory(4096);
  std::mt19937 random(7);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  std::byte* const base = memory.data();
  const std::span<std::byte* const> bases(&base, 1);
  const PlacedBlock whole = pieces.Place(0);
  for (const std::uint64_t part_bytes : {1U, 16U, 40U, 4096U}) {
    DigestSum sum;
    for (const PlacedBlock& part : CutBlock(whole, part_bytes)) {
      sum += kernels::DigestBlock(part.At(bases));
    }
    EXPECT_EQ(sum, kernels::DigestBlock(whole.At(bases)));
  }
}

/// Two tensors, 40 rows of 1 KiB each.
Registration TwoTensors() {
  Registration registration;
  const std::array<std::uint64_t, 2> dims = {40, 256};
  for (const char* name : {"a", "b"}) {
    Piece piece;
    piece.tensor = static_cast<std::uint32_t>(registration.tensors.size());
    piece.box = BoxOf({{0, 40}, {0, 256}});
    piece.offset = piece.tensor * 40U * 1024 + 64;
    piece.strides[0] = 1024;
    piece.strides[1] = 4;
    registration.tensors.push_back(
        {.name = name, .dtype = DType::kF32, .shape = *Shape::Create(dims)});
    registration.pieces.push_back(piece);
  }
  registration.segment_bytes = {2 * 40 * 1024 + 128};
  return registration;
}

class PieceWorkTest : public ::testing::Test {
 protected:
  PieceWorkTest()
      : pieces_(std::make_shared<const PieceIndex>(TwoTensors(), "policy")),
        a_(*CreateTwin("a", pieces_->registration().segment_bytes)),
        b_(*CreateTwin("b", pieces_->registration().segment_bytes)) {
    std::mt19937 random(3);
    for (std::uint64_t i = 0; i < a_->segment_bytes()[0]; ++i) {
      a_->bases()[0][i] = static_cast<std::byte>(random());
    }
  }
  ~PieceWorkTest() override {
    pool_.Stop();
    executor_.Stop();
  }
  template <typename T>
  T Await(const std::function<void(std::function<void(T)>)>& start) {
    Mutex mutex;
    CondVar changed;
    std::optional<T> out;
    start([&](T value) {
      MutexLock lock(mutex);
      out = std::move(value);
      changed.NotifyAll();
    });
    MutexLock lock(mutex);
    const TimePoint deadline = testing::Soon();
    while (!out.has_value()) TB_CHECK(changed.WaitUntil(mutex, deadline));
    return *std::move(out);
  }

  ThreadExecutor executor_{"test"};
  WorkPool pool_{"test", 2};
  std::shared_ptr<const PieceIndex> pieces_;
  std::shared_ptr<const MemoryAccess> a_;
  std::shared_ptr<const MemoryAccess> b_;
};

TEST_F(PieceWorkTest, CopiesPiecesAndNothingBetweenThem) {
  ASSERT_OK(Await<Status>([&](auto done) {
    CopyPieces({pool_, executor_}, pieces_, a_, b_, done);
  }));
  EXPECT_EQ(std::memcmp(a_->bases()[0] + 64, b_->bases()[0] + 64, 2 * 40 * 1024), 0);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(b_->bases()[0][i], std::byte{0}) << "before the pieces";
}

TEST_F(PieceWorkTest, DigestsTellWhichPieceDiffers) {
  using Sums = Result<std::vector<DigestSum>>;
  ASSERT_OK(Await<Status>([&](auto done) {
    CopyPieces({pool_, executor_}, pieces_, a_, b_, done);
  }));
  const auto digest = [&](const std::shared_ptr<const MemoryAccess>& memory) {
    return *Await<Sums>([&](auto done) {
      DigestPieces({pool_, executor_}, pieces_, memory, done);
    });
  };
  EXPECT_EQ(FirstDifference(digest(a_), digest(b_)), -1);
  b_->bases()[0][64 + 41 * 1024] ^= std::byte{1};
  EXPECT_EQ(FirstDifference(digest(a_), digest(b_)), 1);
  EXPECT_EQ(pieces_->NameOf(1), "b[0:40, 0:256]");
}

TEST(CheckRegistration, RefusesSegmentsThatWereNotAttached) {
  const auto memory = *CreateTwin("m", std::vector<std::uint64_t>{4096});
  RankIdentity identity{.channel = "c",
                        .job = "j",
                        .role = Role::kProducer,
                        .replica = 0,
                        .rank = 0,
                        .rank_count = 1};
  wire::Register asked;
  asked.registration = Transposed();
  asked.registration.segment_bytes = {8192};
  EXPECT_THAT(CheckRegistration(identity, asked, *memory),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  asked.registration.segment_bytes = {4096, 4096};
  EXPECT_THAT(CheckRegistration(identity, asked, *memory),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  asked.registration.segment_bytes = {4096};
  asked.registration.pieces[0].offset = 4090;
  EXPECT_FALSE(CheckRegistration(identity, asked, *memory).ok()) << "beyond its segment";
  asked.registration.pieces[0].offset = 12;
  ASSERT_OK(CheckRegistration(identity, asked, *memory));
}

TEST(CheckRegistration, RefusesTargetsThatOverlapInMemory) {
  const auto memory = *CreateTwin("m", std::vector<std::uint64_t>{4096});
  RankIdentity identity{.channel = "c",
                        .job = "j",
                        .role = Role::kConsumer,
                        .replica = 0,
                        .rank = 0,
                        .rank_count = 1};
  wire::Register asked;
  asked.registration = Transposed();
  Piece second = asked.registration.pieces[0];
  second.box = BoxOf({{6, 8}, {1, 5}});
  asked.registration.pieces.push_back(second);
  EXPECT_FALSE(CheckRegistration(identity, asked, *memory).ok());
  identity.role = Role::kProducer;
  EXPECT_OK(CheckRegistration(identity, asked, *memory)) << "a source may be read twice";
}

TEST(CheckRegistration, RefusesMoreMemoryThanThereIsBeforeTouchingAny) {
  // Sparse: 16 TiB of address space without a page behind it.
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 44;
  const auto memory = CreateTwin("huge", std::vector<std::uint64_t>{kBytes});
  if (!memory.ok()) GTEST_SKIP() << "no such address space here: " << memory.status();
  const RankIdentity identity{.channel = "c",
                              .job = "j",
                              .role = Role::kConsumer,
                              .replica = 0,
                              .rank = 0,
                              .rank_count = 1};
  wire::Register asked;
  const std::array<std::uint64_t, 1> dims = {kBytes};
  asked.registration.tensors.push_back(
      {.name = "t", .dtype = DType::kU8, .shape = *Shape::Create(dims)});
  asked.registration.segment_bytes = {kBytes};
  Piece piece;
  piece.box = Box::Whole(asked.registration.tensors[0].shape);
  piece.strides[0] = 1 << 20;  // a byte of every MiB, so that looking is quick
  piece.box[0].hi = kBytes >> 20;
  asked.registration.pieces.push_back(piece);
  const auto refused = CheckRegistration(identity, asked, **memory);
  EXPECT_THAT(refused, IsStatus(Code::kResourceExhausted, Reason::kOutOfMemory));
  EXPECT_THAT(refused.status().message(), ::testing::HasSubstr("more memory"))
      << "names the remedy";
  EXPECT_THAT(refused.status().message(), ::testing::Not(::testing::HasSubstr("in_place")))
      << "this memory is in_place already";
}

TEST(AvailableBytes, TakesTheTighterOfMachineAndCgroup) {
  EXPECT_EQ(AvailableBytes("MemTotal: 10 kB\nMemAvailable:    5 kB\n", "", ""), 5U << 10);
  EXPECT_EQ(AvailableBytes("MemAvailable:    5 kB\n", "max\n", "100\n"), 5U << 10);
  EXPECT_EQ(AvailableBytes("MemAvailable:    5 kB\n", "3072\n", "1024\n"), 2U << 10);
  EXPECT_EQ(AvailableBytes("MemAvailable:    5 kB\n", "1024\n", "4096\n"), 0U);
  EXPECT_EQ(AvailableBytes("", "", ""), ~std::uint64_t{0}) << "unknown";
}

TEST(MissingBytes, CountsPagesThatNobodyTouched) {
  const auto memory = *CreateTwin("m", std::vector<std::uint64_t>{64 << 10});
  const std::span<std::byte> all(memory->bases()[0], 64 << 10);
  const std::array<std::span<std::byte>, 1> parts = {all};
  EXPECT_EQ(MissingBytes(parts, 1 << 20), 64U << 10);
  all[5000] = std::byte{1};
  EXPECT_EQ(MissingBytes(parts, 1 << 20), 60U << 10);
}

}  // namespace
}  // namespace tensorbus::agent
