#include "tensorbus/cli/bench_metrics.h"

#include <arpa/inet.h>
#include <array>
#include <cstdlib>
#include <fstream>
#include <netinet/in.h>
#include <sstream>
#include <string_view>
#include <sys/socket.h>
#include <sys/time.h>

#include "tensorbus/base/unique_fd.h"

namespace tensorbus::cli {
namespace {

constexpr std::size_t kPageBytesMax = 1 << 20;

/// The port in a line `event=metrics_listening port=N`; 0 for none.
std::uint16_t PortIn(const std::string& log_path) {
  std::ifstream log(log_path);
  for (std::string line; std::getline(log, line);) {
    if (line.find("metrics_listening") == std::string::npos) continue;
    const std::size_t at = line.find("port=");
    if (at == std::string::npos) continue;
    return static_cast<std::uint16_t>(std::strtoul(line.c_str() + at + 5, nullptr, 10));
  }
  return 0;
}

std::string Fetch(std::uint16_t port) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return "";
  const timeval timeout = {2, 0};
  for (const int which : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    ::setsockopt(fd.get(), SOL_SOCKET, which, &timeout, sizeof timeout);
  }
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return "";
  }
  constexpr std::string_view kRequest =
      "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  if (::send(fd.get(), kRequest.data(), kRequest.size(), MSG_NOSIGNAL) < 0) return "";
  std::string page;
  std::array<char, 4096> part = {};
  while (page.size() < kPageBytesMax) {
    const ssize_t got = ::recv(fd.get(), part.data(), part.size(), 0);
    if (got <= 0) break;
    page.append(part.data(), static_cast<std::size_t>(got));
  }
  return page;
}

}  // namespace

std::optional<double> ReadMetric(const std::string& log_path, const std::string& name) {
  const std::uint16_t port = PortIn(log_path);
  if (port == 0) return std::nullopt;
  std::istringstream page(Fetch(port));
  for (std::string line; std::getline(page, line);) {
    if (line.rfind(name + " ", 0) != 0) continue;
    return std::strtod(line.c_str() + name.size() + 1, nullptr);
  }
  return std::nullopt;
}

}  // namespace tensorbus::cli
