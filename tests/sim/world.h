#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tensorbus/base/metrics.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/rpc/protocol.h"
#include "tests/testing/manual_executor.h"

namespace tensorbus::sim {

class World;

/// What became of something a worker asked for; none while it waits.
using Outcome = std::optional<Status>;

/// Which message an agent sends or gets: used to say where something goes wrong.
using Received = proto::DaemonMessage::BodyCase;
using Sent = proto::AgentMessage::BodyCase;

/// A worker as its agent knows it.
struct Worker {
  RankIdentity identity;
  std::string agent;
  Outcome registered;
  std::uint64_t epoch = 0;
  std::uint64_t latest = 0;
  Outcome published;
  std::map<std::uint64_t, Outcome> released;  ///< by version
  Outcome updated;                            ///< of the last request
  std::uint64_t live = 0;
  bool dirty = false;
  std::uint64_t request = 0;
  std::set<std::uint64_t> snapshots;
  std::uint64_t content = 0;  ///< what its memory holds: equal numbers, equal bytes
  Outcome claimed;
  std::uint64_t claimed_version = 0;
  Outcome explained;  ///< what it was told that it waits for
};

/// An agent without memory: answers what a good agent answers, and errs where it is told to.
class FakeAgent : public rpc::AgentPort {
 public:
  FakeAgent(World& world, std::string name, std::string host);

  // rpc::AgentPort: what the daemon does.
  void Send(proto::DaemonMessage message) override;
  void Close(Status status) override;

  /// Sends a message as if it came over the stream.
  void Say(proto::AgentMessage message);
  void Attach();
  /// The process dies: the stream ends, nothing is answered any more.
  void Die();
  bool attached() const { return attached_; }
  /// Why the daemon ended the stream, if it did.
  const std::optional<Status>& closed() const { return closed_; }

  const std::string& name() const { return name_; }

  // Where it errs.
  std::uint32_t protocol = rpc::kControlProtocol;
  std::set<Received> mute;                      ///< gets these but does nothing
  std::optional<Received> die_on;               ///< dies when this comes
  std::optional<Sent> die_instead;              ///< dies where it would send this
  std::string plan = "plan";                    ///< what its plan digest is the digest of
  std::optional<std::uint32_t> corrupt_target;  ///< target rank whose digest differs
  std::optional<std::uint32_t> corrupt_source;  ///< source rank that counts other bytes than left
  bool stale_receipts = false;                  ///< whose receipts are of another epoch
  std::optional<Status> fail_prepare;           ///< answers Prepare with this failure
  bool silent = false;                          ///< says nothing more, though its stream stands
  std::uint32_t loss_per_mille = 0;             ///< of what it sends
  std::function<std::uint64_t()> random;
  std::map<Received, int> received;
  std::map<std::uint64_t, std::string> capabilities;  ///< by session, as Prepare told them
  std::uint64_t prepared_epoch = 0;                   ///< what the last Prepare said

 private:
  void Handle(const proto::DaemonMessage& message);
  void OnPrepare(const proto::Prepare& prepare);
  void Move(std::uint64_t session);
  void Finish(std::uint64_t session);
  void Flip(std::uint64_t session, bool commit);
  void EndSession(std::uint64_t session, const Status& status, std::uint64_t version);
  void AnswerQuery(const proto::Query& query);

  World& world_;
  std::string name_;
  std::string host_;
  rpc::PortId port_;
  bool attached_ = false;
  std::optional<Status> closed_;
  std::map<std::uint64_t, proto::Prepare> sessions_;
  std::set<std::uint64_t> moved_;  ///< sessions in which a byte was written here
};

/// Side work in virtual time: each piece takes `duration`, one after the other in each lane.
class SimSideWork final : public daemon::SideWork {
 public:
  explicit SimSideWork(testing::ManualExecutor& executor)
      : SideWork(executor), executor_(executor) {}

  Nanos duration{};

 protected:
  void Run(Lane lane, std::function<void()> task) override {
    TimePoint& free = free_[static_cast<std::size_t>(lane)];
    free = std::max(free, executor_.Now()) + duration;
    executor_.PostAt(free, std::move(task));
  }

 private:
  testing::ManualExecutor& executor_;
  std::array<TimePoint, kLaneCount> free_ = {};
};

/// The daemon's core, agents and workers in one thread and virtual time.
class World {
 public:
  static constexpr std::uint64_t kElements = 840;  // divisible by every small rank count

