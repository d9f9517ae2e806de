// Readers of layouts from outside: the first byte picks one. Whatever is accepted must be valid
// and, for the binary forms, come out again as the bytes it was read from.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "tensorbus/formats/layout_book_file.h"
#include "tensorbus/formats/layout_file.h"
#include "tensorbus/formats/manifest_file.h"
#include "tensorbus/formats/view_file.h"
#include "tensorbus/types/layout.h"

namespace tensorbus {
namespace {

void Require(bool fact) {
  if (!fact) std::abort();
}

void TryBytes(char kind, std::span<const std::byte> bytes) {
  if (kind == 'j') {
    const auto layout = ParseJobLayout(bytes);
    if (layout.ok()) Require(std::ranges::equal(Serialize(*layout), bytes));
  } else {
    const auto layout = ParseRankLayout(bytes, 0);
    if (layout.ok()) Require(std::ranges::equal(Serialize(*layout), bytes));
  }
}

void TryText(char kind, std::string_view text) {
  switch (kind) {
    case 'l':
      if (const auto layout = formats::ParseLayoutFile(text); layout.ok())
        Require(Validate(*layout).ok());
      break;
    case 'm':
      (void)formats::ParseManifest(text);
      break;
    case 'b':
      (void)formats::ParseLayoutBook(text);
      break;
    default:
      (void)formats::ParseViewFile(text);
      break;
  }
}

}  // namespace
}  // namespace tensorbus

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto kind = static_cast<char>(data[0]);
  const auto rest = std::span(data, size).subspan(1);
  if (kind == 'j' || kind == 'r') {
    tensorbus::TryBytes(kind, std::as_bytes(rest));
  } else {
    tensorbus::TryText(kind, {reinterpret_cast<const char*>(rest.data()), rest.size()});
  }
  return 0;
}
