#include "planner/views.h"

#include <fstream>
#include <map>
#include <sstream>

#include "planner/buffer_view.h"
#include "tensorbus/formats/json_fields.h"
#include "tensorbus/formats/view_file.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::planner {
namespace {

using formats::Json;
using ::testing::HasSubstr;
using testing::IsStatus;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Index within a tensor -> byte offset, element by element.
std::map<std::vector<std::uint64_t>, std::uint64_t> Places(const Registration& registration,
                                                           std::uint32_t tensor) {
  std::map<std::vector<std::uint64_t>, std::uint64_t> places;
  for (const Piece& piece : registration.pieces) {
    if (piece.tensor != tensor) continue;
    std::vector<std::uint64_t> extents;
    for (const Range& range : piece.box.ranges()) extents.push_back(range.size());
    ForEachIndex(MakeShape(extents), [&](std::vector<std::uint64_t> at) {
      std::uint64_t offset = piece.offset;
      for (std::size_t d = 0; d < at.size(); ++d) {
        offset += at[d] * piece.strides[d];
        at[d] += piece.box[static_cast<int>(d)].lo;
      }
      EXPECT_TRUE(places.emplace(at, offset).second);
    });
  }
  return places;
}

TEST(Views, AgreeWithNumpy) {
  const Json cases = Json::parse(ReadFile(std::string(TENSORBUS_TEST_DATA) + "/views.json"));
  ASSERT_GT(cases.size(), 100U);
  for (const Json& c : cases) {
    SCOPED_TRACE(c["views"].dump());
    ASSERT_OK_AND_ASSIGN(const ViewFile views, formats::ParseViewFile(c["views"].dump()));
    std::vector<TensorSpec> tensors;
    for (const Json& tensor : c["tensors"])
      tensors.push_back(formats::ParseTensorSpec(tensor).value());
    const std::vector<std::uint64_t> segments = {6 + 2 * views.buffers[0].shape.elements()};
    ASSERT_OK_AND_ASSIGN(const Registration registration, ResolveViews(tensors, views, segments));
    EXPECT_OK(Validate(registration, 0, true));
    for (std::uint32_t t = 0; t < tensors.size(); ++t) {
      const Json& expect = c["expect"][t];
      std::vector<std::uint64_t> extents;
      for (const Json& range : expect["box"])
        extents.push_back(range[1].get<std::uint64_t>() - range[0].get<std::uint64_t>());
      const auto places = Places(registration, t);
      ASSERT_EQ(places.size(), expect["elements"].size());
      std::size_t i = 0;
      ForEachIndex(MakeShape(extents), [&](std::vector<std::uint64_t> at) {
        for (std::size_t d = 0; d < at.size(); ++d)
          at[d] += expect["box"][d][0].get<std::uint64_t>();
        ASSERT_EQ(places.at(at), 6 + 2 * expect["elements"][i++].get<std::uint64_t>());
      });
    }
  }
}

/// Stacked experts: w13 [2, 2·3, 4] holds gate and up of experts 5 and 6.
TEST(Views, StackedExpertsFindTheirMatrices) {
  const std::vector<TensorSpec> tensors = {{"e.5.gate", DType::kBf16, MakeShape({3, 4})},
                                           {"e.5.up", DType::kBf16, MakeShape({3, 4})},
                                           {"e.6.gate", DType::kBf16, MakeShape({3, 4})},
                                           {"e.6.up", DType::kBf16, MakeShape({3, 4})}};
  const auto views = formats::ParseViewFile(R"({"format": "tensorbus-views-1",
    "buffers": [{"name": "w13", "dtype": "bf16", "shape": [2, 6, 4]}],
    "views": [
      {"buffer": "w13", "steps": [["select", 0, 0]],
       "concatenate": {"dim": 0, "parts": [{"tensor": "e.5.gate"}, {"tensor": "e.5.up"}]}},
      {"buffer": "w13", "steps": [["select", 0, 1]],
       "concatenate": {"dim": 0, "parts": [{"tensor": "e.6.gate"}, {"tensor": "e.6.up"}]}}]})");
  ASSERT_OK(views);
  const std::vector<std::uint64_t> segments = {96};
  ASSERT_OK_AND_ASSIGN(const Registration registration, ResolveViews(tensors, *views, segments));
  ASSERT_EQ(registration.pieces.size(), 4U);
  EXPECT_EQ(registration.pieces[3].offset, (6U + 3U) * 4 * 2);
  EXPECT_OK(Validate(registration, 0, true));
}

