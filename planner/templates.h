#pragma once

#include "tensorbus/types/layout.h"
#include "tensorbus/types/layout_book.h"
#include "tensorbus/types/manifest.h"

namespace tensorbus::planner {

/// Resolves one side of a scenario: who holds which boxes of the manifest's tensors. Tensors that
/// the side drops are left out; those no rank holds stay, with an empty holding. Pure.
///
/// Errors: kNotFound for a layout that the book has not; kInvalidArgument naming tensor, class and
/// placement for whatever does not fit: a missing size or configuration number, a dimension that
/// does not divide where it must, a bad expression, a class without a rule.
Result<JobLayout> ResolveTemplate(const LayoutBook& book, const TemplateUse& use,
                                  const Manifest& manifest);

}  // namespace tensorbus::planner
