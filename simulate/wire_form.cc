#include "simulate/wire_form.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tensorbus::simulate {
namespace {

constexpr std::uint64_t kBlock = 128;
constexpr std::uint64_t kScaleBytes = 4;

constexpr std::array<std::string_view, 13> kLinears = {"q_proj",
                                                       "k_proj",
                                                       "v_proj",
                                                       "o_proj",
                                                       "q_a_proj",
                                                       "q_b_proj",
                                                       "kv_a_proj_with_mqa",
                                                       "kv_b_proj",
                                                       "gate_proj",
                                                       "up_proj",
                                                       "down_proj",
                                                       "gate_up_proj",
                                                       "qkv_proj"};
constexpr std::array<std::string_view, 3> kMixtralLinears = {"w1", "w2", "w3"};
constexpr std::array<std::string_view, 3> kTowers = {"visual.", "vision_tower.",
                                                     "multi_modal_projector."};

bool IsWide(DType dtype) {
  return dtype == DType::kBf16 || dtype == DType::kF16 || dtype == DType::kF32;
}

}  // namespace

bool IsQuantised(const TensorSpec& spec) {
  constexpr std::string_view kWeight = ".weight";
  if (!IsWide(spec.dtype) || spec.shape.rank() < 2) return false;
  std::string_view name = spec.name;
  for (const std::string_view tower : kTowers) {
    if (name.substr(0, tower.size()) == tower) return false;
  }
  if (name.size() > kWeight.size() && name.substr(name.size() - kWeight.size()) == kWeight)
    name.remove_suffix(kWeight.size());
  const std::string_view last = name.substr(name.rfind('.') + 1);
  return std::find(kLinears.begin(), kLinears.end(), last) != kLinears.end() ||
         std::find(kMixtralLinears.begin(), kMixtralLinears.end(), last) != kMixtralLinears.end();
}

std::vector<bool> QuantisedTensors(const JobLayout& layout, WireForm form) {
  std::vector<bool> quantised;
  if (form == WireForm::kAsIs) return quantised;
  for (const JobLayout::Tensor& tensor : layout.tensors)
    quantised.push_back(IsQuantised(tensor.spec));
  return quantised;
}

JobLayout OnWire(JobLayout layout, WireForm form) {
  if (form == WireForm::kAsIs) return layout;
  for (JobLayout::Tensor& tensor : layout.tensors) {
    if (IsQuantised(tensor.spec)) tensor.spec.dtype = DType::kF8e4m3;
  }
  return layout;
}

std::uint64_t ScaleBytes(const Box& box) {
  std::uint64_t blocks = 1;
  for (int d = 0; d < box.rank(); ++d) {
    const Range& range = box[d];
    const bool matrix = d + 2 >= box.rank();
    blocks *= matrix ? (range.hi + kBlock - 1) / kBlock - range.lo / kBlock : range.size();
  }
  return blocks * kScaleBytes;
}

}  // namespace tensorbus::simulate
