#pragma once

#include <map>
#include <memory>

#include "agent/session.h"
#include "agent/session_host.h"
#include "proto/tensorbus.pb.h"

namespace tensorbus::agent {

/// All sessions this agent takes part in, by id; passes the daemon's messages to them.
///
/// Threads: confined to the executor.
class SessionTable {
 public:
  /// Most sessions at once, ended ones that wait to be forgotten included.
  static constexpr std::size_t kSessionCountMax = 256;

  explicit SessionTable(SessionHost& host) : host_(host) {}

  /// Opens a session; answers SessionFailed when it cannot be.
  void OnPrepare(const proto::Prepare& message);
  void OnGo(SessionId id);
  void OnFinish(SessionId id);
  void OnFlipPrepare(SessionId id);
  void OnFlipCommit(SessionId id);
  void OnAbort(SessionId id, const Status& why);
  void OnEnded(SessionId id, double seconds);

  void OnRankLeft(const Rank& rank, const std::string& why);
  /// No decision about any session can arrive any more.
  void OnDaemonLost(const Status& why);
  /// Closes every session and waits for its sources to be left alone; under the agent's StopGuard.
  void Shutdown();

 private:
  std::shared_ptr<Session> Find(SessionId id);
  void Sweep();

  SessionHost& host_;
  std::map<SessionId, std::shared_ptr<Session>> sessions_;
};

/// What Prepare says, checked: ranks, modes, hashes, names. Errors: kInvalidArgument/kMalformed.
Result<SessionSpec> ParsePrepare(const proto::Prepare& message);

}  // namespace tensorbus::agent
