#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "tensorbus/base/status.h"

// Where this program is, and what comes with it.
namespace tensorbus::cli {

/// The path of the running program, and the folder it is in.
std::string OwnPath();
std::string OwnFolder();

/// The path of a program that comes with this one: beside it, else on PATH. Error: kNotFound.
Result<std::string> FindProgram(const std::string& name);

/// The first path that `find` gives, asked for the folder of this program and those above it, the
/// nearest first; "" when it gives none for any.
std::string FindUpwards(const std::function<std::string(const std::filesystem::path&)>& find);

}  // namespace tensorbus::cli
