#include "tensorbus/transport/tcp_frame.h"

#include <algorithm>
#include <concepts>
#include <fmt/format.h>
#include <tuple>

#include "tensorbus/base/byte_io.h"

namespace tensorbus::transport::tcp {

namespace {

/// Longest body of each type; 0 for unknown types.
std::uint32_t BodyBytesMax(FrameType type) {
  switch (type) {
    case FrameType::kHello:
    case FrameType::kChallenge:
    case FrameType::kAnswer:
    case FrameType::kWelcome:
    case FrameType::kRequest:
    case FrameType::kData:
      return 128;
    case FrameType::kRefusal:
    case FrameType::kFailure:
      return 16 + 4 + kMessageBytesMax;
    case FrameType::kTrailer:
      return 20 + 16 * kPartsMax;
  }
  return 0;
}

std::vector<std::byte> Frame(FrameType type, const ByteWriter& body) {
  ByteWriter frame;
  frame.Put(type);
  frame.Put(std::uint8_t{0});
  frame.Put(std::uint16_t{0});
  frame.Put(static_cast<std::uint32_t>(body.size()));
  frame.PutBytes(body.bytes());
  return std::move(frame).Take();
}

Status Malformed(std::string_view what) {
  return {Code::kInvalidArgument, std::string(what), Reason::kMalformed};
}

// The fields of each message in the order of the wire, for writing and for reading.

template <typename M, typename Message>
concept Is = std::same_as<std::remove_const_t<M>, Message>;

auto FieldsOf(Is<Hello> auto& m) {
  return std::tie(m.magic, m.version, m.nonce);
}
auto FieldsOf(Is<Challenge> auto& m) {
  return std::tie(m.magic, m.version, m.nonce, m.mac);
}
auto FieldsOf(Is<Answer> auto& m) {
  return std::tie(m.mac);
}
auto FieldsOf(Is<Request> auto& m) {
  return std::tie(m.id, m.key.session.value, m.key.source_rank, m.key.target_rank, m.shape,
                  m.blocks, m.bytes, m.proof, m.first, m.count, m.mac);
}
auto FieldsOf(Is<Data> auto& m) {
  return std::tie(m.id, m.first, m.count);
}
auto FieldsOf(Is<Trailer> auto& m) {
  return std::tie(m.id, m.checksum, m.parts);
}

template <typename Number>
void PutField(ByteWriter& out, Number value) {
  out.Put(value);
}
template <std::size_t kBytes>
void PutField(ByteWriter& out, const std::array<std::byte, kBytes>& bytes) {
  out.PutBytes(bytes);
}
void PutField(ByteWriter& out, const std::vector<Trailer::Part>& parts) {
  out.Put(static_cast<std::uint32_t>(parts.size()));
  for (const Trailer::Part& part : parts) {
    out.Put(part.a);
    out.Put(part.b);
  }
}

template <typename Number>
void GetField(ByteReader& in, Number& value) {
  value = in.Get<Number>();
}
template <std::size_t kBytes>
void GetField(ByteReader& in, std::array<std::byte, kBytes>& out) {
  const auto bytes = in.GetBytes(kBytes);
  std::copy(bytes.begin(), bytes.end(), out.begin());
}
void GetField(ByteReader& in, std::vector<Trailer::Part>& parts) {
  const std::uint32_t count = in.GetCount(2 * sizeof(std::uint64_t));
  if (count > kPartsMax) return in.Fail();
  parts.resize(count);
  for (Trailer::Part& part : parts) {
    part.a = in.Get<std::uint64_t>();
    part.b = in.Get<std::uint64_t>();
  }
}

template <typename Message>
std::vector<std::byte> FrameOf(FrameType type, const Message& message) {
  ByteWriter body;
  std::apply([&body](const auto&... field) { (PutField(body, field), ...); }, FieldsOf(message));
  return Frame(type, body);
}

template <typename Message>
Result<Message> Parse(std::string_view what, std::span<const std::byte> body) {
  ByteReader reader(body);
  Message message;
  std::apply([&reader](auto&... field) { (GetField(reader, field), ...); }, FieldsOf(message));
  TB_RETURN_IF_ERROR(reader.Finish(what));
  return message;
}

/// The same for the two messages that say first which protocol it is.
template <typename Message>
Result<Message> ParseGreeting(std::string_view what, std::span<const std::byte> body) {
  TB_ASSIGN_OR_RETURN(Message message, Parse<Message>(what, body));
  if (message.magic != kTcpMagic) return Malformed(fmt::format("{}: not this protocol", what));
  return message;
}

std::vector<std::byte> FailureFrame(FrameType type, std::uint64_t id, const Status& status) {
  ByteWriter body;
  body.Put(id);
  body.Put(status.code());
  body.Put(status.reason());
  body.PutString(std::string_view(status.message()).substr(0, kMessageBytesMax));
  return Frame(type, body);
}

}  // namespace

std::vector<std::byte> Encode(const Hello& hello) {
  return FrameOf(FrameType::kHello, hello);
}

std::vector<std::byte> Encode(const Challenge& challenge) {
  return FrameOf(FrameType::kChallenge, challenge);
}

std::vector<std::byte> Encode(const Answer& answer) {
  return FrameOf(FrameType::kAnswer, answer);
}

std::vector<std::byte> EncodeWelcome() {
  return Frame(FrameType::kWelcome, ByteWriter());
}

std::vector<std::byte> EncodeRefusal(const Status& status) {
  return FailureFrame(FrameType::kRefusal, 0, status);
}

std::vector<std::byte> EncodeFailure(std::uint64_t id, const Status& status) {
  return FailureFrame(FrameType::kFailure, id, status);
}

std::vector<std::byte> Encode(const Request& request) {
  return FrameOf(FrameType::kRequest, request);
}

std::vector<std::byte> Encode(const Data& data) {
  return FrameOf(FrameType::kData, data);
}

std::vector<std::byte> Encode(const Trailer& trailer) {
  return FrameOf(FrameType::kTrailer, trailer);
}

Result<FrameHeader> ParseHeader(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  ByteReader reader(bytes);
  FrameHeader header;
  header.type = reader.Get<FrameType>();
  const auto zero1 = reader.Get<std::uint8_t>();
  const auto zero2 = reader.Get<std::uint16_t>();
  header.body_bytes = reader.Get<std::uint32_t>();
  TB_RETURN_IF_ERROR(reader.Finish("frame header"));
  const std::uint32_t most = BodyBytesMax(header.type);
  if (zero1 != 0 || zero2 != 0 || most == 0) return Malformed("frame header: unknown type");
  if (header.body_bytes > most) {
    return Malformed(fmt::format("frame header: body of {} bytes", header.body_bytes));
  }
  return header;
}

Result<Hello> ParseHello(std::span<const std::byte> body) {
  return ParseGreeting<Hello>("hello", body);
}

Result<Challenge> ParseChallenge(std::span<const std::byte> body) {
  return ParseGreeting<Challenge>("challenge", body);
}

Result<Answer> ParseAnswer(std::span<const std::byte> body) {
  return Parse<Answer>("answer", body);
}

Status ParseWelcome(std::span<const std::byte> body) {
  return ByteReader(body).Finish("welcome");
}

Result<Request> ParseRequest(std::span<const std::byte> body) {
  TB_ASSIGN_OR_RETURN(const Request request, Parse<Request>("request", body));
  if (request.proof < Proof::kOff || request.proof > Proof::kMemory) {
    return Malformed("request: unknown proof");
  }
  if (request.count > kWindowBytesMax || request.first > request.bytes ||
      request.count > request.bytes - request.first) {
    return Malformed("request: range outside the route or too long");
  }
  return request;
}

Result<Data> ParseData(std::span<const std::byte> body) {
  return Parse<Data>("data", body);
}

Result<Trailer> ParseTrailer(std::span<const std::byte> body) {
  return Parse<Trailer>("trailer", body);
}

Result<Failure> ParseFailure(std::span<const std::byte> body) {
  ByteReader reader(body);
  Failure failure;
  failure.id = reader.Get<std::uint64_t>();
  auto code = reader.Get<Code>();
  auto reason = reader.Get<Reason>();
  std::string message = reader.GetString(kMessageBytesMax);
  TB_RETURN_IF_ERROR(reader.Finish("failure"));
  if (code == Code::kOk || code > Code::kUnauthenticated) code = Code::kUnknown;
  if (reason > Reason::kBusy) reason = Reason::kNone;
  for (char& c : message) {
    if (c < ' ' || c > '~') c = '?';
  }
  failure.status = Status(code, std::move(message), reason);
  return failure;
}

}  // namespace tensorbus::transport::tcp
