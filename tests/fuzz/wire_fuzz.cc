// Bodies of the local socket's messages: the first byte picks the message. Whatever decodes must
// encode to the bytes it came from.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "worker_shim/wire.h"

namespace tensorbus::wire {
namespace {

template <typename Message>
void TryDecode(std::span<const std::byte> body) {
  const auto decoded = Decode<Message>(body);
  if (!decoded.ok()) return;
  if constexpr (requires { decoded->protocol; }) {
    if (decoded->protocol != kProtocol) return;
  }
  const auto again = Encode(*decoded);
  if (!std::ranges::equal(again, body)) std::abort();
}

constexpr std::array kDecoders = {
    &TryDecode<Hello>,          &TryDecode<Welcome>,    &TryDecode<AttachSegment>,
    &TryDecode<Register>,       &TryDecode<Registered>, &TryDecode<Publish>,
    &TryDecode<RequestRelease>, &TryDecode<Released>,   &TryDecode<Update>,
    &TryDecode<HookEvent>,      &TryDecode<HookDone>,   &TryDecode<Updated>,
    &TryDecode<BucketWork>,     &TryDecode<BucketDone>, &TryDecode<AttachBucket>,
    &TryDecode<Claimed>,        &TryDecode<Reply>};

}  // namespace
}  // namespace tensorbus::wire

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorbus::wire;  // NOLINT(google-build-using-namespace)
  if (size == 0) return 0;
  const auto body = std::as_bytes(std::span(data, size)).subspan(1);
  kDecoders[data[0] % kDecoders.size()](body);
  return 0;
}
