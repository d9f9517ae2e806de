#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensorbus/base/status.h"

namespace tensorbus::agent {

/// Bytes of pages behind shared memory that the kernel would still have to find. Stops to count
/// beyond `enough`.
std::uint64_t MissingBytes(std::span<const std::span<std::byte>> parts, std::uint64_t enough);

/// Bytes this process may still fill: what the machine says is available, or less if its memory
/// cgroup allows less. Zero when neither can be read.
std::uint64_t AvailableBytes();

/// The same from the texts of /proc/meminfo, memory.max and memory.current; "" for what is not
/// there.
std::uint64_t AvailableBytes(std::string_view meminfo, std::string_view cgroup_max,
                             std::string_view cgroup_current);

/// Whether `parts` can be touched at all. Filling memory until the kernel kills somebody is no way
/// to find out.
///
/// Error: kResourceExhausted/kOutOfMemory naming both amounts.
Status CheckMemoryLeft(std::span<const std::span<std::byte>> parts);

}  // namespace tensorbus::agent
