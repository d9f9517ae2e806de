// Compiled with -mavx2; reached only after the processor was asked.
#include <immintrin.h>

#include "tensorbus/kernels/run_kernels_impl.h"

namespace tensorbus::kernels {
namespace {

inline __m256i Load(const void* at) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(at));
}
inline void StorePlain(std::byte* at, __m256i value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), value);
}
inline void StoreStream(std::byte* at, __m256i value) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(at), value);
}
inline std::uint64_t AddLanes(__m256i v) {
  const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(pair)) +
         static_cast<std::uint64_t>(_mm_extract_epi64(pair, 1));
}

/// Sums of even and odd words. The key vectors of sum b are those of sum a two vectors on, so each
/// key is loaded once.
struct Sums256 {
  __m256i a = _mm256_setzero_si256();
  __m256i b = _mm256_setzero_si256();

  /// `keys` are those of `words`; on return those 16 words further on.
  __attribute__((always_inline)) void Add(__m256i words, __m256i& keys, const std::uint32_t* next) {
    const __m256i odd = _mm256_srli_epi64(words, 32);
    a = _mm256_add_epi64(a, _mm256_mul_epu32(words, keys));
    a = _mm256_add_epi64(a, _mm256_mul_epu32(odd, _mm256_srli_epi64(keys, 32)));
    keys = Load(next);
    b = _mm256_add_epi64(b, _mm256_mul_epu32(words, keys));
    b = _mm256_add_epi64(b, _mm256_mul_epu32(odd, _mm256_srli_epi64(keys, 32)));
  }
  void AddTo(BlockSums& sums) const {
    sums.a += AddLanes(a);
    sums.b += AddLanes(b);
  }
};

struct Avx2Unit {
  using Lanes = Sums256;

  template <Store kStore, bool kAhead>
  static inline void Words(Lanes& lanes, BlockSums& sums, std::byte* target,
                           const std::byte* source, std::uint32_t words, std::uint32_t first,
                           [[maybe_unused]] const std::byte* ahead) {
    const std::uint32_t* keys = kDigestTable.keys + first;
    std::uint32_t i = 0;
    if (words >= 8) {
      Sums256 vector = lanes;
      __m256i keys0 = Load(keys);
      __m256i keys1 = Load(keys + 8);
      for (; i + 16 <= words; i += 16) {
        const std::size_t at = std::size_t{4} * i;
        // Into the second level: not bound by the few miss buffers of the first.
        if constexpr (kAhead) {
          _mm_prefetch(reinterpret_cast<const char*>(ahead + at), _MM_HINT_T1);
        }
        const __m256i words0 = Load(source + at);
        const __m256i words1 = Load(source + at + 32);
        if constexpr (kStore == Store::kPlain) {
          StorePlain(target + at, words0);
          StorePlain(target + at + 32, words1);
        }
        if constexpr (kStore == Store::kStream) {
          StoreStream(target + at, words0);
          StoreStream(target + at + 32, words1);
        }
        vector.Add(words0, keys0, keys + i + kDigestKeyShift);
        vector.Add(words1, keys1, keys + i + 8 + kDigestKeyShift);
      }
      if (i + 8 <= words) {
        const std::size_t at = std::size_t{4} * i;
        const __m256i words0 = Load(source + at);
        if constexpr (kStore != Store::kNone) StorePlain(target + at, words0);
        vector.Add(words0, keys0, keys + i + kDigestKeyShift);
        i += 8;
      }
      lanes = vector;
    }
    for (; i < words; ++i) {
      const std::uint32_t word = LoadWord(source + std::size_t{4} * i);
      if constexpr (kStore != Store::kNone) {
        std::memcpy(target + std::size_t{4} * i, &word, sizeof word);
      }
      AddWord(sums, word, first + i);
    }
  }

  static void Copy(std::byte* target, const std::byte* source, std::size_t bytes) {
    std::size_t at = 0;
    if (bytes >= 64) {
      // The first vector overlaps the loop, which then stores to aligned places only.
      StorePlain(target, Load(source));
      at = 32 - (reinterpret_cast<std::uintptr_t>(target) & 31);
      for (; at + 64 <= bytes; at += 64) {
        const __m256i x = Load(source + at);
        const __m256i y = Load(source + at + 32);
        StorePlain(target + at, x);
        StorePlain(target + at + 32, y);
      }
    }
    if (at < bytes) std::memcpy(target + at, source + at, bytes - at);
  }

  static void Stream(std::byte* target, const std::byte* source, std::size_t bytes) {
    const std::size_t head = Least(bytes, -reinterpret_cast<std::uintptr_t>(target) & 63);
    if (head != 0) {
      std::memcpy(target, source, head);
      target += head;
      source += head;
      bytes -= head;
    }
    std::size_t at = 0;
    for (; at + 64 <= bytes; at += 64) {
      const __m256i x = Load(source + at);
      const __m256i y = Load(source + at + 32);
      StoreStream(target + at, x);
      StoreStream(target + at + 32, y);
    }
    if (at < bytes) std::memcpy(target + at, source + at, bytes - at);
  }

  static void Fence() { _mm_sfence(); }
};

}  // namespace

const RunKernels* Avx2Kernels() {
  if (!__builtin_cpu_supports("avx2")) return nullptr;
  static const RunKernels kernels = MakeRunKernels<Avx2Unit>("avx2");
  return &kernels;
}

}  // namespace tensorbus::kernels
