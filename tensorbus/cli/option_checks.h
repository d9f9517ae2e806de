#pragma once

#include <CLI/CLI.hpp>

// What CLI11 lets through by itself: -1 is a great unsigned number.
namespace tensorbus::cli {

/// The number of a version, from `least` to the greatest that can be published.
CLI::Validator IsVersion(unsigned least);

}  // namespace tensorbus::cli
