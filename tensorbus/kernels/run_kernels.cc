#include "tensorbus/kernels/run_kernels.h"

#include "tensorbus/kernels/copy.h"

namespace tensorbus::kernels {

const RunKernels& BestKernels() {
  static const RunKernels& best = []() -> const RunKernels& {
    const RunKernels* avx2 = Avx2Kernels();
    return avx2 != nullptr ? *avx2 : PortableKernels();
  }();
  return best;
}

std::string_view InstructionSet() {
  return BestKernels().name;
}

}  // namespace tensorbus::kernels
