#include "tensorbus/transport/landing.h"

#include <algorithm>

namespace tensorbus::transport {

namespace {

/// One place of a block, copied and checked.
kernels::CopySums LandOnce(const RouteKey& key, const StridedBlock& source,
                           const StridedBlock& place, const StridedBlock& check,
                           std::uint32_t block, kernels::ByteRange range, Proof proof,
                           kernels::StoreKind store, const LandingHook& hook) {
  kernels::CopySums sums;
  if (ReadsBack(proof) && hook == nullptr) {
    return kernels::CopyRangeReadback(source, place, check, range);
  }
  if (proof == Proof::kOff) {
    kernels::CopyRange(source, place, range, store);
    sums.source.bytes = range.count;
  } else {
    sums.source = kernels::CopyRangeDigest(source, place, range, store);
  }
  if (hook != nullptr) hook(key, block, place, range);
  sums.target = ReadsBack(proof) ? kernels::DigestRange(check, range) : sums.source;
  return sums;
}

}  // namespace

TargetEnd::TargetEnd(RouteEnd end) : end_(std::move(end)) {
  std::stable_sort(
      end_.aliases.begin(), end_.aliases.end(),
      [](const RouteEnd::Alias& a, const RouteEnd::Alias& b) { return a.block < b.block; });
}

std::span<const RouteEnd::Alias> TargetEnd::aliases(std::uint32_t index) const {
  const auto first =
      std::lower_bound(end_.aliases.begin(), end_.aliases.end(), index,
                       [](const RouteEnd::Alias& a, std::uint32_t i) { return a.block < i; });
  auto last = first;
  while (last != end_.aliases.end() && last->block == index) ++last;
  return {first, last};
}

Landing LandFromMemory(const RouteKey& key, const StridedBlock& source, const TargetEnd& target,
                       std::uint32_t block, kernels::ByteRange range, Proof proof,
                       kernels::StoreKind store, const LandingHook& hook) {
  const kernels::CopySums sums = LandOnce(key, source, target.block(block), target.check(block),
                                          block, range, proof, store, hook);
  Landing landing = {.source = sums.source, .target = sums.target};
  landing.intact = landing.source == landing.target;
  for (const RouteEnd::Alias& alias : target.aliases(block)) {
    const kernels::CopySums again =
        LandOnce(key, source, alias.place, alias.check(), block, range, proof, store, hook);
    landing.intact = landing.intact && again.source == sums.source && again.target == sums.source;
  }
  return landing;
}

Landing LandInPlace(const RouteKey& key, const DigestSum& sent, const TargetEnd& target,
                    std::uint32_t block, kernels::ByteRange range, Proof proof,
                    const LandingHook& hook) {
  const StridedBlock& place = target.block(block);
  if (hook != nullptr) hook(key, block, place, range);
  Landing landing = {.source = sent, .target = sent};
  if (ReadsBack(proof)) landing.target = kernels::DigestRange(target.check(block), range);
  landing.intact = landing.source == landing.target;
  for (const RouteEnd::Alias& alias : target.aliases(block)) {
    const kernels::CopySums copy = LandOnce(key, place, alias.place, alias.check(), block, range,
                                            proof, kernels::StoreKind::kPlain, hook);
    if (ReadsBack(proof)) landing.intact = landing.intact && copy.target == sent;
  }
  return landing;
}

}  // namespace tensorbus::transport
