#include "tests/unit/agent/fake_daemon.h"

#include <algorithm>
#include <fmt/format.h>
#include <future>
#include <gtest/gtest.h>

#include "tensorbus/base/check.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/protocol.h"
#include "tensorbus/rpc/status_map.h"
#include "tensorbus/types/layout_combiner.h"
#include "tests/testing/deadline.h"
#include "worker_shim/wire.h"

namespace tensorbus::testing {

using agent::RankKey;
using proto::AgentMessage;
using proto::DaemonMessage;

struct FakeDaemon::Attached {
  Executor* executor = nullptr;
  std::shared_ptr<bool> alive;
  rpc::ControlLink::OnMessage on_message;
  rpc::ControlLink::OnLost on_lost;
  std::string agent;
  std::string host;
  std::vector<std::string> endpoints;
};

struct FakeDaemon::RankState {
  std::uint64_t link = 0;
  RankIdentity identity;
  RankLayout layout;
  FlipMode flip = FlipMode::kInPlace;
  Proof proof = Proof::kReadback;
  std::uint64_t published = 0;
  std::uint64_t waiting = 0;  ///< request
};

struct FakeDaemon::SessionState {
  SessionId id;
  std::string job;
  std::uint32_t replica = 0;
  std::uint64_t version = 0;
  std::vector<std::uint64_t> links;
  std::size_t source_count = 0;
  std::size_t target_count = 0;
  std::set<std::string> ready;
  std::set<std::string> receipts;
  std::set<std::string> source_done;
  std::set<std::string> flip_ready;
  std::set<std::string> flip_done;
  std::set<Hash128> digests;
  std::vector<BoxSum> target_boxes;
  std::map<std::pair<std::uint32_t, std::uint32_t>, BoxSum> boxes;  ///< received, no source yet
  bool over = false;
};

/// One agent's stream.
class FakeDaemon::Link final : public rpc::ControlLink {
 public:
  Link(FakeDaemon& daemon, std::uint64_t id, Executor& executor, std::shared_ptr<bool> alive)
      : daemon_(daemon), id_(id), executor_(executor), alive_(std::move(alive)) {}
  ~Link() override {
    *alive_ = false;  // on the agent's executor, where callbacks look at it
    // The agent's executor may end right after this; nothing may be posted to it any more then.
    const auto detached = std::make_shared<std::promise<void>>();
    daemon_.executor_.Post([&daemon = daemon_, id = id_, detached] {
      daemon.Detach(id);
      detached->set_value();
    });
    detached->get_future().wait_for(std::chrono::seconds(5));
  }
  void Send(AgentMessage message) override {
    daemon_.executor_.Post([&daemon = daemon_, id = id_, message = std::move(message)] {
      daemon.OnAgentMessage(id, message);
    });
  }
  void GetLayout(const Hash128& hash, Nanos, OnLayout done) override {
    daemon_.executor_.Post([&daemon = daemon_, hash, done, &executor = executor_, alive = alive_] {
      const auto found = daemon.layouts_.find(hash);
      Result<std::vector<std::byte>> answer = Status(Code::kNotFound, "no such layout");
      if (found != daemon.layouts_.end()) answer = found->second;
      executor.Post([done, answer, alive] {
        if (*alive) done(answer);
      });
    });
  }

