#include "tensorbus/kernels/digest.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include "tensorbus/base/hash.h"
#include "tensorbus/kernels/digest_table.h"
#include "tensorbus/kernels/run_kernels.h"
#include "tests/testing/random_blocks.h"
#include "tests/unit/kernels/slow_sum.h"

namespace tensorbus::kernels {
namespace {

using testing::Pick;
using testing::Place;
using testing::PlacedBlock;
using testing::Random;
using testing::RandomBox;

constexpr DigestKey kKey0 = {.a = 0, .b = 0};
constexpr DigestKey kKey1 = {.a = 0x0123456789abcdef, .b = 0xfedcba9876543210};

std::vector<std::byte> Ramp(std::size_t count) {
  std::vector<std::byte> out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<std::byte>((7 * i + 3) % 256);
  return out;
}

std::vector<std::byte> Text(const std::string& text) {
  std::vector<std::byte> out(text.size());
  std::transform(text.begin(), text.end(), out.begin(),
                 [](char c) { return static_cast<std::byte>(c); });
  return out;
}

std::vector<const RunKernels*> AllKernels() {
  std::vector<const RunKernels*> all = {&PortableKernels()};
  if (Avx2Kernels() != nullptr) all.push_back(Avx2Kernels());
  return all;
}

struct Vector {
  std::vector<std::byte> data;
  DigestKey key;
  std::uint64_t offset;
  std::uint64_t a;
  std::uint64_t b;
};

TEST(Digest, MatchesTheFixedVectors) {
  const Vector vectors[] = {
      {{}, kKey1, 0, 0, 0},
      {Text(std::string(1, '\0')), kKey0, 0, 0x94293943755dbe03, 0x346e989277520731},
      {Text(std::string(1, '\0')), kKey1, 0, 0x1e158ad41c693c59, 0x77cc74d43d8e5959},
      {Text("abc"), kKey1, 4094, 0x18ed2c1d4e4aa4fc, 0x64a9ce95d79066fc},
      {Text(std::string(4096, '\0')), kKey1, 0, 0x138bfcd7bdfeb02a, 0x009c1ee03b3dc45e},
      {Text(std::string(4096, '\xff')), kKey1, 0, 0x8bfcd7bdfeb02a00, 0x9c1ee03b3dc45e00},
      {Ramp(10000), kKey1, 0, 0xe8cff304ec897888, 0x302b2e1be1364ea0},
      {Ramp(10000), kKey1, 3, 0x422b3fcef812bc08, 0x0edef8a04eeaad98},
      {Ramp(61), kKey1, (std::uint64_t{1} << 40) + 1, 0xefd5bb87241b84e3, 0xec5de23074946615},
  };
  for (const Vector& v : vectors) {
    const DigestSum want = {.a = v.a, .b = v.b, .bytes = v.data.size()};
    DigestSum reference;
    AddDigestReference(reference, v.key, v.data.data(), v.offset, v.data.size());
    EXPECT_EQ(reference, want) << "reference, offset " << v.offset;
    for (const RunKernels* kernels : AllKernels()) {
      DigestSum sum;
      kernels->digest(sum, v.key, v.data.data(), v.offset, v.data.size());
      EXPECT_EQ(sum, want) << kernels->name << ", offset " << v.offset;
    }
  }
}

TEST(Digest, TableHasTheFixedValuesAndDistinctOddKeys) {
  EXPECT_EQ(kDigestTable.keys[0], 0xe0fe9dedU);
  EXPECT_EQ(kDigestTable.keys[1], 0xe5cf51abU);
  EXPECT_EQ(kDigestTable.keys[1023], 0x47294d29U);
  EXPECT_EQ(kDigestTable.keys[1039], 0x32db192dU);
  std::set<std::uint32_t> seen;
  for (std::uint32_t i = 0; i < kDigestKeyCount; ++i) {
    EXPECT_EQ(kDigestTable.keys[i] % 2, 1U);
    seen.insert(kDigestTable.keys[i]);
  }
  EXPECT_EQ(seen.size(), kDigestKeyCount);
}

TEST(Digest, KeyIsTheHashOfChannelNameAndDtype) {
  const std::string record =
      std::string("\6\0\0\0", 4) + "policy" + std::string("\6\0\0\0", 4) + "norm.w" + '\4';
  const Hash128 hash = HashOf(record);
  const DigestKey key = MakeDigestKey("policy", "norm.w", DType::kBf16);
  EXPECT_EQ(key.a, hash.low);
  EXPECT_EQ(key.b, hash.high);
  EXPECT_NE(MakeDigestKey("policyn", "orm.w", DType::kBf16), key);
  EXPECT_NE(MakeDigestKey("policy", "norm.w", DType::kF16), key);
}

/// Every leaf kernel at any length, stream offset and alignment of both sides.
TEST(RunKernels, AgreeWithTheReferenceAndTouchNothingElse) {
  Random random(1);
  std::vector<std::byte> source(20000);
  std::vector<std::byte> ahead(20000);
  testing::FillRandom(random, source);
  for (const RunKernels* kernels : AllKernels()) {
    SCOPED_TRACE(std::string(kernels->name));
    for (int round = 0; round < 600; ++round) {
      const std::uint64_t bytes = Pick(random, 0, round % 3 == 0 ? 9000 : 200);
      const std::uint64_t lead = Pick(random, 0, 130);
      const std::uint64_t place = Pick(random, 64, 200);
      const std::uint64_t offset =
          Pick(random, 0, 3) == 0 ? place + 4096 : Pick(random, 0, 1 << 20);
      const std::byte* from = source.data() + lead;
      DigestSum want;
      AddDigestReference(want, kKey1, from, offset, bytes);
      DigestSum sum;
      kernels->digest(sum, kKey1, from, offset, bytes);
      ASSERT_EQ(sum, want);
      sum = {};
      kernels->digest_ahead(sum, kKey1, from, offset, bytes, ahead.data());
      ASSERT_EQ(sum, want);
      std::vector<std::byte> expected(10000, std::byte{0xa5});
      std::copy(from, from + bytes, expected.begin() + static_cast<std::ptrdiff_t>(place));
      for (int kind = 0; kind < 4; ++kind) {
        std::vector<std::byte> target(10000, std::byte{0xa5});
        std::byte* to = target.data() + place;
        sum = {};
        if (kind == 0) kernels->copy_digest(sum, kKey1, to, from, offset, bytes);
        if (kind == 1) kernels->stream_digest(sum, kKey1, to, from, offset, bytes);
        if (kind == 2) kernels->copy(to, from, bytes);
        if (kind == 3) kernels->stream(to, from, bytes);
        kernels->fence();
        ASSERT_EQ(target, expected) << "kind " << kind << " bytes " << bytes;
        if (kind < 2) {
          ASSERT_EQ(sum, want) << "kind " << kind << " bytes " << bytes;
        }
      }
    }
  }
}

/// Rows at any pitch, whole words or not, in one block or over several, touch what they name.
TEST(RunKernels, RowsAgreeWithTheReferenceRowByRow) {
  Random random(5);
  std::vector<std::byte> source(60000);
  testing::FillRandom(random, source);
  for (const RunKernels* kernels : AllKernels()) {
    SCOPED_TRACE(std::string(kernels->name));
    for (int round = 0; round < 600; ++round) {
      RunKernels::Rows rows;
      rows.bytes = Pick(random, 0, 2) == 0 ? Pick(random, 1, 500) : 4 * Pick(random, 1, 128);
      rows.count = Pick(random, 1, 40);
      rows.source_pitch = rows.bytes + Pick(random, 0, 700);
      rows.target_pitch = rows.bytes + Pick(random, 0, 70);
      rows.offset_pitch = rows.bytes + Pick(random, 0, 2) * Pick(random, 0, 900);
      const std::uint64_t offset = 2 * Pick(random, 0, 1 << 20);
      const std::byte* from = source.data() + Pick(random, 0, 70);
      std::vector<std::byte> expected(30000, std::byte{0xa5});
      DigestSum want;
      const std::ptrdiff_t place = 64;
      for (std::uint64_t k = 0; k < rows.count; ++k) {
        const std::byte* row = from + k * rows.source_pitch;
        AddDigestReference(want, kKey1, row, offset + k * rows.offset_pitch, rows.bytes);
        std::copy(row, row + rows.bytes,
                  expected.begin() + place + static_cast<std::ptrdiff_t>(k * rows.target_pitch));
      }
      DigestSum sum;
      kernels->digest_rows(sum, kKey1, rows, from, offset);
      ASSERT_EQ(sum, want) << rows.count << " rows of " << rows.bytes;
      std::vector<std::byte> target(30000, std::byte{0xa5});
      sum = {};
      kernels->copy_digest_rows(sum, kKey1, rows, target.data() + place, from, offset);
      ASSERT_EQ(sum, want) << rows.count << " rows of " << rows.bytes;
      ASSERT_EQ(target, expected);
    }
  }
}

TEST(Digest, AnyCutAddsUp) {
  Random random(2);
  std::vector<std::byte> data(30000);
  testing::FillRandom(random, data);
  for (int round = 0; round < 50; ++round) {
    const std::uint64_t offset = Pick(random, 0, 1 << 14);
    const std::uint64_t most = round % 2 == 0 ? 9 : 5000;
    DigestSum whole;
    AddDigest(whole, kKey1, data.data(), offset, data.size());
    DigestSum parts;
    for (std::size_t at = 0; at < data.size();) {
      const auto part = std::min<std::size_t>(data.size() - at, Pick(random, 1, most));
      AddDigest(parts, kKey1, data.data() + at, offset + at, part);
      at += part;
    }
    ASSERT_EQ(parts, whole);
  }
}

TEST(DigestBlock, DoesNotDependOnTheLayoutInMemory) {
  Random random(3);
  for (int round = 0; round < 300; ++round) {
    const StridedBlock box = RandomBox(random, round % 10 == 0 ? 40000 : 3000);
    const PlacedBlock placed = Place(random, box);
    const DigestSum want = SlowSum(placed.block);
    ASSERT_EQ(DigestBlock(placed.block), want);
    const std::uint64_t cut = Pick(random, 0, want.bytes);
    DigestSum parts = DigestRange(placed.block, {.first = 0, .count = cut});
    parts += DigestRange(placed.block, {.first = cut, .count = want.bytes - cut});
    ASSERT_EQ(parts, want);
  }
}

TEST(DigestBlock, OfNothingIsZero) {
  StridedBlock block;
  block.rank = 1;
  block.extents[0] = 0;
  EXPECT_EQ(DigestBlock(block), DigestSum{});
}

TEST(DigestBlock, TwoShardingsOfOneTensorHaveEqualSums) {
  // A [90, 70] tensor of 2-byte items, once cut by rows and once by columns, unevenly.
  constexpr std::uint64_t kRows = 90;
  constexpr std::uint64_t kColumns = 70;
  std::vector<std::byte> tensor(kRows * kColumns * 2);
  Random random(4);
  testing::FillRandom(random, tensor);
  const auto box = [&](std::uint64_t r0, std::uint64_t r1, std::uint64_t c0, std::uint64_t c1) {
    StridedBlock block;
    block.rank = 2;
    block.item_bytes = 2;
    block.extents = {r1 - r0, c1 - c0};
    block.strides = {kColumns * 2, 2};
    block.stream_strides = block.strides;
    block.stream_offset = (r0 * kColumns + c0) * 2;
    block.base = tensor.data() + block.stream_offset;
    block.key = kKey1;
    return DigestBlock(block);
  };
  DigestSum rows = box(0, 17, 0, kColumns);
  rows += box(17, 80, 0, kColumns);
  rows += box(80, kRows, 0, kColumns);
  DigestSum columns = box(0, kRows, 0, 1);
  columns += box(0, kRows, 1, 44);
  columns += box(0, kRows, 44, kColumns);
  EXPECT_EQ(rows, columns);
  EXPECT_EQ(rows, box(0, kRows, 0, kColumns));
}

}  // namespace
}  // namespace tensorbus::kernels
