#include "simulate/network.h"

#include <cmath>
#include <fmt/format.h>

namespace tensorbus::simulate {
namespace {

/// A copy reads and writes.
constexpr double kCopyTouches = 2;
/// A socket's kernel copies, and the NIC reads or writes what was copied.
constexpr double kSocketTouches = 3;

}  // namespace

const PortSpeed& Network::SpeedOf(LinkType type) const {
  switch (type) {
    case LinkType::kNicOut:
    case LinkType::kNicIn:
      return cluster_.nic;
    case LinkType::kNvlinkOut:
    case LinkType::kNvlinkIn:
      return cluster_.nvlink;
    case LinkType::kPcieOut:
    case LinkType::kPcieIn:
      return cluster_.pcie;
    case LinkType::kMemory:
      break;
  }
  return cluster_.memory;
}

Hop Network::At(LinkType type, std::uint32_t node, std::uint32_t place, double touches,
                double bytes) {
  const PortSpeed& speed = SpeedOf(type);
  const auto [at, fresh] =
      known_.emplace(std::tuple(type, node, place), static_cast<std::uint32_t>(capacities_.size()));
  if (fresh) {
    capacities_.push_back(speed.bytes_per_s);
    types_.push_back(type);
    places_.push_back({node, place});
  }
  const double messages = std::ceil(bytes / static_cast<double>(cluster_.window_bytes));
  const double overhead = bytes > 0 ? messages * speed.message_s * speed.bytes_per_s / bytes : 0;
  return {at->second, touches + overhead};
}

bool Network::InOneDomain(const Seat& a, const Seat& b) const {
  return a.node / cluster_.nodes_per_nvlink_domain == b.node / cluster_.nodes_per_nvlink_domain;
}

std::vector<Hop> Network::Route(const Seat& from, const Seat& to, bool local, double bytes) {
  const bool host = !cluster_.gpus;
  const auto memory_of = [&](const Seat& seat) { return host ? 0 : seat.device; };
  if (local || from == to || (host && from.node == to.node))
    return {At(LinkType::kMemory, to.node, memory_of(to), kCopyTouches, bytes)};
  if (cluster_.gpus && cluster_.nvlink.bytes_per_s > 0 && InOneDomain(from, to)) {
    return {At(LinkType::kNvlinkOut, from.node, from.device, 1, bytes),
            At(LinkType::kNvlinkIn, to.node, to.device, 1, bytes)};
  }
  std::vector<Hop> hops;
  if (cluster_.gpus && cluster_.pcie.bytes_per_s > 0) {
    hops.push_back(At(LinkType::kPcieOut, from.node, from.device, 1, bytes));
    hops.push_back(At(LinkType::kPcieIn, to.node, to.device, 1, bytes));
  }
  if (from.node == to.node) return hops;
  if (host) {
    hops.push_back(At(LinkType::kMemory, from.node, 0, kSocketTouches, bytes));
    hops.push_back(At(LinkType::kMemory, to.node, 0, kSocketTouches, bytes));
  }
  hops.push_back(At(LinkType::kNicOut, from.node, from.device % cluster_.nics_per_node, 1, bytes));
  hops.push_back(At(LinkType::kNicIn, to.node, to.device % cluster_.nics_per_node, 1, bytes));
  return hops;
}

double Network::Touches(std::uint32_t link, std::size_t hop_count) const {
  if (types_[link] != LinkType::kMemory) return 1;
  return hop_count == 1 ? kCopyTouches : kSocketTouches;
}

std::vector<std::uint32_t> Network::Groups() const {
  std::vector<std::uint32_t> groups;
  for (const LinkType type : types_) groups.push_back(static_cast<std::uint32_t>(type));
  return groups;
}

std::string Network::NameOf(std::uint32_t link) const {
  const LinkType type = types_[link];
  const Seat& place = places_[link];
  const char* name = kLinkNames[static_cast<std::size_t>(type)];
  if (type == LinkType::kMemory && !cluster_.gpus)
    return fmt::format("node {} {}", place.node, name);
  const bool nic = type == LinkType::kNicOut || type == LinkType::kNicIn;
  return fmt::format("node {} {} {} {}", place.node, nic ? "rail" : "gpu", place.device, name);
}

}  // namespace tensorbus::simulate