class ViewFaults : public ::testing::Test {
 protected:
  ViewFaults() {
    file_.buffers = {{"qkv", 0, 0, DType::kF32, MakeShape({8, 2})}};
    ViewSpec view;
    view.buffer = "qkv";
    view.fill = ViewSpec::Fill::kConcatenate;
    view.parts = {{"q.weight", {}, true, 0}, {"k.weight", {}, true, 0}};
    file_.views = {view};
    tensors_ = {{"q.weight", DType::kF32, MakeShape({6, 2})},
                {"k.weight", DType::kF32, MakeShape({2, 2})}};
  }
  Status Resolve() const { return ResolveViews(tensors_, file_, segments_).status(); }

  ViewFile file_;
  std::vector<TensorSpec> tensors_;
  std::vector<std::uint64_t> segments_ = {64, 64};
};

TEST_F(ViewFaults, UnmappedAndUnknownNamesListCandidates) {
  EXPECT_OK(Resolve());
  file_.views[0].parts[0].tensor = "q_weight";
  const Status unknown = Resolve();
  EXPECT_THAT(unknown, IsStatus(Code::kInvalidArgument, Reason::kUnknownTensor));
  EXPECT_THAT(unknown.message(), HasSubstr("buffer 'qkv': no tensor 'q_weight'; near: 'q.weight'"));
  file_.views[0].parts[0].tensor = "q.weight";
  tensors_.push_back({"qkv.bias", DType::kF32, MakeShape({2})});
  EXPECT_THAT(Resolve().message(), HasSubstr("'qkv.bias' is mapped by no view"));
  file_.left_out = {"qkv.bias"};
  EXPECT_OK(Resolve());
  file_.views[0].buffer = "qkvs";
  EXPECT_THAT(Resolve().message(), HasSubstr("no buffer 'qkvs'; near: 'qkv'"));
}

TEST_F(ViewFaults, DoublyMappedPartsNeedTheWordAlias) {
  file_.buffers.push_back({"copy", 1, 0, DType::kF32, MakeShape({6, 2})});
  ViewSpec again;
  again.buffer = "copy";
  again.parts = {{"q.weight", {}, true, 0}};
  file_.views.push_back(again);
  const Status twice = Resolve();
  EXPECT_THAT(twice, IsStatus(Code::kInvalidArgument, Reason::kOverlap));
  EXPECT_THAT(twice.message(), HasSubstr("buffer 'qkv' maps [0:6, 0:2] already"));
  file_.views[1].alias = true;
  EXPECT_OK(Resolve());
}

TEST_F(ViewFaults, SizesAndDtypesMustAgree) {
  tensors_[0].dtype = DType::kI32;
  EXPECT_THAT(Resolve(), IsStatus(Code::kInvalidArgument, Reason::kDtypeMismatch));
  tensors_[0].dtype = DType::kF32;
  tensors_[0].shape = MakeShape({5, 2});
  EXPECT_THAT(Resolve().message(), HasSubstr("fill 7 of 8"));
  tensors_[0].shape = MakeShape({6, 3});
  EXPECT_THAT(Resolve().message(), HasSubstr("cannot hold box"));
  tensors_[0].shape = MakeShape({6, 2});
  segments_[0] = 63;
  EXPECT_THAT(Resolve().message(), HasSubstr("past the end of segment"));
}

TEST(BufferView, RefusesStepsThatDoNotFit) {
  const BufferView view = BufferView::Whole({"b", 0, 0, DType::kF32, MakeShape({4, 6})});
  const std::uint64_t huge = ~std::uint64_t{0};
  for (const auto& result :
       {view.Narrow(2, 0, 1), view.Narrow(-3, 0, 1), view.Narrow(0, 3, 2), view.Narrow(0, huge, 2),
        view.Narrow(0, 1, huge), view.Narrow(1, 0, 4, 2), view.Narrow(1, 0, 2, 0),
        view.Select(0, 4), view.Permute({0}), view.Permute({0, 0}), view.Permute({0, 2}),
        view.Split(1, {4, 2}), view.Split(1, {}), view.Split(1, {huge, huge}),
        view.Split(0, std::vector<std::uint64_t>(40, 1))}) {
    EXPECT_THAT(result, IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  }
}

TEST(BufferView, ManyPiecesAreRefused) {
  const BufferView view =
      BufferView::Whole({"b", 0, 0, DType::kU8, MakeShape({1 << 17, 4})}).Narrow(1, 0, 2).value();
  EXPECT_THAT(view.Attach(0, MakeBox({{0, 1 << 18}})).status().message(),
              HasSubstr("more than 65536 pieces"));
}

}  // namespace
}  // namespace tensorbus::planner
