#include "tensorbus/daemon/digest_compare.h"

#include <gtest/gtest.h>

#include "tensorbus/daemon/assembly.h"
#include "tensorbus/rpc/convert.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::daemon {
namespace {

/// One rank that holds [lo, hi) of a tensor of 12 f32 elements.
DigestHolder Holder(const std::string& job, Role role, std::uint64_t lo, std::uint64_t hi) {
  const std::uint64_t dims[] = {12};
  const Range range[] = {{lo, hi}};
  RankLayout layout;
  layout.tensors.push_back(
      {.spec = {.name = "w", .dtype = DType::kF32, .shape = Shape::Create(dims).value()},
       .boxes = {Box(std::span<const Range>(range))}});
  const auto blob = std::make_shared<const std::string>(rpc::ToString(Serialize(layout)));
  return {
      .identity =
          {.channel = "policy", .job = job, .role = role, .replica = 0, .rank = 0, .rank_count = 1},
      .agent = "a",
      .version = Version{1},
      .layout = Assemble({{.rank = 0, .blob = blob, .bytes = 0, .claim = {}}}).value()};
}

/// A digest that adds up over elements, as the real one does.
DigestSum SumOf(const Box& box, std::uint64_t flaw = 0) {
  DigestSum sum;
  for (std::uint64_t i = box[0].lo; i < box[0].hi; ++i) sum.a += i * i + 1;
  sum.a += flaw;
  sum.bytes = box.volume() * 4;
  return sum;
}

class DigestCompare : public ::testing::Test {
 protected:
  proto::VerifyReply Compare(std::size_t broken_holder, std::uint64_t flaw) {
    atoms_ = MakeAtoms(holders_).value();
    std::vector<std::vector<DigestSum>> digests(holders_.size());
    for (std::size_t h = 0; h < holders_.size(); ++h) {
      for (const std::uint32_t atom : atoms_.of_holder[h]) {
        const Box& box = atoms_.atoms[atom].box;
        const bool here = h == broken_holder && box[0].lo <= 7 && 7 < box[0].hi;
        digests[h].push_back(SumOf(box, here ? flaw : 0));
      }
    }
    proto::VerifyReply reply;
    CompareDigests(holders_, atoms_, digests, &reply);
    return reply;
  }

  std::vector<DigestHolder> holders_ = {
      Holder("trainer", Role::kProducer, 0, 8), Holder("rest", Role::kProducer, 8, 12),
      Holder("one", Role::kConsumer, 0, 12), Holder("two", Role::kConsumer, 6, 12)};
  DigestAtoms atoms_;
};

TEST_F(DigestCompare, CutsTensorsAlongEveryHoldersEdges) {
  Compare(0, 0);
  ASSERT_EQ(atoms_.atoms.size(), 3U);  // [0,6) [6,8) [8,12)
  EXPECT_EQ(atoms_.of_holder[0], (std::vector<std::uint32_t>{0, 1}));
  EXPECT_EQ(atoms_.of_holder[2], (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_EQ(atoms_.of_holder[3], (std::vector<std::uint32_t>{1, 2}));
}

TEST_F(DigestCompare, FindsEqualHoldersEqual) {
  const proto::VerifyReply reply = Compare(0, 0);
  EXPECT_TRUE(reply.equal());
  EXPECT_EQ(reply.holder_count(), 4U);
  EXPECT_EQ(reply.bytes(), (8 + 4 + 12 + 6) * 4U);
  ASSERT_EQ(reply.tensors_size(), 1);
  const std::uint64_t dims[] = {12};
  EXPECT_EQ(reply.tensors(0).digest().a(), SumOf(Box::Whole(Shape::Create(dims).value())).a);
}

TEST_F(DigestCompare, NamesTheReplicaTensorAndBoxThatDiffer) {
  const proto::VerifyReply reply = Compare(3, 1);
  EXPECT_FALSE(reply.equal());
  ASSERT_EQ(reply.faults_size(), 1);
  EXPECT_EQ(reply.faults(0).tensor(), "w");
  EXPECT_EQ(reply.faults(0).box().lo(0), 6U);
  EXPECT_EQ(reply.faults(0).holder(), holders_[3].identity.ToString());
  EXPECT_EQ(reply.faults(0).against(), holders_[0].identity.ToString());
}

TEST_F(DigestCompare, GoesWithTheMajorityWhereNoProducerHoldsIt) {
  holders_ = {Holder("one", Role::kConsumer, 0, 12), Holder("two", Role::kConsumer, 0, 12),
              Holder("three", Role::kConsumer, 0, 12)};
  const proto::VerifyReply reply = Compare(0, 5);
  ASSERT_EQ(reply.faults_size(), 1);
  EXPECT_EQ(reply.faults(0).holder(), holders_[0].identity.ToString());
}

TEST_F(DigestCompare, TellsNoDigestOfATensorThatNobodyHoldsWhole) {
  holders_ = {Holder("one", Role::kConsumer, 0, 8), Holder("two", Role::kConsumer, 6, 11)};
  const proto::VerifyReply reply = Compare(0, 0);
  EXPECT_TRUE(reply.equal());
  EXPECT_EQ(reply.tensors_size(), 0);
}

}  // namespace
}  // namespace tensorbus::daemon
