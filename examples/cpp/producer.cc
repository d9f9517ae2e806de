// A trainer of one rank: publishes three versions of two tensors.
//
//   tensorbusctl up && producer & consumer

#include <cstdlib>

#include "examples/cpp/model.h"

using namespace std::chrono_literals;

namespace {

void Step(std::span<float> weights, std::uint64_t version) {
  for (std::uint64_t r = 0; r < example::kRows; ++r) {
    for (std::uint64_t c = 0; c < example::kColumns; ++c) {
      weights[r * example::kColumns + c] = example::Value(version, r, c);
    }
  }
  for (std::uint64_t c = 0; c < example::kColumns; ++c) {
    weights[example::kRows * example::kColumns + c] = example::Value(version, 100, c);
  }
}

}  // namespace

int main() {
  namespace tb = tensorbus;
  auto client = tb::client::Client::Connect({.identity = {.channel = "example",
                                                          .job = "trainer",
                                                          .role = tb::Role::kProducer,
                                                          .replica = 0,
                                                          .rank = 0,
                                                          .rank_count = 1},
                                             .library = "example producer",
                                             .timeout = 5s});
  if (!client.ok()) return example::Fail(client.status());

  // All weights in one arena: the agent reads them where they are.
  constexpr std::uint64_t kCount = (example::kRows + 1) * example::kColumns;
  auto arena = tb::client::Arena::Create(kCount * sizeof(float));
  if (!arena.ok()) return example::Fail(arena.status());
  if (auto segment = client->Attach(*arena); !segment.ok()) return example::Fail(segment.status());
  const std::span<float> weights(reinterpret_cast<float*>(arena->memory().data()), kCount);

  tb::client::RegisterOptions options;
  options.tensors = example::Tensors();
  const std::array<tb::Range, 2> matrix = {tb::Range{0, example::kRows},
                                           tb::Range{0, example::kColumns}};
  const std::array<tb::Range, 1> vector = {tb::Range{0, example::kColumns}};
  options.pieces = {
      example::Contiguous(0, matrix, 0),
      example::Contiguous(1, vector, example::kRows * example::kColumns * sizeof(float))};
  const auto registered = client->Register(options);
  if (!registered.ok()) return example::Fail(registered.status());

  // Versions only grow, also from one run to the next on the same bus.
  const std::uint64_t latest = registered->latest_version.value;
  for (std::uint64_t version = latest + 1; version <= latest + 3; ++version) {
    // Waits until nobody reads the version before.
    const auto waited = client->BeforeWrite(60s);
    if (!waited.ok()) return example::Fail(waited.status());
    Step(weights, version);
    auto publish = client->Publish({.version = tb::Version{version}});
    if (!publish.ok()) return example::Fail(publish.status());
    const auto published = publish->Wait(60s);
    if (!published.ok()) return example::Fail(published.status());
    std::printf("published version %llu\n", static_cast<unsigned long long>(version));
    std::fflush(stdout);
  }
  // The last version stays readable until the engine has it.
  if (const auto waited = client->BeforeWrite(60s); !waited.ok()) {
    return example::Fail(waited.status());
  }
  return 0;
}
