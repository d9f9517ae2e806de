#pragma once

#include <span>

#include "tensorbus/types/piece.h"
#include "tensorbus/types/view_spec.h"

namespace tensorbus::planner {

/// Turns view specs into a registration: which box of which tensor lies where. Names are exact.
/// Pure.
///
/// `manifest` lists the tensors that must be mapped, each by at least one view, unless `left_out`
/// names it. Tensors appear in the registration in manifest order.
///
/// Errors: kInvalidArgument/kUnknownTensor for a view of a tensor or buffer that does not exist, or
/// a tensor no view maps, with the names that come nearest; kOverlap for a part mapped twice by
/// views that are not aliases; kDtypeMismatch where buffer and tensor differ; kLayoutMismatch where
/// sizes do. All name the buffer and tensor.
Result<Registration> ResolveViews(std::span<const TensorSpec> manifest, const ViewFile& views,
                                  std::span<const std::uint64_t> segment_bytes);

}  // namespace tensorbus::planner
