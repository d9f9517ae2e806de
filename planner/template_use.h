#pragma once

#include <string_view>

#include "tensorbus/types/layout_book.h"
#include "tensorbus/types/manifest.h"

namespace tensorbus::planner {

/// Reads how one side holds a model as people say it: `megatron:tp=4,pp=4,ep=8,dp=8`,
/// `vllm:tp=8,dp=2,ep=16,replicas=4`. The name is a layout of the book, or `vllm` or `fsdp`, which
/// stand for the member of the family that has the parameters given. Parameters are the axes of its
/// meshes (`replicas`, `replicate` and `shard` are other words for rep, dp_replicate and fsdp),
/// `layers=23+24+24+23`, `drop=EXPRESSION`, and the words its placements need. Sizes that follow
/// from others are filled in. Pure.
///
/// Errors, all kInvalidArgument: kMalformed for an unknown layout or parameter, with the near ones,
/// or a value that is no number; kLayoutMismatch naming parameter, number and reason where a rule
/// of the trainer or engine does not fit the model: heads, experts, layers, ranks that do not
/// divide.
Result<TemplateUse> ParseTemplateUse(std::string_view text, const LayoutBook& book,
                                     const Manifest& model);

}  // namespace tensorbus::planner
