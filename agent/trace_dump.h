#pragma once

#include <string>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/ids.h"

// What is left of a failed session for people: the trace ring in a file, one step a line.
namespace tensorbus::agent {

struct TraceRecord;

/// Files kept in a folder; the oldest go.
inline constexpr std::size_t kTraceFilesMax = 16;

/// Where the trace of a session that fails now goes; never the same path twice.
std::string TracePath(const std::string& folder, SessionId session);

/// Writes the records and why the session failed, readable by this user only, and removes the
/// folder's oldest trace files. Errors: kPermissionDenied, kResourceExhausted, … from the files.
Status WriteTrace(const std::string& path, SessionId session, const Status& why,
                  const std::vector<TraceRecord>& records);

}  // namespace tensorbus::agent
