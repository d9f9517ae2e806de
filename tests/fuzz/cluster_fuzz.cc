// Readers of what people write about clusters and models: the first byte picks one. Whatever is
// accepted must be fit for use.

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "planner/template_use.h"
#include "planner/templates.h"
#include "planner/topology.h"
#include "tensorbus/formats/cluster_file.h"
#include "tensorbus/formats/layout_book_file.h"
#include "tensorbus/formats/model_config_file.h"
#include "tensorbus/formats/safetensors_file.h"
#include "tensorbus/formats/topology_file.h"

#include "simulate/cluster.h"

namespace tensorbus {
namespace {

void Require(bool fact) {
  if (!fact) std::abort();
}

void TryCluster(std::string_view text) {
  const auto cluster = formats::ParseCluster(text);
  if (!cluster.ok()) return;
  Require(simulate::CheckCluster(*cluster).ok());
  const auto seating = simulate::SeatRanks(*cluster, 3, 2, false);
  if (!seating.ok()) return;
  const planner::Topology topology = simulate::TopologyOf(*cluster, *seating);
  Require(planner::TopologyIndex::Create(topology, 3, 2).ok());
}

void TryConfig(std::string_view text) {
  constexpr std::int64_t kManyTensors = 2000;
  auto model = formats::ParseModelConfig(text);
  if (!model.ok()) return;
  std::int64_t tensors = 1;  // a bound for what is worth building here
  for (const char* number : {"layers", "experts", "mtp", "vit_layers"}) {
    const auto found = model->numbers.find(number);
    if (found == model->numbers.end() || found->second <= 0) continue;
    if (found->second > kManyTensors) return;
    tensors *= found->second;
  }
  if (tensors <= kManyTensors) (void)formats::TensorsOf(*model);
}

/// A small book, so that what is said can be carried out.
const LayoutBook& Book() {
  static const LayoutBook kBook = formats::ParseLayoutBook(R"({"format": "tensorbus-layouts/1",
        "classes": [["expert", "experts\\.\\d+\\."], ["w", "w"]],
        "layouts": {
          "megatron": {"meshes": {"dense": [["pp", 0], ["dp", 0], ["tp", 0]],
                                  "expert": [["pp", 0], ["edp", 0], ["ep", 0], ["etp", 1]]},
                       "rules": [["expert", "expert", [["pp", "PP"], ["ep", "E"]]],
                                 ["w", "dense", [["tp", "V0:$vpad"]]]]},
          "vllm_tp": {"meshes": {"dense": [["rep", 1], ["tp", 0]]},
                      "rules": [[".*", "dense", [["tp", "EVEN0"]]]]}},
        "scenarios": []})")
                                      .value();
  return kBook;
}

void TryUse(std::string_view text) {
  Manifest model;
  model.config = {{"layers", 2}, {"heads", 8}, {"experts", 4}};
  model.tensors.push_back({"w", DType::kF32, Shape()});
  const auto use = planner::ParseTemplateUse(text, Book(), model);
  if (!use.ok()) return;
  std::uint64_t ranks = 1;
  for (const auto& [axis, size] : use->size) ranks = std::min<std::uint64_t>(ranks * size, 1 << 20);
  if (ranks <= 4096) (void)planner::ResolveTemplate(Book(), *use, model);
}

void Try(char kind, std::string_view text) {
  switch (kind) {
    case 'c':
      return TryCluster(text);
    case 't':
      if (const auto topology = formats::ParseTopology(text); topology.ok())
        (void)planner::TopologyIndex::Create(*topology, 4, 4);
      return;
    case 'h':
      if (const auto tensors = formats::ParseSafetensorsHeader(text, 1 << 20); tensors.ok()) {
        for (const TensorSpec& spec : *tensors) Require(spec.bytes() <= 1 << 20);
      }
      return;
    case 'm':
      return TryConfig(text);
    default:
      return TryUse(text);
  }
}

}  // namespace
}  // namespace tensorbus

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto rest = std::span(data, size).subspan(1);
  tensorbus::Try(static_cast<char>(data[0]),
                 {reinterpret_cast<const char*>(rest.data()), rest.size()});
  return 0;
}
