#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "simulate/cluster.h"
#include "simulate/flows.h"

namespace tensorbus::simulate {

enum class LinkType : std::uint8_t {
  kNicOut,
  kNicIn,
  kNvlinkOut,
  kNvlinkIn,
  kPcieOut,
  kPcieIn,
  kMemory,
};
inline constexpr std::array<const char*, 7> kLinkNames = {
    "nic out", "nic in", "nvlink out", "nvlink in", "pcie out", "pcie in", "memory"};

/// The links of a cluster that flows use, numbered as they are first used. Confined.
class Network {
 public:
  explicit Network(const Cluster& cluster) : cluster_(cluster) {}

  /// The way from seat to seat of a flow of so many bytes.
  std::vector<Hop> Route(const Seat& from, const Seat& to, bool local, double bytes);
  bool InOneDomain(const Seat& a, const Seat& b) const;

  std::size_t size() const { return capacities_.size(); }
  const std::vector<double>& capacities() const { return capacities_; }
  LinkType type(std::uint32_t link) const { return types_[link]; }
  std::uint32_t node(std::uint32_t link) const { return places_[link].node; }
  /// What a byte takes of the link as one of a flow's hops, without the cost of messages.
  double Touches(std::uint32_t link, std::size_t hop_count) const;
  std::vector<std::uint32_t> Groups() const;
  std::string NameOf(std::uint32_t link) const;

 private:
  /// A link at a place of a node: a NIC's, a device's, or 0 for the memory of a host.
  Hop At(LinkType type, std::uint32_t node, std::uint32_t place, double touches, double bytes);
  const PortSpeed& SpeedOf(LinkType type) const;

  const Cluster& cluster_;
  std::map<std::tuple<LinkType, std::uint32_t, std::uint32_t>, std::uint32_t> known_;
  std::vector<double> capacities_;
  std::vector<LinkType> types_;
  std::vector<Seat> places_;
};

}  // namespace tensorbus::simulate
