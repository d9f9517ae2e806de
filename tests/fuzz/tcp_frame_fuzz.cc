// Frames of the tcp transport, one after the other, as they come off a socket before anybody is
// trusted. Whatever decodes must encode to the bytes it came from.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "tensorbus/transport/tcp_frame.h"

namespace tensorbus::transport::tcp {
namespace {

using Bytes = std::span<const std::byte>;

template <typename Message>
void CheckSame(const Result<Message>& decoded, Bytes frame) {
  if (decoded.ok() && !std::ranges::equal(Encode(*decoded), frame)) std::abort();
}

void TryBody(FrameType type, Bytes frame) {
  const Bytes body = frame.subspan(kFrameHeaderBytes);
  switch (type) {
    case FrameType::kHello:
      return CheckSame(ParseHello(body), frame);
    case FrameType::kChallenge:
      return CheckSame(ParseChallenge(body), frame);
    case FrameType::kAnswer:
      return CheckSame(ParseAnswer(body), frame);
    case FrameType::kWelcome:
      if (ParseWelcome(body).ok() != body.empty()) std::abort();
      return;
    case FrameType::kRequest:
      return CheckSame(ParseRequest(body), frame);
    case FrameType::kData:
      return CheckSame(ParseData(body), frame);
    case FrameType::kTrailer:
      return CheckSame(ParseTrailer(body), frame);
    case FrameType::kRefusal:
    case FrameType::kFailure: {
      const auto failure = ParseFailure(body);
      if (failure.ok() && failure->status.ok()) std::abort();
      return;
    }
  }
  std::abort();  // ParseHeader() lets no other type through
}

}  // namespace
}  // namespace tensorbus::transport::tcp

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorbus::transport::tcp;  // NOLINT(google-build-using-namespace)
  auto rest = std::as_bytes(std::span(data, size));
  while (rest.size() >= kFrameHeaderBytes) {
    const auto header = ParseHeader(rest.first<kFrameHeaderBytes>());
    if (!header.ok() || rest.size() - kFrameHeaderBytes < header->body_bytes) break;
    const std::size_t frame_bytes = kFrameHeaderBytes + header->body_bytes;
    TryBody(header->type, rest.first(frame_bytes));
    rest = rest.subspan(frame_bytes);
  }
  return 0;
}
