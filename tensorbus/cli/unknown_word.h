#pragma once

#include <optional>
#include <string>

namespace CLI {
class App;
}  // namespace CLI

namespace tensorbus::cli {

/// What to say of the first word that `app`, which has parsed its command line, did not understand:
/// which command knows no such command, option or argument, what may have been meant, and where all
/// are listed. Nothing when it understood every word.
std::optional<std::string> ExplainUnknownWord(const CLI::App& app);

}  // namespace tensorbus::cli
