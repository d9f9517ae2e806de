#include "tensorbus/types/layout.h"

#include <cstring>

#include "tensorbus/types/layout_combiner.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/types/make_box.h"

namespace tensorbus {
namespace {

using ::testing::HasSubstr;
using testing::IsStatus;

Shape MakeShape(std::vector<std::uint64_t> dims) {
  return Shape::Create(dims).value();
}
TensorSpec Spec(std::string name, std::vector<std::uint64_t> dims, DType dtype = DType::kBf16) {
  return {std::move(name), dtype, MakeShape(std::move(dims))};
}

/// Two ranks that share 'a' by rows; rank 1 alone holds the scalar 'b'; nobody holds 'c'.
std::vector<RankLayout> TwoRanks() {
  RankLayout zero;
  zero.tensors.push_back({Spec("a", {7, 5}), {MakeBox({{0, 4}, {0, 5}})}});
  zero.tensors.push_back({Spec("b", {}, DType::kF32), {}});
  RankLayout one;
  one.tensors.push_back({Spec("c", {0, 3}), {}});
  one.tensors.push_back(
      {Spec("a", {7, 5}), {MakeBox({{4, 6}, {0, 5}}), MakeBox({{6, 7}, {0, 5}})}});
  one.tensors.push_back({Spec("b", {}, DType::kF32), {Box()}});
  return {zero, one};
}

Result<JobLayout> Combine(const std::vector<RankLayout>& ranks) {
  LayoutCombiner combiner;
  for (const RankLayout& rank : ranks) TB_RETURN_IF_ERROR(combiner.Add(rank));
  return std::move(combiner).Finish();
}

TEST(LayoutCombiner, PutsRanksTogether) {
  ASSERT_OK_AND_ASSIGN(const JobLayout job, Combine(TwoRanks()));
  EXPECT_OK(Validate(job));
  EXPECT_EQ(job.rank_count, 2U);
  ASSERT_EQ(job.tensors.size(), 3U);
  EXPECT_EQ(job.tensors[0].spec.name, "a");
  EXPECT_EQ(job.tensors[2].spec.name, "c");
  const Holding& a = job.HoldingOf(job.tensors[0]);
  ASSERT_EQ(a.ranks.size(), 2U);
  EXPECT_EQ(a.ranks[1].boxes.size(), 2U);
  const Holding& b = job.HoldingOf(job.tensors[1]);
  ASSERT_EQ(b.ranks.size(), 1U);
  EXPECT_EQ(b.ranks[0].rank, 1U);
  EXPECT_TRUE(job.HoldingOf(job.tensors[2]).ranks.empty());
}

TEST(LayoutCombiner, StoresEqualHoldingsOnce) {
  RankLayout rank;
  for (int i = 0; i < 1000; ++i)
    rank.tensors.push_back({Spec(std::to_string(i), {4}), {MakeBox({{0, 4}})}});
  ASSERT_OK_AND_ASSIGN(const JobLayout job, Combine(std::vector{rank, rank}));
  EXPECT_EQ(job.holdings.size(), 1U);
}

TEST(LayoutCombiner, RefusesRanksThatDisagree) {
  auto ranks = TwoRanks();
  ranks[1].tensors[1].spec.dtype = DType::kF16;
  EXPECT_THAT(Combine(ranks), IsStatus(Code::kInvalidArgument, Reason::kDtypeMismatch));
  ranks = TwoRanks();
  ranks[1].tensors[1].spec.shape = MakeShape({7, 6});
  const auto result = Combine(ranks);
  EXPECT_THAT(result, IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  EXPECT_THAT(result.status().message(), HasSubstr("'a'"));
  EXPECT_THAT(result.status().message(), HasSubstr("rank 1"));
  EXPECT_THAT(Combine({}), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST(ValidateRankLayout, RefusesEachFaultByName) {
  const auto fault = [](auto change) {
    RankLayout layout = TwoRanks()[1];
    change(layout);
    return Validate(layout, 1);
  };
  EXPECT_OK(fault([](RankLayout&) {}));
  EXPECT_THAT(fault([](RankLayout& l) { l.tensors[2].spec.name = "a"; }).message(),
              HasSubstr("'a' appears twice"));
  EXPECT_THAT(fault([](RankLayout& l) { l.tensors[2].spec.name = ""; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(fault([](RankLayout& l) { l.tensors[2].spec.name.assign(kMaxNameBytes + 1, 'x'); }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  const Status overlap = fault([](RankLayout& l) { l.tensors[1].boxes[0][0].hi = 7; });
  EXPECT_THAT(overlap, IsStatus(Code::kInvalidArgument, Reason::kOverlap));
  EXPECT_THAT(overlap.message(), HasSubstr("tensor 'a': rank 1: boxes [4:7, 0:5] and [6:7, 0:5]"));
  EXPECT_THAT(fault([](RankLayout& l) { l.tensors[1].boxes[1][0].hi = 8; }),
              IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  EXPECT_THAT(fault([](RankLayout& l) { l.tensors[1].boxes[1] = Box(); }),
              IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  EXPECT_THAT(fault([](RankLayout& l) { l.tensors[1].boxes[1][0].hi = 6; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(fault([](RankLayout& l) { l.tensors[1].spec.shape = MakeShape({kMaxTensorBytes}); }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(Validate(RankLayout(), kMaxRanks),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST(ValidateJobLayout, RefusesEachFaultByName) {
  const auto fault = [](auto change) {
    JobLayout job = Combine(TwoRanks()).value();
    change(job);
    return Validate(job);
  };
  EXPECT_OK(fault([](JobLayout&) {}));
  EXPECT_THAT(fault([](JobLayout& j) { j.tensors[1].holding = 9; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(fault([](JobLayout& j) { j.rank_count = 1; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(fault([](JobLayout& j) { j.rank_count = kMaxRanks + 1; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(
      fault([](JobLayout& j) { std::swap(j.holdings[0].ranks[0], j.holdings[0].ranks[1]); }),
      IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(fault([](JobLayout& j) { j.holdings[0].ranks[0].boxes.clear(); }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  const Status misfit = fault([](JobLayout& j) { j.tensors[0].spec.shape = MakeShape({6, 5}); });
  EXPECT_THAT(misfit, IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  EXPECT_THAT(misfit.message(), HasSubstr("tensor 'a': rank 1: box [6:7, 0:5]"));
  EXPECT_THAT(fault([](JobLayout& j) { j.holdings[0].ranks[1].boxes[0][0].hi = 7; }),
              IsStatus(Code::kInvalidArgument, Reason::kOverlap));
  EXPECT_THAT(fault([](JobLayout& j) {
                j.holdings.push_back({{{5, {Box()}}}});  // used by no tensor, yet checked
              }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST(LayoutHash, DependsOnEveryField) {
  const JobLayout job = Combine(TwoRanks()).value();
  EXPECT_EQ(HashOf(job), HashOf(JobLayout(job)));
  JobLayout other = job;
  other.tensors[0].spec.dtype = DType::kF16;
  EXPECT_NE(HashOf(job), HashOf(other));
  other = job;
  other.holdings[0].ranks[0].boxes[0][0].hi = 3;
  EXPECT_NE(HashOf(job), HashOf(other));
  RankLayout rank = TwoRanks()[1];
  const Hash128 before = HashOf(rank);
  std::swap(rank.tensors[1].boxes[0], rank.tensors[1].boxes[1]);
  EXPECT_NE(HashOf(rank), before);
}

TEST(LayoutBytes, RoundTrip) {
  const JobLayout job = Combine(TwoRanks()).value();
  ASSERT_OK_AND_ASSIGN(const JobLayout same, ParseJobLayout(Serialize(job)));
  EXPECT_EQ(same, job);
  const RankLayout rank = TwoRanks()[1];
  ASSERT_OK_AND_ASSIGN(const RankLayout same_rank, ParseRankLayout(Serialize(rank), 1));
  EXPECT_EQ(same_rank, rank);
}

TEST(LayoutBytes, EveryTruncationAndBitFlipIsHandled) {
  const std::vector<std::byte> job = Serialize(Combine(TwoRanks()).value());
  const std::vector<std::byte> rank = Serialize(TwoRanks()[1]);
  for (std::size_t keep = 0; keep < job.size(); ++keep)
    EXPECT_FALSE(ParseJobLayout(std::span(job).first(keep)).ok()) << keep;
  for (std::size_t keep = 0; keep < rank.size(); ++keep)
    EXPECT_FALSE(ParseRankLayout(std::span(rank).first(keep), 1).ok()) << keep;
  for (std::size_t bit = 0; bit < job.size() * 8; ++bit) {
    std::vector<std::byte> bad = job;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto parsed = ParseJobLayout(bad);
    if (parsed.ok()) {
      EXPECT_OK(Validate(*parsed));
    }
  }
}

TEST(LayoutBytes, ManyBoxesWithoutDimensionsAreRefusedBeforeTheyAreStored) {
  std::vector<std::byte> bytes = Serialize(RankLayout{{{Spec("s", {}), {Box()}}}});
  bytes.resize(bytes.size() + 1'000'000);
  const std::uint32_t count = 1'000'001;
  std::memcpy(bytes.data() + bytes.size() - 1'000'000 - 5, &count, sizeof count);
  EXPECT_THAT(ParseRankLayout(bytes, 0), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

}  // namespace
}  // namespace tensorbus
