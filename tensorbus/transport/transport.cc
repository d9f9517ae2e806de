#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

std::uint64_t RouteEnd::bytes() const {
  std::uint64_t sum = 0;
  for (const StridedBlock& block : blocks) sum += block.bytes();
  return sum;
}

DigestSum RouteReceipt::total() const {
  DigestSum sum;
  for (const DigestSum& block : blocks) sum += block;
  return sum;
}

}  // namespace tensorbus::transport
