#include <fmt/format.h>

#include "tensorbus/base/byte_io.h"
#include "tensorbus/types/layout.h"

namespace tensorbus {
namespace {

// The last byte of each is the format's version.
constexpr std::uint32_t kRankMagic = 0x014c5254;  // "TRL", 1
constexpr std::uint32_t kJobMagic = 0x014c4a54;   // "TJL", 1

void PutSpec(ByteWriter& out, const TensorSpec& spec) {
  out.PutString(spec.name);
  out.Put(static_cast<std::uint8_t>(spec.dtype));
  out.Put(static_cast<std::uint8_t>(spec.shape.rank()));
  for (const std::uint64_t dim : spec.shape.dims()) out.Put(dim);
}

void PutBoxes(ByteWriter& out, std::span<const Box> boxes) {
  out.Put(static_cast<std::uint32_t>(boxes.size()));
  for (const Box& box : boxes) {
    out.Put(static_cast<std::uint8_t>(box.rank()));
    for (const Range& range : box.ranges()) {
      out.Put(range.lo);
      out.Put(range.hi);
    }
  }
}

Result<TensorSpec> GetSpec(ByteReader& in) {
  TensorSpec spec;
  spec.name = in.GetString(kMaxNameBytes);
  const auto code = in.Get<std::uint8_t>();
  const auto rank = in.Get<std::uint8_t>();
  std::array<std::uint64_t, kMaxDims> dims = {};
  if (rank > kMaxDims) in.Fail();
  if (in.failed()) return in.Finish("tensor");
  for (std::uint8_t d = 0; d < rank; ++d) dims[d] = in.Get<std::uint64_t>();
  TB_ASSIGN_OR_RETURN(spec.dtype, DTypeFromCode(code));
  TB_ASSIGN_OR_RETURN(spec.shape, Shape::Create(std::span(dims).first(rank)));
  return spec;
}

/// Fails the reader on a malformed list. Two boxes without dimensions would overlap, so they are
/// refused here: one byte of input must not become a whole Box many times over.
std::vector<Box> GetBoxes(ByteReader& in) {
  const std::uint32_t count = in.GetCount(1);
  std::vector<Box> boxes;
  for (std::uint32_t i = 0; i < count && !in.failed(); ++i) {
    const auto rank = in.Get<std::uint8_t>();
    if (rank > kMaxDims || (rank == 0 && count > 1)) {
      in.Fail();
      break;
    }
    std::array<Range, kMaxDims> ranges = {};
    for (std::uint8_t d = 0; d < rank; ++d) {
      ranges[d].lo = in.Get<std::uint64_t>();
      ranges[d].hi = in.Get<std::uint64_t>();
    }
    boxes.emplace_back(std::span(ranges).first(rank));
  }
  return boxes;
}

Holding GetHolding(ByteReader& in) {
  Holding holding;
  const std::uint32_t count = in.GetCount(8);
  for (std::uint32_t i = 0; i < count && !in.failed(); ++i) {
    RankBoxes held;
    held.rank = in.Get<std::uint32_t>();
    held.boxes = GetBoxes(in);
    holding.ranks.push_back(std::move(held));
  }
  return holding;
}

}  // namespace

std::vector<std::byte> Serialize(const RankLayout& layout) {
  ByteWriter out;
  out.Put(kRankMagic);
  out.Put(static_cast<std::uint32_t>(layout.tensors.size()));
  for (const RankLayout::Tensor& tensor : layout.tensors) {
    PutSpec(out, tensor.spec);
    PutBoxes(out, tensor.boxes);
  }
  return std::move(out).Take();
}

std::vector<std::byte> Serialize(const JobLayout& layout) {
  ByteWriter out;
  out.Put(kJobMagic);
  out.Put(layout.rank_count);
  out.Put(static_cast<std::uint32_t>(layout.holdings.size()));
  for (const Holding& holding : layout.holdings) {
    out.Put(static_cast<std::uint32_t>(holding.ranks.size()));
    for (const RankBoxes& held : holding.ranks) {
      out.Put(held.rank);
      PutBoxes(out, held.boxes);
    }
  }
  out.Put(static_cast<std::uint32_t>(layout.tensors.size()));
  for (const JobLayout::Tensor& tensor : layout.tensors) {
    PutSpec(out, tensor.spec);
    out.Put(tensor.holding);
  }
  return std::move(out).Take();
}

Result<RankLayout> ParseRankLayout(std::span<const std::byte> bytes, std::uint32_t rank) {
  ByteReader in(bytes);
  if (in.Get<std::uint32_t>() != kRankMagic) in.Fail();
  RankLayout layout;
  const std::uint32_t count = in.GetCount(10);
  for (std::uint32_t i = 0; i < count && !in.failed(); ++i) {
    TB_ASSIGN_OR_RETURN(TensorSpec spec, GetSpec(in));
    layout.tensors.push_back({std::move(spec), GetBoxes(in)});
  }
  TB_RETURN_IF_ERROR(in.Finish("rank layout"));
  TB_RETURN_IF_ERROR(Validate(layout, rank));
  return layout;
}

Result<JobLayout> ParseJobLayout(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  if (in.Get<std::uint32_t>() != kJobMagic) in.Fail();
  JobLayout layout;
  layout.rank_count = in.Get<std::uint32_t>();
  const std::uint32_t holdings = in.GetCount(4);
  for (std::uint32_t i = 0; i < holdings && !in.failed(); ++i)
    layout.holdings.push_back(GetHolding(in));
  const std::uint32_t count = in.GetCount(10);
  for (std::uint32_t i = 0; i < count && !in.failed(); ++i) {
    TB_ASSIGN_OR_RETURN(TensorSpec spec, GetSpec(in));
    layout.tensors.push_back({std::move(spec), in.Get<std::uint32_t>()});
  }
  TB_RETURN_IF_ERROR(in.Finish("job layout"));
  TB_RETURN_IF_ERROR(Validate(layout));
  return layout;
}

}  // namespace tensorbus
