#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace tensorbus::cli {

/// What commands print: keeps fields in the order in which they are put.
using OrderedJson = nlohmann::ordered_json;

/// As text; invalid UTF-8 in names is replaced rather than thrown about.
std::string Dump(const OrderedJson& json);

}  // namespace tensorbus::cli
