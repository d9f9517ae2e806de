#pragma once

#include <optional>

#include <CLI/CLI.hpp>

// What the command lines of tensorbusd and tensorbus-agent have in common. A library of its own:
// nobody else links CLI11 through base.
namespace tensorbus {

/// Adds --config FILE, of which every key must be a flag of `app`, and --print-config.
void AddConfigFlags(CLI::App& app);

/// Parses the command line: flags beat the variables that flags name (Option::envname()), which
/// beat --config. Answers --help and --print-config; says what is wrong on standard error.
///
/// Returns the exit code if the program is to end now: 0 answered, 1 standard output cannot be
/// written, 2 bad usage.
std::optional<int> ParseServiceFlags(CLI::App& app, int argc, const char* const* argv);

}  // namespace tensorbus
