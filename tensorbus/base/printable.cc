#include "tensorbus/base/printable.h"

#include <algorithm>
#include <cstdint>
#include <fmt/format.h>

namespace tensorbus {
namespace {

/// What a text begins with. A byte that begins no character stands alone and is not `valid`.
struct Character {
  std::uint32_t code = 0;
  std::size_t bytes = 1;
  bool valid = false;
};

Character First(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return {.code = lead, .bytes = 1, .valid = true};
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {.code = lead};
  std::uint32_t code = lead & (0x7fU >> bytes);
  for (const char next : text.substr(1, bytes - 1)) {
    const auto byte = static_cast<unsigned char>(next);
    if ((byte & 0xc0) != 0x80) return {.code = lead};
    code = code << 6 | (byte & 0x3fU);
  }
  const std::uint32_t least = bytes == 4 ? 0x10000 : bytes == 3 ? 0x800 : 0x80;
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < least || code > 0x10ffff || surrogate) return {.code = lead};
  return {.code = code, .bytes = bytes, .valid = true};
}

bool Acts(std::uint32_t code) {
  const auto between = [code](std::uint32_t first, std::uint32_t last) {
    return code >= first && code <= last;
  };
  return code < 0x20 || between(0x7f, 0x9f)            // controls
         || between(0x2028, 0x2029)                    // separators of lines and paragraphs
         || code == 0x061c || between(0x200e, 0x200f)  // marks of direction
         || between(0x202a, 0x202e) || between(0x2066, 0x2069);
}

/// Whether a cut before byte `at` would go through a character, if the text is UTF-8.
bool Splits(std::string_view text, std::size_t at) {
  return at > 0 && at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80;
}

constexpr int kMostOfACharacter = 3;  // bytes after its first

std::string_view Beginning(std::string_view text, std::size_t bytes) {
  for (int i = 0; i < kMostOfACharacter && Splits(text, bytes); ++i) --bytes;
  return text.substr(0, bytes);
}

std::string_view Ending(std::string_view text, std::size_t bytes) {
  std::size_t at = text.size() - bytes;
  for (int i = 0; i < kMostOfACharacter && Splits(text, at); ++i) ++at;
  return text.substr(at);
}

}  // namespace

bool IsPrintable(std::string_view text) {
  while (!text.empty()) {
    const Character next = First(text);
    if (!next.valid || Acts(next.code)) return false;
    text.remove_prefix(next.bytes);
  }
  return true;
}

std::string Printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const Character next = First(text);
    if (next.code == '\n') {
      out += "\\n";
    } else if (!next.valid || (Acts(next.code) && next.code < 0x80)) {
      out += fmt::format("\\x{:02x}", next.code);
    } else if (Acts(next.code)) {
      out += fmt::format("\\u{{{:04x}}}", next.code);
    } else {
      out += text.substr(0, next.bytes);
    }
    text.remove_prefix(next.bytes);
  }
  return out;
}

std::string Shortened(std::string_view text, std::size_t bytes) {
  constexpr std::string_view kGap = "[...]";
  constexpr std::size_t kLeast = 64;
  constexpr std::size_t kMostOfTheEnd = 1024;
  if (text.size() <= bytes) return std::string(text);
  if (bytes < kLeast) return std::string(Beginning(text, bytes));
  const std::string_view ending = Ending(text, std::min(bytes / 2, kMostOfTheEnd));
  std::string out(Beginning(text, bytes - kGap.size() - ending.size()));
  out += kGap;
  out += ending;
  return out;
}

}  // namespace tensorbus
