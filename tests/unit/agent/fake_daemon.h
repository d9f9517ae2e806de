#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "agent/daemon_link.h"
#include "agent/rank.h"
#include "proto/tensorbus.pb.h"
#include "tensorbus/base/executor.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::testing {

/// The least that agents take for a daemon: one channel, any number of agents and replicas, every
/// session straight through unless a test holds it at a step.
class FakeDaemon {
 public:
  /// Where a session may be held; the message of that step is then not sent.
  enum class Step { kPrepare, kGo, kFinish, kFlipPrepare, kFlipCommit, kEnd };

  FakeDaemon();
  ~FakeDaemon();
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;

  /// Gives agents their links. The daemon must outlive them.
  agent::LinkFactory Factory();

  /// Called on the daemon's thread before a step's messages are sent; false holds the session.
  void SetOnStep(std::function<bool(Step, SessionId)> on_step);
  /// Goes on with whatever is held, from the step it was held at.
  void Release();
  /// Aborts the session everywhere.
  void Abort(SessionId session, const Status& why);
  /// Loses every link, as a crash does; all knowledge is gone. Agents may come back at once, or
  /// after Accept(true).
  void Crash(bool accept_again);
  void Accept(bool accept);
  /// Sends a query to the agent of that name and waits for its answer.
  proto::Answer Ask(const std::string& agent, proto::Query query);

  void set_timeout(Nanos timeout);
  /// How long every registration is looked at before it is answered.
  void set_register_time(Nanos time);
  /// How long every publish waits until it is accepted and answered.
  void set_publish_time(Nanos time);
  void set_answer_claims(bool answer);
  /// What agents are refused with from now on.
  void set_refusal(const Status& refusal);
  void set_from_snapshot(bool from_snapshot);
  void set_early_go(bool early_go);
  /// Tells each agent another capability for the same session, as no daemon should.
  void set_split_capability(bool split);
  /// The channel's epoch from now on, in registrations and sessions.
  void set_epoch(std::uint64_t epoch);

  /// Messages of a kind that came so far.
  std::vector<proto::AgentMessage> Received(proto::AgentMessage::BodyCase kind) const;
  /// Waits until so many of a kind came.
  bool AwaitReceived(proto::AgentMessage::BodyCase kind, std::size_t count) const;
  /// Sends anything to every agent.
  void SendToAll(proto::DaemonMessage message);

 private:
  class Link;
  struct Attached;
  struct RankState;
  struct SessionState;

  void OnAgentMessage(std::uint64_t link, proto::AgentMessage message);
  void Detach(std::uint64_t link);
  void OnRegister(std::uint64_t link, const proto::RegisterRank& message);
  void AcceptPublish(std::uint64_t link, const proto::Publish& message);
  void OnSessionFailed(const proto::SessionFailed& message);
  void OnLeave(const agent::RankKey& key, const std::string& why);
  void TryStart(const std::string& job, std::uint32_t replica);
  void Start(const std::string& job, std::uint32_t replica, std::uint64_t version);
  Hash128 LayoutOf(const std::string& job, std::uint32_t replica);
  void Count(SessionId id, std::set<std::string>* done, const std::string& who,
             std::size_t expected, Step next);
  void Run(SessionId id, Step step);
  void SendTo(std::uint64_t link, proto::DaemonMessage message);
  void FailSession(SessionId id, const Status& why);
  std::vector<std::uint64_t> AgentsOf(const SessionState& session) const;

  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::vector<proto::AgentMessage> received_ TB_GUARDED_BY(mutex_);
  std::map<std::uint64_t, proto::Answer> answers_ TB_GUARDED_BY(mutex_);
  std::function<bool(Step, SessionId)> on_step_ TB_GUARDED_BY(mutex_);

  // Confined to the daemon's thread.
  std::map<std::uint64_t, Attached> links_;
  std::map<agent::RankKey, RankState> ranks_;
  std::map<SessionId, std::shared_ptr<SessionState>> sessions_;
  std::map<Hash128, std::vector<std::byte>> layouts_;
  std::vector<std::pair<SessionId, Step>> held_;
  std::uint64_t next_session_ = 1;
  std::uint64_t next_query_ = 1;
  std::uint64_t latest_ = 0;
  bool accept_ = true;
  Status refusal_;
  Nanos timeout_ = std::chrono::seconds(20);
  Nanos register_time_{};
  Nanos publish_time_{};
  bool answer_claims_ = true;
  bool from_snapshot_ = false;
  bool early_go_ = false;
  std::uint64_t epoch_ = 1;
  bool split_capability_ = false;
  std::map<std::string, Hash128> last_plan_;
  std::uint64_t next_link_ = 1;  // guarded by mutex_ as well

  ThreadExecutor executor_;
};

}  // namespace tensorbus::testing
