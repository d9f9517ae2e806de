#pragma once

#include <cstddef>
#include <string>
#include <string_view>

// Text that other processes, files and people gave, on its way to a terminal or a log.
namespace tensorbus {

/// Whether `text` is UTF-8 of which a terminal shows every character and acts on none: no control
/// characters (C0, DEL, C1), no line or paragraph separators, no marks that turn the direction of
/// what follows.
bool IsPrintable(std::string_view text);

/// `text` with everything else shown: a line's end as `\n`, another control character of ASCII or a
/// byte that is not UTF-8 as `\xNN`, any other character as `\u{NNNN}`.
std::string Printable(std::string_view text);

/// `text` in at most so many bytes, cut between characters of UTF-8. Messages begin with what they
/// are about and end with what helps, a file or a remedy: what is too much is taken from between,
/// where "[...]" stands then. In fewer than 64 bytes there is room for the beginning only.
std::string Shortened(std::string_view text, std::size_t bytes);

}  // namespace tensorbus
