#include "tensorbus/formats/layout_file.h"

#include <filesystem>
#include <fstream>
#include <unistd.h>
#include <zlib.h>

#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json.h"
#include "tensorbus/formats/manifest_file.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::formats {
namespace {

using ::testing::HasSubstr;
using testing::IsStatus;

constexpr const char* kGood = R"json({"format": "tensorbus-layout-1", "ranks": 4, "tensors": [
  {"name": "a", "dtype": "bf16", "shape": [7, 5],
   "mesh": [["fsdp", 2], ["tp", 2]], "placements": ["Shard(0)", "Shard(1)"]
},
  {"name": "b", "dtype": "F32", "shape": [10],
   "boxes": [[[[0, 3]]], [[[3, 10]]], [], [[[0, 2]], [[8, 10]]]]},
  {"name": "c", "dtype": "i64", "shape": [], "boxes": [[[]], [], [], []]},
  {"name": "d", "dtype": "u8", "shape": [4], "mesh": [["x", 2]], "placements": ["Shard(-1)"],
   "rank_ids": [3, 1]}]
})json";

TEST(LayoutFile, ReadsMeshesAndBoxes) {
  ASSERT_OK_AND_ASSIGN(const JobLayout layout, ParseLayoutFile(kGood));
  EXPECT_EQ(layout.rank_count, 4U);
  ASSERT_EQ(layout.tensors.size(), 4U);
  const Holding& a = layout.HoldingOf(layout.tensors[0]);
  EXPECT_EQ(a.ranks[3].boxes[0].ToString(), "[4:7, 3:5]");
  EXPECT_EQ(layout.tensors[1].spec.dtype, DType::kF32);
  EXPECT_EQ(layout.HoldingOf(layout.tensors[1]).ranks[2].boxes.size(), 2U);
  EXPECT_EQ(layout.HoldingOf(layout.tensors[2]).ranks[0].boxes[0].volume(), 1U);
  EXPECT_EQ(layout.HoldingOf(layout.tensors[3]).ranks[0].rank, 1U);
  ASSERT_OK_AND_ASSIGN(const JobLayout again, ParseLayoutFile(WriteLayoutFile(layout)));
  EXPECT_EQ(again, layout);
}

/// One fault each, and what the message must name.
struct BadInput {
  const char* tensor;
  const char* names;
};

TEST(LayoutFile, NamesTensorRankAndField) {
  const BadInput cases[] = {
      {R"json({"dtype": "f32", "shape": [4], "boxes": [[], []]})json", "'name' is missing"},
      {R"json({"name": 3, "dtype": "f32", "shape": [4], "boxes": [[], []]})json",
       "'name': a string"},
      {R"json({"name": "t", "dtype": "f31", "shape": [4], "boxes": [[], []]})json",
       "'t': field 'dtype'"},
      {R"json({"name": "t", "dtype": "f32", "shape": [-1], "boxes": [[], []]})json",
       "'t': field 'shape'"},
      {R"json({"name": "t", "dtype": "f32", "shape": [1.5], "boxes": [[], []]})json", "not 1.5"},
      {R"json({"name": "t", "dtype": "f32", "shape": "4", "boxes": [[], []]})json",
       "'shape': a list"},
      {R"json({"name": "t", "dtype": "f32", "shape": [99999999999999999999], "boxes": [[], []]})json",
       "field 'shape'"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4294967296, 4294967296], "boxes": [[], []]})json",
       "field 'shape'"},
      {R"json({"name": "t", "dtype": "f32", "shape": [1,1,1,1,1,1,1,1,1], "boxes": [[], []]})json",
       "9 dimensions"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4]})json",
       "needs 'mesh' and 'placements', or 'boxes'"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "boxes": [[]]})json", "'boxes': 1 ranks"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "boxes": [[], [[[0, 5]]]]})json",
       "'t': rank 1: field 'boxes': box 0: [0:5] does not fit"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "boxes": [[], [[[3, 2]]]]})json",
       "rank 1"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "boxes": [[], [[[-1, 2]]]]})json",
       "rank 1"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "boxes": [[], [[[0]]]]})json", "a pair"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "boxes": [[], [[[0, 3]], [[2, 4]]]]})json",
       "tensor 't': rank 1: boxes [0:3] and [2:4] overlap"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "mesh": [["x", 3]], "placements": ["Shard(0)"]})json",
       "3 ranks"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "mesh": [["x", 2]], "placements": ["Shard(1)"]})json",
       "Shard(1)"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "mesh": [["x", 2]], "placements": ["Half(0)"]})json",
       "unknown placement 'Half(0)'"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "mesh": [["x", 2]], "placements": ["Partial(sum)"]})json",
       "Partial"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "mesh": [["x", 2]], "placements": [],
           "boxes": [[], []]})json",
       "exclude each other"},
      {R"json({"name": "t", "dtype": "f32", "shape": [4], "mesh": [["x", 2]], "placements": ["Replicate"],
           "rank_ids": [0, 2]})json",
       "rank_ids"},
      {"17", "an object is needed, not 17"},
  };
  for (const BadInput& bad : cases) {
    const std::string text =
        std::string(R"json({"format": "tensorbus-layout-1", "ranks": 2, "tensors": [)json") +
        bad.tensor + "]}";
    const Status status = ParseLayoutFile(text).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(status.message(), HasSubstr(bad.names)) << text;
  }
}