  World();

  FakeAgent& AddAgent(const std::string& name, const std::string& host = "host-a");
  FakeAgent& agent(const std::string& name) { return *agents_.at(name); }

  /// One rank's share of the model: tensor "w", cut evenly in one dimension, and "norm", whole.
  static RankLayout LayoutOf(std::uint32_t rank, std::uint32_t rank_count);

  /// A version that a producer brings back.
  struct Held {
    std::uint64_t version = 0;
    daemon::SlowConsumer policy = daemon::SlowConsumer::kWait;
    std::uint32_t min_replicas = 1;
    std::uint32_t keep_last = 0;
  };
  struct JobOptions {
    std::string channel = "policy";
    std::uint32_t replica = 0;
    FlipMode flip = FlipMode::kShadow;
    Proof proof = Proof::kReadback;
    std::uint32_t pid = 1000;
    std::uint64_t known_epoch = 0;
    std::uint64_t seen_epoch = 0;
    std::uint64_t live_version = 0;
    std::vector<Held> held = {};
    std::uint64_t publishing = 0;
    bool dirty = false;
    std::vector<std::string> leave_out = {};
    std::function<void(RankLayout&)> change = {};
  };
  /// Registers one rank through an agent; answered at once unless side work takes its time.
  Worker& Register(const std::string& agent, const std::string& job, Role role, std::uint32_t rank,
                   std::uint32_t rank_count, const JobOptions& options);
  /// Registers all ranks, spread over the agents in turn.
  void StartJob(const std::string& job, Role role, std::uint32_t rank_count,
                const std::vector<std::string>& agents, const JobOptions& options);

  Worker& worker(const std::string& job, std::uint32_t rank, std::uint32_t replica = 0,
                 const std::string& channel = "policy");
  void Publish(Worker& worker, std::uint64_t version,
               daemon::SlowConsumer policy = daemon::SlowConsumer::kWait,
               std::uint32_t min_replicas = 1, std::uint32_t keep_last = 0);
  void PublishAll(const std::string& job, std::uint64_t version,
                  daemon::SlowConsumer policy = daemon::SlowConsumer::kWait,
                  std::uint32_t min_replicas = 1, std::uint32_t keep_last = 0);
  void Release(Worker& worker, std::uint64_t version, Nanos timeout);
  void Update(Worker& worker, daemon::Selector selector, Nanos timeout, std::uint64_t version = 0);
  void UpdateAll(const std::string& job, daemon::Selector selector, Nanos timeout,
                 std::uint64_t version = 0, std::uint32_t replica = 0);
  /// Asks what the worker waits for: its update, or the release of `version`.
  Status Explain(Worker& worker, std::uint64_t version = 0);
  /// Asks which version the worker's memory holds, and with `alias` a second place of its tensors.
  void Claim(Worker& worker, std::optional<std::uint64_t> alias = {});
  /// What verifying says: the reply, or why there is none.
  Result<proto::VerifyReply> Verify(std::uint64_t version = 0, std::uint64_t timeout_ms = 2000);
  /// What else tensorbusctl is told.
  proto::StatusReply GetStatus();
  Result<proto::ExplainReply> Explain(const std::string& tensor, const std::string& channel = "");
  std::vector<proto::MissingStatus> WhoIsMissing();
  /// The worker is gone, and the reference to it.
  void Leave(Worker& worker, const std::string& why = "worker process 4711 ended");
  std::vector<Worker*> WorkersOf(const std::string& job, std::uint32_t replica = 0);

  /// Replaces the daemon: every stream ends, agents attach to a new core.
  void RestartDaemon(std::uint64_t first_session);
  /// No live session, request, question or timer of the core beyond the heartbeat is left.
  void ExpectQuiet();

  testing::ManualExecutor executor;
  Metrics registry;
  daemon::DaemonMetrics metrics{registry};
  SimSideWork side_work{executor};
  std::unique_ptr<daemon::Core> core;
  std::map<std::string, Worker> workers;  ///< by name
  rpc::PortId NextPort() { return rpc::PortId{++ports_}; }

 private:
  std::map<std::string, std::unique_ptr<FakeAgent>> agents_;
  std::uint64_t ports_ = 0;
  std::uint64_t requests_ = 0;
};

}  // namespace tensorbus::sim
