#pragma once

#include <string>

#include "tensorbus/base/status.h"

namespace tensorbus::cli {

/// The folder of manifests that came with this program: `$TENSORBUS_MANIFESTS`, else beside it in
/// an installation or a source tree. Error: kNotFound saying how to name it.
Result<std::string> FindManifests();

/// The folder of cluster descriptions, found the same way (`$TENSORBUS_CLUSTERS`).
Result<std::string> FindClusters();

}  // namespace tensorbus::cli
