#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "agent/channel_epochs.h"
#include "agent/planning.h"
#include "agent/rank.h"
#include "agent/trace_ring.h"
#include "agent/work_pool.h"
#include "proto/tensorbus.pb.h"
#include "tensorbus/base/executor.h"
#include "tensorbus/rpc/control_link.h"
#include "tensorbus/transport/transport.h"
#include "worker_shim/wire.h"

namespace tensorbus::agent {

/// What a session needs of the agent around it. Confined to the executor; outlives its sessions.
class SessionHost {
 public:
  virtual ~SessionHost() = default;

  virtual Executor& executor() = 0;
  virtual WorkPool& pool() = 0;
  virtual LayoutCache& layouts() = 0;
  virtual PlanCache& plans() = 0;
  virtual ChannelEpochs& epochs() = 0;
  virtual TraceRing& trace() = 0;
  /// Pulls whose Done has not run; the agent waits for them before it ends.
  virtual Outstanding& pulls() = 0;
  /// This agent's name among a session's participants.
  virtual const std::string& agent_name() const = 0;
  /// The transport between ranks of this agent.
  virtual transport::Transport& local() = 0;
  /// The transport to other agents; null when there is none.
  virtual transport::Transport* remote() = 0;

  /// A registered rank, or null.
  virtual std::shared_ptr<Rank> FindRank(const RankKey& key) = 0;
  virtual void Send(proto::AgentMessage message) = 0;
  virtual void GetLayout(const Hash128& hash, Nanos timeout, rpc::ControlLink::OnLayout done) = 0;
  /// Asks the worker to run a hook. `done` runs once, later: with the worker's answer,
  /// kDeadlineExceeded/kMissingRank after `timeout`, or kUnavailable/kPeerLost.
  virtual void CallHook(const std::shared_ptr<Rank>& rank, wire::MessageType hook,
                        wire::HookEvent event, Nanos timeout, std::function<void(Status)> done) = 0;
  /// The rank's session is over without a flip and its memory is left alone now.
  virtual void OnTargetFree(Rank& rank) = 0;
  /// Answers the worker's pending update; without one there is nobody to tell.
  virtual void TellUpdated(Rank& rank, wire::Updated updated) = 0;
  /// Puts the trace into a file; its path, or "" where none is kept.
  virtual std::string DumpTrace(SessionId session, const Status& why) = 0;
  virtual void CountBytesMoved(std::uint64_t bytes) = 0;
};

}  // namespace tensorbus::agent
