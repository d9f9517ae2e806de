#include "tensorbus/kernels/run_kernels_impl.h"

namespace tensorbus::kernels {
namespace {

/// One word at a time; streaming stores become plain ones.
struct ScalarUnit {
  /// Nothing is put off.
  struct Lanes {
    void AddTo(BlockSums& /*sums*/) const {}
  };
  template <Store kStore, bool kAhead>
  static void Words(Lanes& /*lanes*/, BlockSums& sums, std::byte* target, const std::byte* source,
                    std::uint32_t words, std::uint32_t first, const std::byte* ahead) {
    if constexpr (kAhead) {
      for (std::size_t at = 0; at < std::size_t{4} * words; at += 64) {
        __builtin_prefetch(ahead + at, 0, 2);
      }
    }
    std::uint64_t a = 0;
    std::uint64_t b = 0;
    const std::uint32_t* keys = kDigestTable.keys + first;
    for (std::uint32_t i = 0; i < words; ++i) {
      const std::uint64_t word = LoadWord(source + std::size_t{4} * i);
      a += word * keys[i];
      b += word * keys[i + kDigestKeyShift];
    }
    if constexpr (kStore != Store::kNone) std::memcpy(target, source, std::size_t{4} * words);
    sums.a += a;
    sums.b += b;
  }
  static void Copy(std::byte* target, const std::byte* source, std::size_t bytes) {
    std::memcpy(target, source, bytes);
  }
  static void Stream(std::byte* target, const std::byte* source, std::size_t bytes) {
    std::memcpy(target, source, bytes);
  }
  static void Fence() {}
};

}  // namespace

const RunKernels& PortableKernels() {
  static const RunKernels kernels = MakeRunKernels<ScalarUnit>("portable");
  return kernels;
}

}  // namespace tensorbus::kernels
