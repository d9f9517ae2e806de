#include "tensorbus/base/standard_output.h"

#include <cstdlib>
#include <iostream>

namespace tensorbus {

int FlushOutput(int exit_code) {
  if (std::cout.flush()) return exit_code;
  std::cerr << "error: standard output cannot be written\n";
  return exit_code == EXIT_SUCCESS ? EXIT_FAILURE : exit_code;
}

}  // namespace tensorbus
