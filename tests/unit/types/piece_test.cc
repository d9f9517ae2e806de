#include "tensorbus/types/piece.h"

#include "tests/testing/status_matchers.h"
#include "tests/unit/types/make_box.h"

namespace tensorbus {
namespace {

using ::testing::HasSubstr;
using testing::IsStatus;

/// A fused buffer [8, 4] of f32: rows 0-3 hold rows 4-7 of 'q', rows 4-7 the even rows of 'k'.
Registration Fused() {
  Registration r;
  const std::vector<std::uint64_t> dims = {8, 4};
  r.tensors = {{"q", DType::kF32, Shape::Create(dims).value()},
               {"k", DType::kF32, Shape::Create(dims).value()}};
  r.segment_bytes = {128};
  r.pieces = {{0, 0, MakeBox({{4, 8}, {0, 4}}), 0, {16, 4}},
              {1, 0, MakeBox({{0, 4}, {0, 4}}), 64, {16, 4}}};
  return r;
}

TEST(ValidateRegistration, AcceptsAFusedBuffer) {
  EXPECT_OK(Validate(Fused(), 0, true));
  EXPECT_EQ(EndOffset(Fused().pieces[1], 4), 128U);
  const RankLayout layout = LayoutOf(Fused());
  ASSERT_EQ(layout.tensors.size(), 2U);
  EXPECT_EQ(layout.tensors[0].boxes, std::vector{MakeBox({{4, 8}, {0, 4}})});
}

TEST(ValidateRegistration, AliasesAreOneBoxOfTheLayout) {
  Registration r = Fused();
  r.segment_bytes = {128, 64};
  Piece alias = r.pieces[0];
  alias.segment = 1;
  r.pieces.push_back(alias);
  EXPECT_OK(Validate(r, 0, true));
  EXPECT_EQ(LayoutOf(r).tensors[0].boxes.size(), 1U);
  r.pieces.push_back(alias);  // the very same place twice is one piece
  EXPECT_OK(Validate(r, 0, true));
}

TEST(ValidateRegistration, RefusesEachFaultByName) {
  const auto fault = [](auto change) {
    Registration r = Fused();
    change(r);
    return Validate(r, 3, true);
  };
  EXPECT_THAT(fault([](Registration& r) { r.pieces[0].tensor = 2; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(fault([](Registration& r) { r.pieces[0].segment = 1; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(fault([](Registration& r) { r.pieces[0].box[0].hi = 9; }),
              IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  EXPECT_THAT(fault([](Registration& r) { r.pieces[0].box[0].hi = 4; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(fault([](Registration& r) { r.pieces[0].box = Box(); }),
              IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  EXPECT_THAT(fault([](Registration& r) { r.pieces[1].offset = 65; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(fault([](Registration& r) { r.pieces[1].strides[0] = ~std::uint64_t{0} / 2; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(fault([](Registration& r) { r.tensors[1].name = r.tensors[0].name; }),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  const Status status = fault([](Registration& r) {
    r.pieces[1] = r.pieces[0];
    r.pieces[1].box[0] = {5, 8};
  });
  EXPECT_THAT(status, IsStatus(Code::kInvalidArgument, Reason::kOverlap));
  EXPECT_THAT(status.message(), HasSubstr("rank 3: tensor 'q'"));
}

TEST(ValidateRegistration, OnlyTargetsMustBeDisjointInMemory) {
  Registration r = Fused();
  r.pieces[1].offset = 60;
  EXPECT_OK(Validate(r, 0, false));
  const Status status = Validate(r, 0, true);
  EXPECT_THAT(status, IsStatus(Code::kInvalidArgument, Reason::kOverlap));
  EXPECT_THAT(status.message(), HasSubstr("'k' box [0:4, 0:4] overlap in memory"));
  r = Fused();
  r.pieces[0].strides[0] = 12;
  EXPECT_OK(Validate(r, 0, false));
  EXPECT_THAT(Validate(r, 0, true), IsStatus(Code::kInvalidArgument, Reason::kOverlap));
}

TEST(ValidateRegistration, InterleavedRowsAreDisjoint) {
  Registration r = Fused();
  r.pieces[0].strides = {32, 4};
  r.pieces[1].strides = {32, 4};
  r.pieces[1].offset = 16;
  EXPECT_OK(Validate(r, 0, true));
  r.pieces[1].offset = 12;
  EXPECT_THAT(Validate(r, 0, true), IsStatus(Code::kInvalidArgument, Reason::kOverlap));
}

}  // namespace
}  // namespace tensorbus
