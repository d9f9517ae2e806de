#include "tensorbus/types/box_sum.h"

#include <span>

namespace tensorbus {

namespace {

constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15;

/// The finalizer of splitmix64.
std::uint64_t Mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

std::uint64_t TensorFactor(std::uint32_t tensor) {
  return Mix((std::uint64_t{tensor} + 1) * kGamma) | 1;
}

/// The corners of the box in the dimensions left, with what the dimensions before them hashed to.
std::uint64_t Corners(std::span<const Range> ranges, std::uint64_t hash) {
  if (ranges.empty()) return hash;
  const auto rest = ranges.subspan(1);
  return Corners(rest, Mix(hash ^ (ranges[0].lo + 1) * kGamma)) -
         Corners(rest, Mix(hash ^ (ranges[0].hi + 1) * kGamma));
}

std::uint64_t Corners(const Box& box) {
  return Corners(box.ranges(), static_cast<std::uint64_t>(box.rank()) + 1);
}

}  // namespace

void BoxSum::Add(std::uint32_t tensor, const Box& box) {
  const std::uint64_t part = TensorFactor(tensor) * Corners(box);
  sum += part;
  located += (std::uint64_t{tensor} + 1) * part;
}

std::vector<BoxSum> BoxSumsOf(const JobLayout& layout) {
  // All tensors of one holding have the same boxes: their factors are summed first.
  std::vector<BoxSum> factors(layout.holdings.size());
  for (std::uint32_t i = 0; i < layout.tensors.size(); ++i) {
    BoxSum& of_holding = factors[layout.tensors[i].holding];
    of_holding.sum += TensorFactor(i);
    of_holding.located += (std::uint64_t{i} + 1) * TensorFactor(i);
  }
  std::vector<BoxSum> sums(layout.rank_count);
  for (std::size_t holding = 0; holding < layout.holdings.size(); ++holding) {
    for (const RankBoxes& held : layout.holdings[holding].ranks) {
      std::uint64_t corners = 0;
      for (const Box& box : held.boxes) corners += Corners(box);
      sums[held.rank].sum += factors[holding].sum * corners;
      sums[held.rank].located += factors[holding].located * corners;
    }
  }
  return sums;
}

std::int64_t DifferingTensor(const BoxSum& a, const BoxSum& b, std::uint32_t tensor_count) {
  const std::uint64_t sum = a.sum - b.sum;
  const std::uint64_t located = a.located - b.located;
  if (sum == 0) return -1;
  for (std::uint32_t i = 0; i < tensor_count; ++i) {
    if ((std::uint64_t{i} + 1) * sum == located) return i;
  }
  return -1;
}

}  // namespace tensorbus
