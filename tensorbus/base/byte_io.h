#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tensorbus/base/status.h"

namespace tensorbus {

/// Appends little-endian values to a byte vector: the writing half of every binary format of ours.
class ByteWriter {
 public:
  template <typename T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void Put(T value) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof value);
    std::memcpy(bytes_.data() + at, &value, sizeof value);
  }
  void PutBytes(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  /// u32 length, then the text.
  void PutString(std::string_view text) {
    Put(static_cast<std::uint32_t>(text.size()));
    PutBytes(std::as_bytes(std::span(text)));
  }

  std::size_t size() const { return bytes_.size(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  std::vector<std::byte> Take() && { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

/// Reads what ByteWriter wrote, from input nobody vouches for: every read is checked against the
/// end, and after the first failure all further reads give zero values, so a parser may check once.
/// Borrows the bytes.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <typename T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T> T Get() {
    T value{};
    if (rest_.size() < sizeof value) {
      Fail();
      return value;
    }
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_ = rest_.subspan(sizeof value);
    return value;
  }
  /// Empty when fewer than `count` bytes are left.
  std::span<const std::byte> GetBytes(std::uint64_t count) {
    if (rest_.size() < count) {
      Fail();
      return {};
    }
    const auto out = rest_.first(static_cast<std::size_t>(count));
    rest_ = rest_.subspan(static_cast<std::size_t>(count));
    return out;
  }
  /// Strings longer than `bound` are a failure, not an allocation.
  std::string GetString(std::uint32_t bound) {
    const auto size = Get<std::uint32_t>();
    if (size > bound) {
      Fail();
      return {};
    }
    const auto bytes = GetBytes(size);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  /// A count of records of at least `record_bytes` each: refused when the rest cannot hold them, so
  /// that a hostile count never sizes an allocation.
  std::uint32_t GetCount(std::size_t record_bytes) {
    const auto count = Get<std::uint32_t>();
    if (record_bytes != 0 && count > rest_.size() / record_bytes) {
      Fail();
      return 0;
    }
    return count;
  }

  bool failed() const { return failed_; }
  std::size_t remaining() const { return rest_.size(); }
  void Fail() {
    failed_ = true;
    rest_ = {};
  }
  /// OK when nothing failed and every byte was read.
  Status Finish(std::string_view what) const {
    if (failed_)
      return {Code::kInvalidArgument, std::string(what) + ": truncated or malformed",
              Reason::kMalformed};
    if (!rest_.empty())
      return {Code::kInvalidArgument, std::string(what) + ": trailing bytes", Reason::kMalformed};
    return {};
  }

 private:
  std::span<const std::byte> rest_;
  bool failed_ = false;
};

}  // namespace tensorbus
