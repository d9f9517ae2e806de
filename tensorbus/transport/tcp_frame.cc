#include "tensorbus/transport/tcp_frame.h"

#include <algorithm>
#include <fmt/format.h>

#include "tensorbus/base/byte_io.h"

namespace tensorbus::transport::tcp {

namespace {

constexpr std::uint32_t kMagic = 0x73754254;  // "TBus"

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

template <std::size_t kBytes>
void GetArray(ByteReader& reader, std::array<std::byte, kBytes>& out) {
  const auto bytes = reader.GetBytes(kBytes);
  std::copy(bytes.begin(), bytes.end(), out.begin());
}

Status Malformed(std::string_view what) {
  return {Code::kInvalidArgument, std::string(what), Reason::kMalformed};
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
  ByteWriter body;
  body.Put(kMagic);
  body.Put(hello.version);
  body.PutBytes(hello.nonce);
  return Frame(FrameType::kHello, body);
}

std::vector<std::byte> Encode(const Challenge& challenge) {
  ByteWriter body;
  body.Put(kMagic);
  body.Put(challenge.version);
  body.PutBytes(challenge.nonce);
  body.PutBytes(challenge.mac);
  return Frame(FrameType::kChallenge, body);
}

std::vector<std::byte> Encode(const Answer& answer) {
  ByteWriter body;
  body.PutBytes(answer.mac);
  return Frame(FrameType::kAnswer, body);
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
  ByteWriter body;
  body.Put(request.id);
  body.Put(request.key.session.value);
  body.Put(request.key.source_rank);
  body.Put(request.key.target_rank);
  body.Put(request.shape);
  body.Put(request.blocks);
  body.Put(request.bytes);
  body.Put(request.proof);
  body.Put(request.first);
  body.Put(request.count);
  return Frame(FrameType::kRequest, body);
}

std::vector<std::byte> Encode(const Data& data) {
  ByteWriter body;
  body.Put(data.id);
  body.Put(data.first);
  body.Put(data.count);
  return Frame(FrameType::kData, body);
}

std::vector<std::byte> Encode(const Trailer& trailer) {
  ByteWriter body;
  body.Put(trailer.id);
  body.Put(trailer.checksum);
  body.Put(static_cast<std::uint32_t>(trailer.parts.size()));
  for (const Trailer::Part& part : trailer.parts) {
    body.Put(part.a);
    body.Put(part.b);
  }
  return Frame(FrameType::kTrailer, body);
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
  ByteReader reader(body);
  if (reader.Get<std::uint32_t>() != kMagic) return Malformed("hello: not this protocol");
  Hello hello;
  hello.version = reader.Get<std::uint32_t>();
  GetArray(reader, hello.nonce);
  TB_RETURN_IF_ERROR(reader.Finish("hello"));
  return hello;
}

Result<Challenge> ParseChallenge(std::span<const std::byte> body) {
  ByteReader reader(body);
  if (reader.Get<std::uint32_t>() != kMagic) return Malformed("challenge: not this protocol");
  Challenge challenge;
  challenge.version = reader.Get<std::uint32_t>();
  GetArray(reader, challenge.nonce);
  GetArray(reader, challenge.mac);
  TB_RETURN_IF_ERROR(reader.Finish("challenge"));
  return challenge;
}

Result<Answer> ParseAnswer(std::span<const std::byte> body) {
  ByteReader reader(body);
  Answer answer;
  GetArray(reader, answer.mac);
  TB_RETURN_IF_ERROR(reader.Finish("answer"));
  return answer;
}

Status ParseWelcome(std::span<const std::byte> body) {
  return ByteReader(body).Finish("welcome");
}

Result<Request> ParseRequest(std::span<const std::byte> body) {
  ByteReader reader(body);
  Request request;
  request.id = reader.Get<std::uint64_t>();
  request.key.session.value = reader.Get<std::uint64_t>();
  request.key.source_rank = reader.Get<std::uint32_t>();
  request.key.target_rank = reader.Get<std::uint32_t>();
  request.shape = reader.Get<std::uint64_t>();
  request.blocks = reader.Get<std::uint32_t>();
  request.bytes = reader.Get<std::uint64_t>();
  request.proof = reader.Get<Proof>();
  request.first = reader.Get<std::uint64_t>();
  request.count = reader.Get<std::uint64_t>();
  TB_RETURN_IF_ERROR(reader.Finish("request"));
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
  ByteReader reader(body);
  Data data;
  data.id = reader.Get<std::uint64_t>();
  data.first = reader.Get<std::uint64_t>();
  data.count = reader.Get<std::uint64_t>();
  TB_RETURN_IF_ERROR(reader.Finish("data"));
  return data;
}

Result<Trailer> ParseTrailer(std::span<const std::byte> body) {
  ByteReader reader(body);
  Trailer trailer;
  trailer.id = reader.Get<std::uint64_t>();
  trailer.checksum = reader.Get<std::uint64_t>();
  const std::uint32_t count = reader.GetCount(2 * sizeof(std::uint64_t));
  if (count > kPartsMax) return Malformed("trailer: too many parts");
  trailer.parts.resize(count);
  for (Trailer::Part& part : trailer.parts) {
    part.a = reader.Get<std::uint64_t>();
    part.b = reader.Get<std::uint64_t>();
  }
  TB_RETURN_IF_ERROR(reader.Finish("trailer"));
  return trailer;
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