TEST(LayoutFile, RefusesWrongFramesAndDuplicates) {
  const char* const cases[] = {
      "",
      "[]",
      "{}",
      R"json({"format": "other", "ranks": 1, "tensors": []})json",
      R"json({"format": "tensorbus-layout-1", "ranks": 0, "tensors": []})json",
      R"json({"format": "tensorbus-layout-1", "ranks": 65537, "tensors": []})json",
      R"json({"format": "tensorbus-layout-1", "ranks": "2", "tensors": []})json",
      R"json({"format": "tensorbus-layout-1", "ranks": 1, "tensors": {}})json",
      R"json({"format": "tensorbus-layout-1", "ranks": 1, "tensors": [
          {"name": "a", "dtype": "f32", "shape": [1], "boxes": [[]]},
          {"name": "a", "dtype": "f32", "shape": [1], "boxes": [[]]}]})json",
  };
  for (const char* text : cases)
    EXPECT_THAT(ParseLayoutFile(text), IsStatus(Code::kInvalidArgument, Reason::kMalformed))
        << text;
}

TEST(LayoutFile, EveryTruncationIsRefused) {
  const std::string text = kGood;
  for (std::size_t keep = 0; keep < text.size(); ++keep)
    EXPECT_FALSE(ParseLayoutFile(text.substr(0, keep)).ok()) << keep;
}

TEST(Json, DeepNestingIsRefusedBeforeItIsParsed) {
  EXPECT_THAT(ParseJson(std::string(10'000'000, '[')).status().message(),
              HasSubstr("nested deeper"));
  EXPECT_OK(ParseJson(
      R"json(["[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\""])json"));
}

class TextFile : public ::testing::Test {
 protected:
  TextFile()
      : folder_(std::filesystem::temp_directory_path() /
                ("tensorbus-formats-" + std::to_string(getpid()))) {
    std::filesystem::create_directory(folder_);
  }
  ~TextFile() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return folder_ / name;
  }
  static std::string Gzip(const std::string& text) {
    std::string out(compressBound(text.size()) + 64, '\0');
    z_stream stream = {};
    EXPECT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
    stream.avail_in = static_cast<uInt>(text.size());
    stream.next_out = reinterpret_cast<Bytef*>(out.data());
    stream.avail_out = static_cast<uInt>(out.size());
    EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
    out.resize(stream.total_out);
    deflateEnd(&stream);
    return out;
  }

  std::filesystem::path folder_;
};

TEST_F(TextFile, ReadsPlainAndGzipped) {
  ASSERT_OK_AND_ASSIGN(const JobLayout plain, ReadLayoutFile(Write("a.json", kGood)));
  ASSERT_OK_AND_ASSIGN(const JobLayout zipped, ReadLayoutFile(Write("a.json.gz", Gzip(kGood))));
  EXPECT_EQ(plain, zipped);
}

TEST_F(TextFile, ReadsEveryMemberOfAGzipFile) {
  const std::string text = kGood;
  const std::string half = Gzip(text.substr(0, 40));
  ASSERT_OK_AND_ASSIGN(const std::string read,
                       ReadText(Write("two.gz", half + Gzip(text.substr(40)))));
  EXPECT_EQ(read, text);
  EXPECT_THAT(ReadText(Write("trash.gz", half + "trash")).status().message(),
              HasSubstr("trash.gz: gzip: damaged or truncated"));
}

TEST_F(TextFile, NamesThePathOfWhatCannotBeRead) {
  EXPECT_THAT(ReadText(folder_ / "none").status().message(), HasSubstr("none"));
  EXPECT_EQ(ReadText(folder_ / "none").status().code(), Code::kNotFound);
  EXPECT_FALSE(ReadText(folder_).ok());
  const std::string zipped = Gzip(kGood);
  EXPECT_THAT(ReadText(Write("cut.gz", zipped.substr(0, zipped.size() / 2))).status().message(),
              HasSubstr("cut.gz: gzip: damaged or truncated"));
  EXPECT_THAT(ReadLayoutFile(Write("bad.json", "{")).status().message(), HasSubstr("bad.json"));
}

TEST(ManifestFile, ReadsTensorsAndNumbers) {
  const auto manifest = ParseManifest(R"json({"format": "tensorbus-manifest/1", "model": "m",
    "config": {"layers": 3, "lm_head": true, "rope": [1, 2], "name": "x", "scale": 0.5},
    "tensors": [{"name": "a", "shape": [2], "dtype": "BF16"}]})json");
  ASSERT_OK(manifest);
  EXPECT_EQ(manifest->config, (std::map<std::string, std::int64_t>{{"layers", 3}, {"lm_head", 1}}));
  EXPECT_EQ(manifest->tensors.size(), 1U);
  EXPECT_THAT(ParseManifest(R"json({"format": "tensorbus-manifest/1", "model": "m", "config": {},
    "tensors": [{"name": "a", "shape": [2], "dtype": "BF16"},
                {"name": "a", "shape": [2], "dtype": "BF16"}]})json")
                  .status()
                  .message(),
              HasSubstr("tensor 'a' appears twice"));
  EXPECT_FALSE(ParseManifest("{}").ok());
}

}  // namespace
}  // namespace tensorbus::formats