 private:
  FakeDaemon& daemon_;
  std::uint64_t id_;
  Executor& executor_;
  std::shared_ptr<bool> alive_;
};

FakeDaemon::FakeDaemon() : executor_("fake-daemon") {}

FakeDaemon::~FakeDaemon() {
  executor_.Stop();
}

agent::LinkFactory FakeDaemon::Factory() {
  return [this](Executor& executor, rpc::ControlLink::OnMessage on_message,
                rpc::ControlLink::OnLost on_lost) -> std::unique_ptr<rpc::ControlLink> {
    std::uint64_t id = 0;
    {
      MutexLock lock(mutex_);
      id = next_link_++;
    }
    auto alive = std::make_shared<bool>(true);
    Attached attached{&executor, alive, std::move(on_message), std::move(on_lost), "", "", {}};
    executor_.Post([this, id, attached] { links_.emplace(id, attached); });
    return std::make_unique<Link>(*this, id, executor, alive);
  };
}

void FakeDaemon::SetOnStep(std::function<bool(Step, SessionId)> on_step) {
  MutexLock lock(mutex_);
  on_step_ = std::move(on_step);
}

void FakeDaemon::Release() {
  executor_.Post([this] {
    const auto held = std::exchange(held_, {});
    for (const auto& [id, step] : held) Run(id, step);
  });
}

void FakeDaemon::Abort(SessionId session, const Status& why) {
  executor_.Post([this, session, why] { FailSession(session, why); });
}

void FakeDaemon::Accept(bool accept) {
  executor_.Post([this, accept] { accept_ = accept; });
}

void FakeDaemon::Crash(bool accept_again) {
  executor_.Post([this, accept_again] {
    accept_ = accept_again;
    ranks_.clear();
    sessions_.clear();
    latest_ = 0;
    for (auto& [id, link] : std::exchange(links_, {})) {
      link.executor->Post([alive = link.alive, on_lost = link.on_lost] {
        if (*alive) on_lost(Status(Code::kUnavailable, "crashed", Reason::kPeerLost));
      });
    }
  });
}

proto::Answer FakeDaemon::Ask(const std::string& agent, proto::Query query) {
  std::promise<std::uint64_t> asked;
  executor_.Post([&] {
    const std::uint64_t id = next_query_++;
    query.set_query(id);
    DaemonMessage message;
    *message.mutable_query() = query;
    for (const auto& [link, attached] : links_) {
      if (attached.agent == agent) SendTo(link, message);
    }
    asked.set_value(id);
  });
  const std::uint64_t id = asked.get_future().get();
  const TimePoint deadline = In(std::chrono::seconds(20));
  MutexLock lock(mutex_);
  while (!answers_.contains(id)) {
    if (!changed_.WaitUntil(mutex_, deadline)) {
      ADD_FAILURE() << "no answer to the query";
      return {};
    }
  }
  return answers_[id];
}

void FakeDaemon::set_timeout(Nanos timeout) {
  executor_.Post([this, timeout] { timeout_ = timeout; });
}
void FakeDaemon::set_register_time(Nanos time) {
  executor_.Post([this, time] { register_time_ = time; });
}
void FakeDaemon::set_publish_time(Nanos time) {
  executor_.Post([this, time] { publish_time_ = time; });
}
void FakeDaemon::set_refusal(const Status& refusal) {
  executor_.Post([this, refusal] { refusal_ = refusal; });
}
void FakeDaemon::set_answer_claims(bool answer) {
  executor_.Post([this, answer] { answer_claims_ = answer; });
}
void FakeDaemon::set_from_snapshot(bool from_snapshot) {
  executor_.Post([this, from_snapshot] { from_snapshot_ = from_snapshot; });
}
void FakeDaemon::set_early_go(bool early_go) {
  executor_.Post([this, early_go] { early_go_ = early_go; });
}

void FakeDaemon::set_split_capability(bool split) {
  executor_.Post([this, split] { split_capability_ = split; });
}

void FakeDaemon::set_epoch(std::uint64_t epoch) {
  executor_.Post([this, epoch] { epoch_ = epoch; });
}

std::vector<AgentMessage> FakeDaemon::Received(AgentMessage::BodyCase kind) const {
  MutexLock lock(mutex_);
  std::vector<AgentMessage> out;
  for (const AgentMessage& message : received_) {
    if (message.body_case() == kind) out.push_back(message);
  }
  return out;
}

bool FakeDaemon::AwaitReceived(AgentMessage::BodyCase kind, std::size_t count) const {
  const TimePoint deadline = In(std::chrono::seconds(20));
  MutexLock lock(mutex_);
  for (;;) {
    const auto have =
        std::count_if(received_.begin(), received_.end(),
                      [kind](const AgentMessage& message) { return message.body_case() == kind; });
    if (static_cast<std::size_t>(have) >= count) return true;
    if (!changed_.WaitUntil(mutex_, deadline)) return false;
  }
}

void FakeDaemon::SendToAll(DaemonMessage message) {
  executor_.Post([this, message = std::move(message)] {
    for (const auto& [id, link] : links_) SendTo(id, message);
  });
}

void FakeDaemon::SendTo(std::uint64_t link, DaemonMessage message) {
  const auto found = links_.find(link);
  if (found == links_.end()) return;
  found->second.executor->Post([alive = found->second.alive, on_message = found->second.on_message,
                                message = std::move(message)] {
    if (*alive) on_message(message);
  });
}

void FakeDaemon::Detach(std::uint64_t link) {
  links_.erase(link);
  for (auto it = ranks_.begin(); it != ranks_.end();) {
    if (it->second.link == link) {
      const RankKey key = it->first;
      it = ranks_.erase(it);
      OnLeave(key, "its agent is gone");
    } else {
      ++it;
    }
  }
}

void FakeDaemon::OnAgentMessage(std::uint64_t link, AgentMessage message) {
  const auto found = links_.find(link);
  if (found == links_.end()) return;
  {
    MutexLock lock(mutex_);
    received_.push_back(message);
    if (message.has_answer()) answers_[message.answer().query()] = message.answer();
    changed_.NotifyAll();
  }
  const auto who = [&](std::uint32_t rank) { return std::to_string(rank); };
  switch (message.body_case()) {
    case AgentMessage::kHello: {
      if (!accept_) return;
      found->second.agent = message.hello().agent();
      found->second.host = message.hello().host();
      found->second.endpoints.assign(message.hello().endpoints().begin(),
                                     message.hello().endpoints().end());
      DaemonMessage answer;
      answer.mutable_welcome()->set_protocol(rpc::kControlProtocol);
      answer.mutable_welcome()->set_daemon("fake");
      answer.mutable_welcome()->set_data_token("secret");
      if (!refusal_.ok()) *answer.mutable_welcome()->mutable_error() = rpc::ToProto(refusal_);
      return SendTo(link, answer);
    }
    case AgentMessage::kRegisterRank:
      return OnRegister(link, message.register_rank());
    case AgentMessage::kLeaveRank: {
      const RankKey key = RankKey::Of(*rpc::FromProto(message.leave_rank().rank()));
      ranks_.erase(key);
      return OnLeave(key, message.leave_rank().why());
    }
    case AgentMessage::kPublish:
      if (publish_time_ == Nanos{}) return AcceptPublish(link, message.publish());
      executor_.PostAfter(publish_time_, [this, link, publish = message.publish()] {
        AcceptPublish(link, publish);
      });
      return;
    case AgentMessage::kRequestRelease: {
      DaemonMessage answer;
      *answer.mutable_version_released()->mutable_rank() = message.request_release().rank();
      answer.mutable_version_released()->set_version(message.request_release().version());
      return SendTo(link, answer);
    }
    case AgentMessage::kRequestVersion: {
      const RankKey key = RankKey::Of(*rpc::FromProto(message.request_version().rank()));
      ranks_[key].waiting = message.request_version().request();
      return TryStart(key.job, key.replica);
    }
    case AgentMessage::kExplainWait: {
      DaemonMessage answer;
      proto::WaitExplained& out = *answer.mutable_wait_explained();
      out.set_request(message.explain_wait().request());
      *out.mutable_rank() = message.explain_wait().rank();
      *out.mutable_error() = rpc::ToProto(
          Status(Code::kDeadlineExceeded, "the fake daemon knows", Reason::kMissingRank));
      return SendTo(link, answer);
    }
    case AgentMessage::kSessionReady: {
      const SessionId id{message.session_ready().session()};
      const auto session = sessions_.find(id);
      if (session == sessions_.end()) return;
      session->second->digests.insert(rpc::FromProto(message.session_ready().plan_digest()));
      EXPECT_EQ(session->second->digests.size(), 1U) << "agents planned differently";
      last_plan_[session->second->job] = *session->second->digests.begin();
      return Count(id, &session->second->ready, std::to_string(link), session->second->links.size(),
                   Step::kGo);
    }
    case AgentMessage::kSessionReceipt: {
      const SessionId id{message.session_receipt().session()};
      const auto session = sessions_.find(id);
      if (session == sessions_.end()) return;
      EXPECT_EQ(message.session_receipt().version(), session->second->version);
      EXPECT_EQ(message.session_receipt().channel_epoch(), epoch_);
      BoxSum boxes;
      for (const proto::RouteReceipt& route : message.session_receipt().routes()) {
        EXPECT_EQ(rpc::FromProto(route.source()), rpc::FromProto(route.target()));
        boxes += rpc::FromProto(route.boxes());
        session->second->boxes[{route.source_rank(), route.target_rank()}] =
            rpc::FromProto(route.boxes());
      }
      EXPECT_EQ(boxes, session->second->target_boxes.at(message.session_receipt().target_rank()));
      return Count(id, &session->second->receipts, who(message.session_receipt().target_rank()),
                   session->second->target_count, Step::kFinish);
    }
    case AgentMessage::kSourceDone: {
      const SessionId id{message.source_done().session()};
      const auto session = sessions_.find(id);
      if (session == sessions_.end()) return;
      if (message.source_done().version() != session->second->version) {
        return FailSession(id, Status(Code::kFailedPrecondition, "a source holds another version",
                                      Reason::kStaleVersion));
      }
      EXPECT_EQ(message.source_done().channel_epoch(), epoch_);
      for (const proto::RouteReceipt& route : message.source_done().routes()) {
        const auto received =
            session->second->boxes.extract({route.source_rank(), route.target_rank()});
        EXPECT_FALSE(received.empty()) << "a route that no target received";
        if (received.empty()) continue;
        EXPECT_EQ(rpc::FromProto(route.boxes()), received.mapped());
      }
      return Count(id, &session->second->source_done, who(message.source_done().source_rank()),
                   session->second->source_count, Step::kFlipPrepare);
    }
    case AgentMessage::kFlipReady: {
      const SessionId id{message.flip_ready().session()};
      const auto session = sessions_.find(id);
      if (session == sessions_.end()) return;
      return Count(id, &session->second->flip_ready, who(message.flip_ready().target_rank()),
                   session->second->target_count, Step::kFlipCommit);
    }
    case AgentMessage::kFlipDone: {
      const SessionId id{message.flip_done().session()};
      const auto session = sessions_.find(id);
      if (session == sessions_.end()) return;
      return Count(id, &session->second->flip_done, who(message.flip_done().target_rank()),
                   session->second->target_count, Step::kEnd);
    }
    case AgentMessage::kSessionFailed:
      return FailSession(SessionId{message.session_failed().session()},
                         rpc::FromProto(message.session_failed().error()));
    case AgentMessage::kClaimVersion: {
      if (!answer_claims_) return;
      DaemonMessage answer;
      answer.mutable_claim_answered()->set_request(message.claim_version().request());
      answer.mutable_claim_answered()->set_version(latest_);
      return SendTo(link, answer);
    }
    default:
      return;
  }
}

void FakeDaemon::OnRegister(std::uint64_t link, const proto::RegisterRank& message) {
  DaemonMessage answer;
  answer.mutable_rank_registered()->set_request(message.request());
  const RankIdentity identity = *rpc::FromProto(message.rank());
  Result<RankLayout> layout = ParseRankLayout(rpc::BytesOf(message.layout()), identity.rank);
  if (!layout.ok()) {
    *answer.mutable_rank_registered()->mutable_error() = rpc::ToProto(layout.status());
    return SendTo(link, answer);
  }
  RankState state;
  state.link = link;
  state.identity = identity;
  state.layout = *std::move(layout);
  state.flip = static_cast<FlipMode>(message.flip());
  state.proof = static_cast<Proof>(message.proof());
  if (identity.role == Role::kProducer) {
    state.published = message.live_version();
    latest_ = std::max(latest_, message.live_version());
  }
  ranks_[RankKey::Of(identity)] = std::move(state);
  answer.mutable_rank_registered()->set_channel_epoch(epoch_);
  answer.mutable_rank_registered()->set_latest_version(latest_);
  executor_.PostAfter(register_time_, [this, link, answer] { SendTo(link, answer); });
}

void FakeDaemon::AcceptPublish(std::uint64_t link, const proto::Publish& message) {
  const RankKey key = RankKey::Of(*rpc::FromProto(message.rank()));
  if (!ranks_.contains(key)) return;
  ranks_[key].published = message.version();
  DaemonMessage answer;
  answer.mutable_publish_accepted()->set_request(message.request());
  SendTo(link, answer);
  bool all = true;
  for (const auto& [other, state] : ranks_) {
    if (state.identity.role == Role::kProducer) all = all && state.published == message.version();
  }
  if (!all) return;
  latest_ = message.version();
  std::set<std::pair<std::string, std::uint32_t>> replicas;
  for (const auto& [other, state] : ranks_) {
    if (state.identity.role == Role::kConsumer) replicas.emplace(other.job, other.replica);
  }
  for (const auto& [job, replica] : replicas) TryStart(job, replica);
}

void FakeDaemon::OnLeave(const RankKey& key, const std::string& why) {
  for (const auto& [id, session] : std::map(sessions_)) {
    const bool source = std::none_of(ranks_.begin(), ranks_.end(), [&](const auto& entry) {
      return entry.second.identity.role == Role::kProducer && entry.first == key;
    });
    if (session->over || !source) continue;
    FailSession(id, Status(Code::kUnavailable,
                           fmt::format("{}/{} rank {}: {}", key.channel, key.job, key.rank, why),
                           Reason::kPeerLost));
  }
}

// A session starts when a whole replica waits and every producer rank has published the latest.
void FakeDaemon::TryStart(const std::string& job, std::uint32_t replica) {
  if (latest_ == 0) return;
  std::size_t waiting = 0;
  std::uint32_t rank_count = 0;
  for (const auto& [key, state] : ranks_) {
    if (key.job != job || key.replica != replica) continue;
    rank_count = state.identity.rank_count;
    if (state.waiting != 0) ++waiting;
  }
  if (rank_count != 0 && waiting == rank_count) Start(job, replica, latest_);
}

Hash128 FakeDaemon::LayoutOf(const std::string& job, std::uint32_t replica) {
  LayoutCombiner combiner;
  for (const auto& [key, state] : ranks_) {
    if (key.job == job && key.replica == replica) TB_CHECK(combiner.Add(state.layout).ok());
  }
  Result<JobLayout> combined = std::move(combiner).Finish();
  EXPECT_TRUE(combined.ok()) << combined.status();
  const Hash128 hash = HashOf(*combined);
  layouts_[hash] = Serialize(*combined);
  return hash;
}

void FakeDaemon::Start(const std::string& job, std::uint32_t replica, std::uint64_t version) {
  auto session = std::make_shared<SessionState>();
  session->id = SessionId{next_session_++};
  session->job = job;
  session->replica = replica;
  session->version = version;
  std::map<std::uint64_t, proto::Participant> participants;
  DaemonMessage message;
  proto::Prepare& prepare = *message.mutable_prepare();
  for (const auto& [key, state] : ranks_) {
    const bool source = state.identity.role == Role::kProducer;
    if (!source && (key.job != job || key.replica != replica)) continue;
    proto::Participant& participant = participants[state.link];
    if (source) {
      participant.add_source_ranks(key.rank);
      ++session->source_count;
      prepare.set_source_job(key.job);
    } else {
      participant.add_target_ranks(key.rank);
      ++session->target_count;
      prepare.set_flip(static_cast<std::uint32_t>(state.flip));
      prepare.set_proof(static_cast<std::uint32_t>(state.proof));
    }
    prepare.set_channel(key.channel);
  }
  for (auto& [link, participant] : participants) {
    participant.set_agent(links_.at(link).agent);
    participant.set_host(links_.at(link).host);
    for (const std::string& endpoint : links_.at(link).endpoints) {
      participant.add_endpoints(endpoint);
    }
    *prepare.add_participants() = participant;
    session->links.push_back(link);
  }
  prepare.set_session(session->id.value);
  prepare.set_channel_epoch(epoch_);
  prepare.set_version(version);
  prepare.set_capability(std::string(32, 'c'));
  prepare.set_target_job(job);
  prepare.set_replica(replica);
  *prepare.mutable_source_layout() = rpc::ToProto(LayoutOf(prepare.source_job(), 0));
  const Hash128 target_layout = LayoutOf(job, replica);
  session->target_boxes = BoxSumsOf(*ParseJobLayout(layouts_.at(target_layout)));
  *prepare.mutable_target_layout() = rpc::ToProto(target_layout);
  prepare.set_from_snapshot(from_snapshot_);
  prepare.set_timeout_ms(static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(timeout_).count()));
  if (early_go_ && last_plan_.contains(job)) {
    prepare.set_go(true);
    *prepare.mutable_plan_digest() = rpc::ToProto(last_plan_[job]);
  }
  sessions_[session->id] = session;
  for (const std::uint64_t link : session->links) {
    if (split_capability_) prepare.set_capability(std::string(32, static_cast<char>('0' + link)));
    SendTo(link, message);
  }
}

