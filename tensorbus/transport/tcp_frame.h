#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport::tcp {

/// The messages between two TcpTransports, little-endian: u8 type, three zero bytes, u32 body
/// length, body. A kData frame is followed by `count` payload bytes that belong to no frame.
///
///   target                         source
///   kHello         ->
///                  <-  kChallenge            proof that the source knows the token
///   kAnswer        ->                        proof that the target does
///                  <-  kWelcome
///   kRequest …     ->
///                  <-  kData, payload, kTrailer      one triple per request, in order
///                  <-  kFailure                      instead of kData or of kTrailer
///   A source that will not go on says kRefusal and closes.
enum class FrameType : std::uint8_t {
  kHello = 1,
  kChallenge = 2,
  kAnswer = 3,
  kWelcome = 4,
  kRefusal = 5,
  kRequest = 6,
  kData = 7,
  kTrailer = 8,
  kFailure = 9,
};

inline constexpr std::uint32_t kTcpMagic = 0x73754254;  // "TBus"
inline constexpr std::uint32_t kTcpProtocolVersion = 2;
inline constexpr std::size_t kFrameHeaderBytes = 8;
/// Most blocks a window may touch, so that a trailer has a bound.
inline constexpr std::uint32_t kPartsMax = 4096;
/// Most payload one request may ask for.
inline constexpr std::uint64_t kWindowBytesMax = std::uint64_t{64} << 20;
inline constexpr std::uint32_t kMessageBytesMax = 1024;
inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kMacBytes = 32;

using Nonce = std::array<std::byte, kNonceBytes>;
using Mac = std::array<std::byte, kMacBytes>;

struct FrameHeader {
  FrameType type = FrameType::kHello;
  std::uint32_t body_bytes = 0;
};

struct Hello {
  std::uint32_t magic = kTcpMagic;
  std::uint32_t version = kTcpProtocolVersion;
  Nonce nonce = {};
};

struct Challenge {
  std::uint32_t magic = kTcpMagic;
  std::uint32_t version = kTcpProtocolVersion;
  Nonce nonce = {};
  Mac mac = {};
};

struct Answer {
  Mac mac = {};
};

/// Asks for bytes [first, first + count) of a route. `shape`, `blocks` and `bytes` describe the
/// target's end, for comparison; `mac` shows the session's capability, see PullMac().
struct Request {
  std::uint64_t id = 0;
  RouteKey key = {};
  std::uint64_t shape = 0;
  std::uint32_t blocks = 0;
  std::uint64_t bytes = 0;
  Proof proof = Proof::kReadback;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  Mac mac = {};
};

struct Data {
  std::uint64_t id = 0;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

/// What the source knows about the window it sent.
struct Trailer {
  struct Part {
    std::uint64_t a = 0;
    std::uint64_t b = 0;
  };
  std::uint64_t id = 0;
  std::uint64_t checksum = 0;    ///< XXH3-64 of the payload
  std::vector<Part> parts = {};  ///< sums of the window's part of every block it touches, in order
};

/// `id` is 0 in a refusal.
struct Failure {
  std::uint64_t id = 0;
  Status status;
};

/// Whole frames, header included.
std::vector<std::byte> Encode(const Hello& hello);
std::vector<std::byte> Encode(const Challenge& challenge);
std::vector<std::byte> Encode(const Answer& answer);
std::vector<std::byte> EncodeWelcome();
std::vector<std::byte> EncodeRefusal(const Status& status);
std::vector<std::byte> Encode(const Request& request);
std::vector<std::byte> Encode(const Data& data);
std::vector<std::byte> Encode(const Trailer& trailer);
std::vector<std::byte> EncodeFailure(std::uint64_t id, const Status& status);

/// Bodies, from bytes nobody vouches for. Error: kInvalidArgument/kMalformed.
Result<FrameHeader> ParseHeader(std::span<const std::byte, kFrameHeaderBytes> bytes);
Result<Hello> ParseHello(std::span<const std::byte> body);
Result<Challenge> ParseChallenge(std::span<const std::byte> body);
Result<Answer> ParseAnswer(std::span<const std::byte> body);
Status ParseWelcome(std::span<const std::byte> body);
Result<Request> ParseRequest(std::span<const std::byte> body);
Result<Data> ParseData(std::span<const std::byte> body);
Result<Trailer> ParseTrailer(std::span<const std::byte> body);
/// Of kFailure and kRefusal alike. Text that is not printable ASCII is replaced.
Result<Failure> ParseFailure(std::span<const std::byte> body);

}  // namespace tensorbus::transport::tcp
