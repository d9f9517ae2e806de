#include "worker_shim/wire.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include "tensorbus/base/byte_io.h"
#include "tensorbus/base/printable.h"

namespace tensorbus::wire {
namespace {

// One Put and one Get for each type, in the order of the fields on the wire. A Get fails the reader
// on any value that a Put could not have written, so Decode has one check at its end.

/// Texts are for people: leave some of them out rather than refuse to say anything.
void PutText(ByteWriter& out, std::string_view text) {
  out.PutString(Shortened(text, kMaxTextBytes));
}
std::string GetText(ByteReader& in) {
  return in.GetString(kMaxTextBytes);
}
std::string GetName(ByteReader& in) {
  return in.GetString(kMaxNameBytes);
}

void PutBool(ByteWriter& out, bool value) {
  out.Put(static_cast<std::uint8_t>(value ? 1 : 0));
}
bool GetBool(ByteReader& in) {
  const auto value = in.Get<std::uint8_t>();
  if (value > 1) in.Fail();
  return value == 1;
}

double GetAmount(ByteReader& in) {
  const auto value = in.Get<double>();
  if (!std::isfinite(value) || value < 0) in.Fail();
  return value;
}

/// An enumeration whose values run from 1 to `last`.
template <typename Enum>
Enum GetEnum(ByteReader& in, Enum last) {
  const auto value = in.Get<std::uint8_t>();
  if (value == 0 || value > static_cast<std::uint8_t>(last)) {
    in.Fail();
    return last;
  }
  return static_cast<Enum>(value);
}

template <typename Tag>
void Put(ByteWriter& out, const Id<Tag>& id) {
  out.Put(id.value);
}
template <typename Tag>
void Get(ByteReader& in, Id<Tag>& id) {
  id.value = in.Get<std::uint64_t>();
}

void Put(ByteWriter& out, const Status& status) {
  out.Put(status.code());
  out.Put(status.reason());
  out.Put(status.native());
  PutText(out, status.message());
}
void Get(ByteReader& in, Status& status) {
  const auto code = in.Get<std::uint8_t>();
  const auto reason = in.Get<std::uint8_t>();
  const auto native = in.Get<std::int64_t>();
  std::string message = GetText(in);
  if (code > static_cast<std::uint8_t>(Code::kUnauthenticated)) return in.Fail();
  if (reason > static_cast<std::uint8_t>(Reason::kBusy)) return in.Fail();
  if (code == 0) {
    if (reason != 0 || native != 0 || !message.empty()) in.Fail();
    status = Status();
    return;
  }
  status = Status(static_cast<Code>(code), std::move(message), static_cast<Reason>(reason), native);
}

void Put(ByteWriter& out, const RankIdentity& identity) {
  out.PutString(identity.channel);
  out.PutString(identity.job);
  out.Put(identity.role);
  out.Put(identity.replica);
  out.Put(identity.rank);
  out.Put(identity.rank_count);
}
void Get(ByteReader& in, RankIdentity& identity) {
  identity.channel = GetName(in);
  identity.job = GetName(in);
  identity.role = GetEnum(in, Role::kConsumer);
  identity.replica = in.Get<std::uint32_t>();
  identity.rank = in.Get<std::uint32_t>();
  identity.rank_count = in.Get<std::uint32_t>();
}

void Put(ByteWriter& out, const TensorSpec& spec) {
  out.PutString(spec.name);
  out.Put(spec.dtype);
  out.Put(static_cast<std::uint8_t>(spec.shape.rank()));
  for (const std::uint64_t dim : spec.shape.dims()) out.Put(dim);
}
constexpr std::size_t kTensorSpecBytesMin = 4 + 1 + 1;
void Get(ByteReader& in, TensorSpec& spec) {
  spec.name = GetName(in);
  const auto dtype = DTypeFromCode(in.Get<std::uint8_t>());
  const auto rank = in.Get<std::uint8_t>();
  if (!dtype.ok() || rank > kMaxDims) return in.Fail();
  spec.dtype = *dtype;
  std::array<std::uint64_t, kMaxDims> dims = {};
  for (std::size_t d = 0; d < rank; ++d) dims[d] = in.Get<std::uint64_t>();
  const auto shape = Shape::Create({dims.data(), rank});
  if (!shape.ok()) return in.Fail();
  spec.shape = *shape;
}

void Put(ByteWriter& out, const Box& box) {
  out.Put(static_cast<std::uint8_t>(box.rank()));
  for (const Range& range : box.ranges()) {
    out.Put(range.lo);
    out.Put(range.hi);
  }
}
void Get(ByteReader& in, Box& box) {
  const auto rank = in.Get<std::uint8_t>();
  if (rank > kMaxDims) return in.Fail();
  std::array<Range, kMaxDims> ranges = {};
  for (std::size_t d = 0; d < rank; ++d) {
    ranges[d].lo = in.Get<std::uint64_t>();
    ranges[d].hi = in.Get<std::uint64_t>();
  }
  box = Box({ranges.data(), rank});
}

void Put(ByteWriter& out, const Piece& piece) {
  out.Put(piece.tensor);
  out.Put(piece.segment);
  Put(out, piece.box);
  out.Put(piece.offset);
  for (int d = 0; d < piece.box.rank(); ++d) out.Put(piece.strides[static_cast<std::size_t>(d)]);
}
constexpr std::size_t kPieceBytesMin = 4 + 4 + 1 + 8;
void Get(ByteReader& in, Piece& piece) {
  piece.tensor = in.Get<std::uint32_t>();
  piece.segment = in.Get<std::uint32_t>();
  Get(in, piece.box);
  piece.offset = in.Get<std::uint64_t>();
  for (int d = 0; d < piece.box.rank(); ++d)
    piece.strides[static_cast<std::size_t>(d)] = in.Get<std::uint64_t>();
}

void Put(ByteWriter& out, const std::string& name) {
  out.PutString(name);
}
void Get(ByteReader& in, std::string& name) {
  name = GetName(in);
}
void Put(ByteWriter& out, std::uint64_t value) {
  out.Put(value);
}
void Get(ByteReader& in, std::uint64_t& value) {
  value = in.Get<std::uint64_t>();
}

void Put(ByteWriter& out, const BucketRange& range) {
  out.Put(range.piece);
  out.Put(range.bucket);
  Put(out, range.box);
  out.Put(range.first);
  out.Put(range.bytes);
  out.Put(range.bucket_offset);
}
constexpr std::size_t kBucketRangeBytes = 4 + 4 + 1 + 8 + 8 + 8;
void Get(ByteReader& in, BucketRange& range) {
  range.piece = in.Get<std::uint32_t>();
  range.bucket = in.Get<std::uint32_t>();
  Get(in, range.box);
  range.first = in.Get<std::uint64_t>();
  range.bytes = in.Get<std::uint64_t>();
  range.bucket_offset = in.Get<std::uint64_t>();
}

template <typename Item>
void PutList(ByteWriter& out, const std::vector<Item>& items) {
  out.Put(static_cast<std::uint32_t>(items.size()));
  for (const Item& item : items) Put(out, item);
}
template <typename Item>
void GetList(ByteReader& in, std::vector<Item>& items, std::size_t item_bytes_min,
             std::uint32_t bound) {
  const std::uint32_t count = in.GetCount(item_bytes_min);
  if (count > bound) return in.Fail();
  items.resize(count);
  for (Item& item : items) {
    Get(in, item);
    if (in.failed()) return;
  }
}
void Put(ByteWriter& out, const Registration& registration) {
  PutList(out, registration.tensors);
  PutList(out, registration.segment_bytes);
  PutList(out, registration.pieces);
}
void Get(ByteReader& in, Registration& registration) {
  GetList(in, registration.tensors, kTensorSpecBytesMin, kMaxTensors);
  GetList(in, registration.segment_bytes, sizeof(std::uint64_t), kMaxSegments);
  GetList(in, registration.pieces, kPieceBytesMin, kMaxPieces);
}

void Put(ByteWriter& out, const DigestSum& sum) {
  out.Put(sum.a);
  out.Put(sum.b);
  out.Put(sum.bytes);
}
void Get(ByteReader& in, DigestSum& sum) {
  sum.a = in.Get<std::uint64_t>();
  sum.b = in.Get<std::uint64_t>();
  sum.bytes = in.Get<std::uint64_t>();
}

void Put(ByteWriter& out, const Hello& hello) {
  out.Put(hello.protocol);
  Put(out, hello.identity);
  out.Put(hello.pid);
  PutText(out, hello.library);
}
void Get(ByteReader& in, Hello& hello) {
  hello.protocol = in.Get<std::uint32_t>();
  if (hello.protocol != kProtocol) {
    in.GetBytes(in.remaining());
    return;
  }
  Get(in, hello.identity);
  hello.pid = in.Get<std::uint32_t>();
  hello.library = GetText(in);
}

void Put(ByteWriter& out, const Welcome& welcome) {
  out.Put(welcome.protocol);
  Put(out, welcome.status);
  PutText(out, welcome.agent);
  out.Put(welcome.staging_bytes);
}
void Get(ByteReader& in, Welcome& welcome) {
  welcome.protocol = in.Get<std::uint32_t>();
  if (welcome.protocol != kProtocol) {
    in.GetBytes(in.remaining());
    welcome.status = Status(Code::kFailedPrecondition,
                            fmt::format("the agent speaks protocol {}, this library protocol {}; "
                                        "install the same version of tensorbus on both sides",
                                        welcome.protocol, kProtocol),
                            Reason::kProtocolVersion);
    return;
  }
  Get(in, welcome.status);
  welcome.agent = GetText(in);
  welcome.staging_bytes = in.Get<std::uint64_t>();
}

void Put(ByteWriter& out, const AttachSegment& attach) {
  out.Put(attach.segment);
  PutBool(out, attach.mapped);
  out.Put(attach.bytes);
  out.Put(attach.address);
}
void Get(ByteReader& in, AttachSegment& attach) {
  attach.segment = in.Get<std::uint32_t>();
  attach.mapped = GetBool(in);
  attach.bytes = in.Get<std::uint64_t>();
  attach.address = in.Get<std::uint64_t>();
  if (attach.segment >= kMaxSegments) in.Fail();
}

void Put(ByteWriter& out, const Publish& message) {
  Put(out, message.version);
  out.Put(message.policy);
  out.Put(message.min_replicas);
  PutBool(out, message.receipts);
  out.Put(message.keep_last);
}
void Get(ByteReader& in, Publish& message) {
  Get(in, message.version);
  message.policy = GetEnum(in, SlowConsumer::kSnapshot);
  message.min_replicas = in.Get<std::uint32_t>();
  message.receipts = GetBool(in);
  message.keep_last = in.Get<std::uint32_t>();
}

void Put(ByteWriter& out, const Return& back) {
  Put(out, back.epoch);
  Put(out, back.published);
  Put(out, back.publishing);
  Put(out, back.held);
  out.Put(back.write_count);
}
void Get(ByteReader& in, Return& back) {
  Get(in, back.epoch);
  Get(in, back.published);
  Get(in, back.publishing);
  Get(in, back.held);
  back.write_count = in.Get<std::uint64_t>();
  // Memory holds the newest or none.
  if (back.held.version.value != 0 && back.held.version != back.published) in.Fail();
}

void Put(ByteWriter& out, const Register& message) {
  Put(out, message.registration);
  out.Put(message.flip);
  out.Put(message.proof);
  PutBool(out, message.dirty);
  PutList(out, message.leave_out);
  out.Put(message.private_mode);
  Put(out, message.back);
}
void Get(ByteReader& in, Register& message) {
  Get(in, message.registration);
  message.flip = GetEnum(in, FlipMode::kShadow);
  message.proof = GetEnum(in, Proof::kMemory);
  message.dirty = GetBool(in);
  GetList(in, message.leave_out, sizeof(std::uint32_t), kMaxTensors);
  message.private_mode = in.Get<std::uint8_t>();
  if (message.private_mode > static_cast<std::uint8_t>(MemoryMode::kBucket)) in.Fail();
  Get(in, message.back);
}

void Put(ByteWriter& out, const Registered& message) {
  Put(out, message.status);
  out.Put(message.mode);
  PutText(out, message.why);
  out.Put(message.expected_gb_per_s);
  Put(out, message.epoch);
  Put(out, message.latest_version);
  out.Put(message.register_seconds);
  out.Put(message.prefault_seconds);
}
void Get(ByteReader& in, Registered& message) {
  Get(in, message.status);
  message.mode = GetEnum(in, MemoryMode::kBucket);
  message.why = GetText(in);
  message.expected_gb_per_s = GetAmount(in);
  Get(in, message.epoch);
  Get(in, message.latest_version);
  message.register_seconds = GetAmount(in);
  message.prefault_seconds = GetAmount(in);
}

void Put(ByteWriter& out, const RequestRelease& message) {
  Put(out, message.version);
  out.Put(message.timeout_ms);
}
void Get(ByteReader& in, RequestRelease& message) {
  Get(in, message.version);
  message.timeout_ms = in.Get<std::uint64_t>();
}

void Put(ByteWriter& out, const Released& message) {
  Put(out, message.version);
  Put(out, message.status);
}
void Get(ByteReader& in, Released& message) {
  Get(in, message.version);
  Get(in, message.status);
}

void Put(ByteWriter& out, const Update& message) {
  out.Put(message.selector);
  Put(out, message.version);
  out.Put(message.timeout_ms);
}
void Get(ByteReader& in, Update& message) {
  message.selector = GetEnum(in, Selector::kPinned);
  Get(in, message.version);
  message.timeout_ms = in.Get<std::uint64_t>();
}

void Put(ByteWriter& out, const HookEvent& message) {
  Put(out, message.session);
  Put(out, message.version);
  out.Put(message.timeout_ms);
}
void Get(ByteReader& in, HookEvent& message) {
  Get(in, message.session);
  Get(in, message.version);
  message.timeout_ms = in.Get<std::uint64_t>();
}

void Put(ByteWriter& out, const HookDone& message) {
  Put(out, message.status);
}
void Get(ByteReader& in, HookDone& message) {
  Get(in, message.status);
}

void Put(ByteWriter& out, const Updated& message) {
  Put(out, message.status);
  Put(out, message.version);
  Put(out, message.session);
  out.Put(message.bytes);
  out.Put(message.seconds);
  out.Put(message.copy_seconds);
  Put(out, message.digest);
}
void Get(ByteReader& in, Updated& message) {
  Get(in, message.status);
  Get(in, message.version);
  Get(in, message.session);
  message.bytes = in.Get<std::uint64_t>();
  message.seconds = GetAmount(in);
  message.copy_seconds = GetAmount(in);
  Get(in, message.digest);
}

void Put(ByteWriter& out, const BucketWork& work) {
  PutList(out, work.ranges);
}
void Get(ByteReader& in, BucketWork& work) {
  GetList(in, work.ranges, kBucketRangeBytes, kMaxBucketRanges);
}

void Put(ByteWriter& out, const BucketDone& message) {
  Put(out, message.status);
}
void Get(ByteReader& in, BucketDone& message) {
  Get(in, message.status);
}

void Put(ByteWriter& out, const AttachBucket& message) {
  out.Put(message.bucket);
  out.Put(message.bytes);
}
void Get(ByteReader& in, AttachBucket& message) {
  message.bucket = in.Get<std::uint32_t>();
  message.bytes = in.Get<std::uint64_t>();
}

void Put(ByteWriter& out, const Claimed& message) {
  Put(out, message.status);
  Put(out, message.version);
}
void Get(ByteReader& in, Claimed& message) {
  Get(in, message.status);
  Get(in, message.version);
}

void Put(ByteWriter& out, const Reply& message) {
  Put(out, message.status);
}
void Get(ByteReader& in, Reply& message) {
  Get(in, message.status);
}

}  // namespace

template <typename Message>
std::vector<std::byte> Encode(const Message& message) {
  ByteWriter out;
  Put(out, message);
  return std::move(out).Take();
}

template <typename Message>
Result<Message> Decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Message message;
  Get(in, message);
  TB_RETURN_IF_ERROR(in.Finish("message on the local socket"));
  return message;
}

#define TB_WIRE_MESSAGE(Message)                                  \
  template std::vector<std::byte> Encode(const Message& message); \
  template Result<Message> Decode<Message>(std::span<const std::byte> body)

TB_WIRE_MESSAGE(Hello);
TB_WIRE_MESSAGE(Welcome);
TB_WIRE_MESSAGE(AttachSegment);
TB_WIRE_MESSAGE(Register);
TB_WIRE_MESSAGE(Registered);
TB_WIRE_MESSAGE(Publish);
TB_WIRE_MESSAGE(RequestRelease);
TB_WIRE_MESSAGE(Released);
TB_WIRE_MESSAGE(Update);
TB_WIRE_MESSAGE(HookEvent);
TB_WIRE_MESSAGE(HookDone);
TB_WIRE_MESSAGE(Updated);
TB_WIRE_MESSAGE(BucketWork);
TB_WIRE_MESSAGE(BucketDone);
TB_WIRE_MESSAGE(AttachBucket);
TB_WIRE_MESSAGE(Claimed);
TB_WIRE_MESSAGE(Reply);

#undef TB_WIRE_MESSAGE

}  // namespace tensorbus::wire
