#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "tensorbus/cli/admin_run.h"

// Finds what is misconfigured on this machine, and says what helps.
namespace tensorbus::cli {

struct Finding {
  enum class Level { kFine, kWarning, kFault };
  std::string name;  ///< "memfd", "process_vm_readv", …
  Level level = Level::kFine;
  std::string value;   ///< what was found
  std::string remedy;  ///< "" when nothing is to be done
};

struct DoctorOptions {
  AdminOptions admin;
  std::string bin_dir;
  bool measure = false;  ///< also measure memory speed, about a second
};

/// Each looks at one thing of this machine; none changes anything.
std::vector<Finding> CheckMachine();
std::vector<Finding> CheckBus(const DoctorOptions& options);
std::vector<Finding> Measure();

/// Exit code 1 when there is a fault.
int RunDoctor(const DoctorOptions& options, std::ostream& out, std::ostream& err);

}  // namespace tensorbus::cli
