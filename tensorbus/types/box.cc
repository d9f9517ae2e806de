#include "tensorbus/types/box.h"

#include <algorithm>
#include <fmt/format.h>

namespace tensorbus {

Result<Shape> Shape::Create(std::span<const std::uint64_t> dims) {
  if (dims.size() > kMaxDims) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{} dimensions; at most {} are supported", dims.size(), kMaxDims),
                  Reason::kMalformed);
  }
  // A dimension of size 0 does not excuse the others: strides are products of them.
  std::uint64_t product = 1;
  for (const std::uint64_t dim : dims) {
    const std::uint64_t factor = std::max<std::uint64_t>(dim, 1);
    if (factor > kMaxTensorBytes / product) {
      return Status(Code::kInvalidArgument,
                    fmt::format("shape has more than {} elements", kMaxTensorBytes),
                    Reason::kMalformed);
    }
    product *= factor;
  }
  Shape shape;
  std::copy(dims.begin(), dims.end(), shape.dims_.begin());
  shape.rank_ = static_cast<std::uint8_t>(dims.size());
  return shape;
}

std::uint64_t Shape::elements() const {
  std::uint64_t product = 1;
  for (const std::uint64_t dim : dims()) product *= dim;
  return product;
}

std::string Shape::ToString() const {
  return fmt::format("[{}]", fmt::join(dims(), ", "));
}

Box::Box(std::span<const Range> ranges) : rank_(static_cast<std::uint8_t>(ranges.size())) {
  TB_CHECK(ranges.size() <= kMaxDims);
  std::copy(ranges.begin(), ranges.end(), ranges_.begin());
}

Box Box::Whole(const Shape& shape) {
  Box box;
  box.rank_ = static_cast<std::uint8_t>(shape.rank());
  for (int d = 0; d < shape.rank(); ++d) box[d] = {0, shape[d]};
  return box;
}

bool Box::empty() const {
  return std::any_of(ranges().begin(), ranges().end(), [](const Range& r) { return r.empty(); });
}

std::uint64_t Box::volume() const {
  if (empty()) return 0;
  std::uint64_t product = 1;
  for (const Range& r : ranges()) product *= r.size();
  return product;
}

bool Box::Fits(const Shape& shape) const {
  if (rank() != shape.rank()) return false;
  for (int d = 0; d < rank(); ++d) {
    if ((*this)[d].lo > (*this)[d].hi || (*this)[d].hi > shape[d]) return false;
  }
  return true;
}

bool Box::Contains(const Box& inner) const {
  TB_DCHECK(rank() == inner.rank());
  for (int d = 0; d < rank(); ++d) {
    if (inner[d].lo < (*this)[d].lo || inner[d].hi > (*this)[d].hi) return false;
  }
  return true;
}

std::string Box::ToString() const {
  std::string out = "[";
  for (int d = 0; d < rank(); ++d)
    out += fmt::format("{}{}:{}", d == 0 ? "" : ", ", (*this)[d].lo, (*this)[d].hi);
  return out + "]";
}

std::optional<Box> Intersect(const Box& a, const Box& b) {
  TB_DCHECK(a.rank() == b.rank());
  Box out = a;
  for (int d = 0; d < a.rank(); ++d) {
    out[d] = {std::max(a[d].lo, b[d].lo), std::min(a[d].hi, b[d].hi)};
    if (out[d].empty()) return std::nullopt;
  }
  return out;
}

}  // namespace tensorbus
