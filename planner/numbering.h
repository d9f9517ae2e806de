#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tensorbus/base/hash.h"
#include "tensorbus/types/box.h"

namespace tensorbus::planner {

/// Distinct values, numbered in the order in which they first came. Confined.
template <typename Value, typename Hash>
class Numbering {
 public:
  std::uint32_t Add(const Value& value) {
    const auto [at, is_new] =
        numbers_.try_emplace(value, static_cast<std::uint32_t>(values_.size()));
    if (is_new) values_.push_back(value);
    return at->second;
  }
  bool Has(const Value& value) const { return numbers_.contains(value); }
  const Value& operator[](std::uint32_t number) const { return values_[number]; }
  std::size_t size() const { return values_.size(); }

 private:
  std::unordered_map<Value, std::uint32_t, Hash> numbers_;
  std::vector<Value> values_;
};

struct HashOfBox {
  std::size_t operator()(const Box& box) const noexcept {
    return static_cast<std::size_t>(Checksum64(std::as_bytes(box.ranges())));
  }
};
struct HashOfRanks {
  std::size_t operator()(const std::vector<std::uint32_t>& ranks) const noexcept {
    return static_cast<std::size_t>(Checksum64(std::as_bytes(std::span(ranks))));
  }
};

using BoxTable = Numbering<Box, HashOfBox>;
/// Each list ascending.
using RankSets = Numbering<std::vector<std::uint32_t>, HashOfRanks>;

}  // namespace tensorbus::planner
