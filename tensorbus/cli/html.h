#pragma once

#include <string>

namespace tensorbus::cli {

/// The parts that pages of this program share. Pages are self-contained: one file, no script from
/// elsewhere, readable in light and dark.

/// Text for use in an element or attribute.
std::string Escape(const std::string& text);
/// A figure on a card. `what` is not escaped.
std::string Fact(const std::string& value, const char* what);
/// Everything up to the heading, and what closes the page.
std::string PageHead(const std::string& title, const std::string& heading);
std::string PageTail();

}  // namespace tensorbus::cli
