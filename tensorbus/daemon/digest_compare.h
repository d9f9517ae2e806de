#pragma once

#include <memory>
#include <string>
#include <vector>

#include "proto/tensorbus.pb.h"
#include "tensorbus/daemon/model.h"
#include "tensorbus/types/strided.h"

// Comparing what different ranks hold of the same tensors. Pure.
namespace tensorbus::daemon {

/// One rank whose memory takes part in a comparison.
struct DigestHolder {
  RankIdentity identity;
  std::string agent;
  Version version;  ///< what it is said to hold
  std::shared_ptr<const LayoutEntry> layout;
  bool snapshot = false;  ///< in its snapshot of `version`, not in its live memory
};

/// One box of one tensor: the part of the questions both sides of a comparison share.
struct DigestBox {
  std::uint32_t tensor = 0;  ///< index into DigestAtoms::specs
  Box box;
};

/// All tensors cut so finely that every holder's share is a union of atoms.
struct DigestAtoms {
  std::vector<TensorSpec> specs;
  std::vector<DigestBox> atoms;
  /// Per holder (in the order given): the atoms it holds, ascending.
  std::vector<std::vector<std::uint32_t>> of_holder;
};

/// Cuts the boxes of each tensor along each other's edges.
///
/// Errors: kResourceExhausted when a tensor falls into more than kMaxAtomsOfTensor parts.
Result<DigestAtoms> MakeAtoms(const std::vector<DigestHolder>& holders);
inline constexpr std::size_t kMaxAtomsOfTensor = 65536;

/// Compares all holders' digests (in the order of `of_holder`) atom by atom. A producer's digest is
/// the reference where it holds the atom; elsewhere what most holders have. Fills everything but
/// `version`; `faults` names each rank, tensor and box that differs.
void CompareDigests(const std::vector<DigestHolder>& holders, const DigestAtoms& atoms,
                    const std::vector<std::vector<DigestSum>>& digests, proto::VerifyReply* reply);

}  // namespace tensorbus::daemon
