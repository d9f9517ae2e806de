#pragma once

#include <iosfwd>
#include <string>

#include "tensorbus/rpc/control_link.h"

// The commands that ask a running daemon. JSON goes to `out`, what is for people to `err`; each
// returns an exit code.
namespace tensorbus::cli {

/// How to reach the daemon; the same flags for every command.
struct AdminOptions {
  rpc::DaemonAddress daemon = {};
  double timeout_seconds = 5;
  bool json = false;
};

struct WatchOptions {
  bool watch = false;
  double interval_seconds = 1;
  std::uint64_t updates = 0;  ///< stop after this many; 0: until interrupted
};

int RunStatus(const AdminOptions& options, const WatchOptions& watch, std::ostream& out,
              std::ostream& err);
int RunVersions(const AdminOptions& options, const std::string& channel, std::ostream& out,
                std::ostream& err);
int RunRollback(const AdminOptions& options, const std::string& channel, std::uint64_t version,
                std::ostream& out, std::ostream& err);
int RunExplain(const AdminOptions& options, const std::string& channel, const std::string& tensor,
               std::ostream& out, std::ostream& err);
int RunWhoIsMissing(const AdminOptions& options, std::ostream& out, std::ostream& err);
int RunVerify(const AdminOptions& options, const std::string& channel, std::uint64_t version,
              std::ostream& out, std::ostream& err);
int RunTrace(const AdminOptions& options, const std::string& path, std::ostream& out,
             std::ostream& err);

}  // namespace tensorbus::cli