void FakeDaemon::Count(SessionId id, std::set<std::string>* done, const std::string& who,
                       std::size_t expected, Step next) {
  EXPECT_TRUE(done->insert(who).second) << "said twice";
  if (done->size() == expected) Run(id, next);
}

void FakeDaemon::Run(SessionId id, Step step) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second->over) return;
  SessionState& session = *found->second;
  std::function<bool(Step, SessionId)> on_step;
  {
    MutexLock lock(mutex_);
    on_step = on_step_;
  }
  if (on_step && !on_step(step, id)) {
    held_.emplace_back(id, step);
    return;
  }
  DaemonMessage message;
  switch (step) {
    case Step::kPrepare:
      return;
    case Step::kGo:
      message.mutable_go()->set_session(id.value);
      break;
    case Step::kFinish:
      message.mutable_finish()->set_session(id.value);
      break;
    case Step::kFlipPrepare:
      EXPECT_TRUE(session.boxes.empty()) << "a route that no source named";
      message.mutable_flip_prepare()->set_session(id.value);
      break;
    case Step::kFlipCommit:
      message.mutable_flip_commit()->set_session(id.value);
      break;
    case Step::kEnd:
      message.mutable_session_ended()->set_session(id.value);
      message.mutable_session_ended()->set_version(session.version);
      message.mutable_session_ended()->set_seconds(0.5);
      session.over = true;
      for (auto& [key, state] : ranks_) {
        if (key.job == session.job && key.replica == session.replica) state.waiting = 0;
      }
      break;
  }
  for (const std::uint64_t link : session.links) SendTo(link, message);
}

void FakeDaemon::FailSession(SessionId id, const Status& why) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || std::exchange(found->second->over, true)) return;
  const SessionState& session = *found->second;
  DaemonMessage abort;
  abort.mutable_abort()->set_session(id.value);
  *abort.mutable_abort()->mutable_error() = rpc::ToProto(why);
  for (const std::uint64_t link : session.links) SendTo(link, abort);
  for (auto& [key, state] : ranks_) {
    if (key.job != session.job || key.replica != session.replica || state.waiting == 0) continue;
    DaemonMessage failed;
    failed.mutable_request_failed()->set_request(state.waiting);
    *failed.mutable_request_failed()->mutable_rank() = rpc::ToProto(state.identity);
    *failed.mutable_request_failed()->mutable_error() = rpc::ToProto(why);
    state.waiting = 0;
    SendTo(state.link, failed);
  }
}

}  // namespace tensorbus::testing
