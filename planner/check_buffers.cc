#include <fmt/format.h>
#include <set>
#include <string_view>
#include <unordered_map>

#include "planner/certificate.h"

namespace tensorbus::planner {
namespace {

Status BufferFault(std::uint32_t rank, std::string message, Reason reason) {
  return {Code::kInvalidArgument, fmt::format("rank {}: {}", rank, message), reason};
}

}  // namespace

Status CheckBuffers(const RankLayout& layout, const Registration& registration, std::uint32_t rank,
                    bool is_target) {
  TB_RETURN_IF_ERROR(Validate(registration, rank, is_target));
  std::unordered_map<std::string_view, std::uint32_t> numbers;
  for (std::uint32_t t = 0; t < registration.tensors.size(); ++t)
    numbers.emplace(registration.tensors[t].name, t);
  std::set<std::pair<std::uint32_t, Box>> have;
  for (const Piece& piece : registration.pieces) have.emplace(piece.tensor, piece.box);
  for (const RankLayout::Tensor& tensor : layout.tensors) {
    const auto found = numbers.find(tensor.spec.name);
    if (found == numbers.end()) {
      if (tensor.boxes.empty()) continue;
      return BufferFault(rank, fmt::format("tensor '{}' is in no buffer", tensor.spec.name),
                         Reason::kUnknownTensor);
    }
    if (registration.tensors[found->second] != tensor.spec) {
      return BufferFault(rank,
                         fmt::format("tensor '{}': shape or dtype of its buffers differs from its "
                                     "layout",
                                     tensor.spec.name),
                         Reason::kLayoutMismatch);
    }
    for (const Box& box : tensor.boxes) {
      if (have.erase({found->second, box}) != 0) continue;
      return BufferFault(
          rank,
          fmt::format("tensor '{}': box {} is in no buffer", tensor.spec.name, box.ToString()),
          Reason::kLayoutMismatch);
    }
  }
  if (have.empty()) return {};
  const auto& [number, box] = *have.begin();
  return BufferFault(rank,
                     fmt::format("tensor '{}': a buffer is for box {}, which the layout has not",
                                 registration.tensors[number].name, box.ToString()),
                     Reason::kLayoutMismatch);
}

}  // namespace tensorbus::planner
