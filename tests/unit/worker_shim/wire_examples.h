#pragma once

#include <array>

#include "worker_shim/wire.h"

namespace tensorbus::wire {

/// A message of each kind with every field set to something that is not its default.
template <typename Message>
Message Example();

inline Status ExampleStatus() {
  return {Code::kFailedPrecondition, "old", Reason::kStaleVersion, 11};
}

template <>
inline Hello Example() {
  Hello hello;
  hello.identity = {.channel = "policy",
                    .job = "trainer",
                    .role = Role::kConsumer,
                    .replica = 1,
                    .rank = 2,
                    .rank_count = 3};
  hello.pid = 12345;
  hello.library = "test";
  return hello;
}
template <>
inline Welcome Example() {
  return {.status = ExampleStatus(), .agent = "agent 1", .staging_bytes = 1U << 20};
}
template <>
inline AttachSegment Example() {
  return {.segment = 3, .mapped = true, .bytes = 4096, .address = 0x7f0000001000};
}
template <>
inline Publish Example() {
  return {.version = Version{7},
          .policy = SlowConsumer::kSnapshot,
          .min_replicas = 2,
          .receipts = true,
          .keep_last = 5};
}
template <>
inline Register Example() {
  Register message;
  const std::array<std::uint64_t, 2> dims = {4, 6};
  message.registration.tensors = {{"w", DType::kBf16, Shape::Create(dims).value()}};
  message.registration.segment_bytes = {4096};
  Piece piece;
  const std::array<Range, 2> ranges = {Range{0, 2}, Range{1, 6}};
  piece.box = Box(ranges);
  piece.offset = 64;
  piece.strides = {12, 2};
  message.registration.pieces = {piece};
  message.flip = FlipMode::kShadow;
  message.proof = Proof::kMemory;
  message.dirty = true;
  message.leave_out = {"x"};
  message.private_mode = 3;
  message.back = {.epoch = ChannelEpoch{4},
                  .published = Version{7},
                  .publishing = Version{9},
                  .held = Example<Publish>(),
                  .write_count = 11};
  return message;
}
template <>
inline Registered Example() {
  return {.status = ExampleStatus(),
          .mode = MemoryMode::kBucket,
          .why = "private memory",
          .expected_gb_per_s = 2.5,
          .epoch = ChannelEpoch{4},
          .latest_version = Version{7},
          .register_seconds = 0.25,
          .prefault_seconds = 0.5};
}
template <>
inline RequestRelease Example() {
  return {.version = Version{7}, .timeout_ms = 1000};
}
template <>
inline Released Example() {
  return {.version = Version{7}, .status = ExampleStatus()};
}
template <>
inline Update Example() {
  return {.selector = Selector::kPinned, .version = Version{9}, .timeout_ms = 1000};
}
template <>
inline HookEvent Example() {
  return {.session = SessionId{1}, .version = Version{2}, .timeout_ms = 3};
}
template <>
inline HookDone Example() {
  return {ExampleStatus()};
}
template <>
inline Updated Example() {
  return {.status = ExampleStatus(),
          .version = Version{3},
          .session = SessionId{4},
          .bytes = 5,
          .seconds = 0.5,
          .copy_seconds = 0.25,
          .digest = {6, 7, 8}};
}
template <>
inline BucketWork Example() {
  const std::array<Range, 1> rows = {{{6, 7}}};
  return {
      {{.piece = 1, .bucket = 2, .box = Box(rows), .first = 3, .bytes = 4, .bucket_offset = 5}}};
}
template <>
inline BucketDone Example() {
  return {ExampleStatus()};
}
template <>
inline AttachBucket Example() {
  return {.bucket = 1, .bytes = 4096};
}
template <>
inline Claimed Example() {
  return {.status = ExampleStatus(), .version = Version{7}};
}
template <>
inline Reply Example() {
  return {ExampleStatus()};
}

}  // namespace tensorbus::wire
