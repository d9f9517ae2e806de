// An engine of one rank: takes three versions, and looks at every element of each.

#include <cstdlib>

#include "examples/cpp/model.h"

using namespace std::chrono_literals;

namespace {

bool Holds(std::span<const float> weights, std::uint64_t version) {
  for (std::uint64_t r = 0; r < example::kRows; ++r) {
    for (std::uint64_t c = 0; c < example::kColumns; ++c) {
      // This engine keeps the matrix transposed.
      if (weights[c * example::kRows + r] != example::Value(version, r, c)) return false;
    }
  }
  for (std::uint64_t c = 0; c < example::kColumns; ++c) {
    if (weights[example::kRows * example::kColumns + c] != example::Value(version, 100, c)) {
      return false;
    }
  }
  return true;
}

}  // namespace

int main() {
  namespace tb = tensorbus;
  auto client = tb::client::Client::Connect({.identity = {.channel = "example",
                                                          .job = "engine",
                                                          .role = tb::Role::kConsumer,
                                                          .replica = 0,
                                                          .rank = 0,
                                                          .rank_count = 1},
                                             .library = "example consumer",
                                             .timeout = 5s});
  if (!client.ok()) return example::Fail(client.status());
  constexpr std::uint64_t kCount = (example::kRows + 1) * example::kColumns;
  auto arena = tb::client::Arena::Create(kCount * sizeof(float));
  if (!arena.ok()) return example::Fail(arena.status());
  if (auto segment = client->Attach(*arena); !segment.ok()) return example::Fail(segment.status());
  const std::span<const float> weights(reinterpret_cast<const float*>(arena->memory().data()),
                                       kCount);

  tb::client::RegisterOptions options;
  options.tensors = example::Tensors();
  const std::array<tb::Range, 2> matrix = {tb::Range{0, example::kRows},
                                           tb::Range{0, example::kColumns}};
  const std::array<tb::Range, 1> vector = {tb::Range{0, example::kColumns}};
  tb::Piece transposed = example::Contiguous(0, matrix, 0);
  transposed.strides = {sizeof(float), example::kRows * sizeof(float)};
  options.pieces = {transposed, example::Contiguous(
                                    1, vector, example::kRows * example::kColumns * sizeof(float))};
  const auto registered = client->Register(options);
  if (!registered.ok()) return example::Fail(registered.status());

  for (int taken = 0; taken < 3; ++taken) {
    auto update = client->Update({.selector = tb::client::Selector::kNext});
    if (!update.ok()) return example::Fail(update.status());
    const auto updated = update->Wait(60s);
    if (!updated.ok()) return example::Fail(updated.status());
    const tb::Version live = updated->version;
    const bool right = Holds(weights, live.value);
    std::printf("version %llu is live: %llu bytes, %s\n",
                static_cast<unsigned long long>(live.value),
                static_cast<unsigned long long>(updated->bytes), right ? "verified" : "WRONG");
    std::fflush(stdout);
    if (!right) return 1;
  }
  return 0;
}
