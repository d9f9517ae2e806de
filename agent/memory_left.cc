#include "agent/memory_left.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <fstream>
#include <limits>
#include <sstream>
#include <sys/mman.h>
#include <unistd.h>

namespace tensorbus::agent {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// The number that `text` begins with after blanks, or `otherwise`.
std::uint64_t NumberIn(std::string_view text, std::uint64_t otherwise) {
  const std::size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return otherwise;
  std::uint64_t number = 0;
  const char* const begin = text.data() + first;
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), number);
  return error == std::errc() ? number : otherwise;
}

}  // namespace

std::uint64_t MissingBytes(std::span<const std::span<std::byte>> parts, std::uint64_t enough) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident(1U << 16);
  std::uint64_t missing = 0;
  for (const std::span<std::byte> part : parts) {
    std::uintptr_t at = reinterpret_cast<std::uintptr_t>(part.data()) & ~(page - 1);
    const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(part.data()) + part.size();
    while (at < end && missing <= enough) {
      const std::uintptr_t count =
          std::min<std::uintptr_t>(resident.size(), (end - at + page - 1) / page);
      if (::mincore(reinterpret_cast<void*>(at), count * page, resident.data()) != 0)
        return missing;
      for (std::uintptr_t i = 0; i < count; ++i) {
        if ((resident[i] & 1U) == 0) missing += page;
      }
      at += count * page;
    }
  }
  return missing;
}

std::uint64_t AvailableBytes(std::string_view meminfo, std::string_view cgroup_max,
                             std::string_view cgroup_current) {
  constexpr std::string_view kKey = "MemAvailable:";
  std::uint64_t available = kUnlimited;
  if (const std::size_t at = meminfo.find(kKey); at != std::string_view::npos) {
    const std::uint64_t kib = NumberIn(meminfo.substr(at + kKey.size()), kUnlimited >> 10);
    available = kib << 10;
  }
  const std::uint64_t limit = NumberIn(cgroup_max, kUnlimited);  // "max" is no number
  if (limit != kUnlimited) {
    const std::uint64_t used = NumberIn(cgroup_current, 0);
    available = std::min(available, limit > used ? limit - used : 0);
  }
  return available;
}

std::uint64_t AvailableBytes() {
  // The cgroup as a container sees it; elsewhere the files are not there and do not count.
  return AvailableBytes(ReadText("/proc/meminfo"), ReadText("/sys/fs/cgroup/memory.max"),
                        ReadText("/sys/fs/cgroup/memory.current"));
}

Status CheckMemoryLeft(std::span<const std::span<std::byte>> parts) {
  const std::uint64_t available = AvailableBytes();
  if (MissingBytes(parts, available) <= available) return {};
  std::uint64_t bytes = 0;
  for (const std::span<std::byte> part : parts) bytes += part.size();
  return {Code::kResourceExhausted,
          fmt::format("{} MiB are to be filled, {} MiB are available on this machine", bytes >> 20,
                      available >> 20),
          Reason::kOutOfMemory};
}

}  // namespace tensorbus::agent
