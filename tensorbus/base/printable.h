#pragma once

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

}  // namespace tensorbus
