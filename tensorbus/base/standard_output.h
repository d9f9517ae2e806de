#pragma once

namespace tensorbus {

/// Ends what a program has printed: `exit_code`, or 1 instead of 0, saying so on standard error,
/// when standard output could not be written.
int FlushOutput(int exit_code);

}  // namespace tensorbus
