#include "tests/sim/world.h"

#include <algorithm>
#include <gtest/gtest.h>

#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::sim {

using namespace std::chrono_literals;

namespace {

constexpr Nanos kStep = 5ms;  // an agent's time for anything

Range ShareOf(std::uint32_t rank, std::uint32_t rank_count) {
  const std::uint64_t share = World::kElements / rank_count;
  return {.lo = rank * share, .hi = (rank + 1) * share};
}

std::uint64_t OverlapBytes(const Range& a, const Range& b) {
  const std::uint64_t lo = std::max(a.lo, b.lo);
  const std::uint64_t hi = std::min(a.hi, b.hi);
  return lo < hi ? (hi - lo) * 4 : 0;
}

constexpr std::uint64_t kNormBytes = 16 * 4;

/// A digest that adds up over elements, of memory with that content.
proto::Digest DigestOf(const Box& box, std::uint64_t content) {
  proto::Digest digest;
  std::uint64_t sum = 0;
  for (std::uint64_t i = box[0].lo; i < box[0].hi; ++i) sum += (i * i + 1) * (content + 1);
  digest.set_a(sum);
  digest.set_b(sum * 3);
  digest.set_bytes(box.volume() * 4);
  return digest;
}

std::uint32_t RankCount(const proto::Prepare& prepare, bool source) {
  std::uint32_t count = 0;
  for (const proto::Participant& participant : prepare.participants()) {
    count += static_cast<std::uint32_t>(source ? participant.source_ranks_size()
                                               : participant.target_ranks_size());
  }
  return count;
}

const proto::Participant& Self(const proto::Prepare& prepare, const std::string& name) {
  for (const proto::Participant& participant : prepare.participants()) {
    if (participant.agent() == name) return participant;
  }
  TB_CHECK(false);
}

proto::Digest DigestOfRoute(const proto::Prepare& prepare, std::uint32_t source,
                            std::uint32_t target) {
  const std::uint32_t sources = RankCount(prepare, true);
  const std::uint32_t targets = RankCount(prepare, false);
  proto::Digest digest;
  digest.set_a(prepare.version() * 1000 + source);
  digest.set_b(prepare.version() * 1000 + target);
  // "norm" is whole everywhere; target t takes it from source t mod M.
  digest.set_bytes(OverlapBytes(ShareOf(source, sources), ShareOf(target, targets)) +
                   (target % sources == source ? kNormBytes : 0));
  return digest;
}

/// The boxes to go with it: tensor 0 is "w", 1 is "norm".
proto::BoxSum BoxesOfRoute(const proto::Prepare& prepare, std::uint32_t source,
                           std::uint32_t target) {
  const std::uint32_t sources = RankCount(prepare, true);
  const Range from = ShareOf(source, sources);
  const Range to = ShareOf(target, RankCount(prepare, false));
  const Range common[] = {{.lo = std::max(from.lo, to.lo), .hi = std::min(from.hi, to.hi)}};
  const Range norm[] = {{.lo = 0, .hi = 16}};
  BoxSum boxes;
  if (!common[0].empty()) boxes.Add(0, Box(std::span<const Range>(common)));
  if (target % sources == source) boxes.Add(1, Box(std::span<const Range>(norm)));
  return rpc::ToProto(boxes);
}

}  // namespace

// ---- FakeAgent --------------------------------------------------------------------------------

FakeAgent::FakeAgent(World& world, std::string name, std::string host)
    : world_(world), name_(std::move(name)), host_(std::move(host)) {}

void FakeAgent::Attach() {
  attached_ = true;
  closed_.reset();
  port_ = world_.NextPort();
  world_.executor.Post([this, port = port_] {
    world_.core->OnAttach(port, std::shared_ptr<rpc::AgentPort>(this, [](rpc::AgentPort*) {}),
                          "fd:1");
  });
  proto::AgentMessage message;
  proto::Hello& hello = *message.mutable_hello();
  hello.set_protocol(protocol);
  hello.set_agent(name_);
  hello.set_host(host_);
  hello.set_pid(4711);
  Say(std::move(message));
  // Beats for as long as it lives.
  const auto beat = std::make_shared<std::function<void()>>();
  *beat = [this, port = port_, weak = std::weak_ptr<std::function<void()>>(beat)] {
    if (!attached_ || port_ != port) return;
    proto::AgentMessage heart;
    heart.mutable_heartbeat();
    Say(std::move(heart));
    if (const auto self = weak.lock()) world_.executor.PostAfter(1s, [self] { (*self)(); });
  };
  world_.executor.PostAfter(1s, [beat] { (*beat)(); });
}

void FakeAgent::Die() {
  if (!attached_) return;
  attached_ = false;
  sessions_.clear();
  world_.executor.Post([this, port = port_] {
    world_.core->OnDetach(port, Status(Code::kUnavailable, "connection reset", Reason::kPeerLost));
  });
}

void FakeAgent::Say(proto::AgentMessage message) {
  if (!attached_ || silent) return;
  if (die_instead == message.body_case()) return Die();
  if (loss_per_mille > 0 && !message.has_hello() && !message.has_heartbeat() &&
      random() % 1000 < loss_per_mille) {
    return;
  }
  world_.executor.Post([this, port = port_, message = std::move(message)] {
    world_.core->OnMessage(port, message);
  });
}

void FakeAgent::Send(proto::DaemonMessage message) {
  world_.executor.Post([this, port = port_, message = std::move(message)] {
    if (attached_ && port == port_) Handle(message);
  });
}

void FakeAgent::Close(Status status) {
  attached_ = false;
  closed_ = std::move(status);
  sessions_.clear();
}

void FakeAgent::Handle(const proto::DaemonMessage& message) {
  ++received[message.body_case()];
  if (die_on == message.body_case()) return Die();
  if (mute.contains(message.body_case())) return;
  const auto find = [&](const proto::Rank& rank) -> Worker* {
    const auto identity = rpc::FromProto(rank);
    const auto found = world_.workers.find(identity->ToString());
    return found == world_.workers.end() ? nullptr : &found->second;
  };
  const auto by_request = [&](std::uint64_t request) -> Worker* {
    for (auto& [name, worker] : world_.workers) {
      if (worker.request == request) return &worker;
    }
    return nullptr;
  };
  switch (message.body_case()) {
    case proto::DaemonMessage::kRankRegistered: {
      const auto& reply = message.rank_registered();
      if (Worker* worker = by_request(reply.request())) {
        worker->registered = rpc::FromProto(reply.error());
        worker->epoch = reply.channel_epoch();
        worker->latest = reply.latest_version();
      }
      return;
    }
    case proto::DaemonMessage::kPublishAccepted:
      if (Worker* worker = by_request(message.publish_accepted().request())) {
        worker->published = rpc::FromProto(message.publish_accepted().error());
      }
      return;
    case proto::DaemonMessage::kVersionReleased: {
      const auto& reply = message.version_released();
      if (Worker* worker = find(reply.rank())) {
        worker->released[reply.version()] = rpc::FromProto(reply.error());
      }
      return;
    }
    case proto::DaemonMessage::kDropSnapshot:
      if (Worker* worker = find(message.drop_snapshot().rank())) {
        worker->snapshots.erase(message.drop_snapshot().version());
      }
      return;
    case proto::DaemonMessage::kRequestFailed: {
      const auto& reply = message.request_failed();
      Worker* worker = by_request(reply.request());
      if (worker != nullptr && !worker->updated) {
        worker->updated = rpc::FromProto(reply.error());
      }
      return;
    }
    case proto::DaemonMessage::kWaitExplained:
      if (Worker* worker = find(message.wait_explained().rank())) {
        worker->explained = rpc::FromProto(message.wait_explained().error());
      }
      return;
    case proto::DaemonMessage::kQuery:
      return AnswerQuery(message.query());
    case proto::DaemonMessage::kClaimAnswered:
      if (Worker* worker = by_request(message.claim_answered().request())) {
        worker->claimed = rpc::FromProto(message.claim_answered().error());
        worker->claimed_version = message.claim_answered().version();
      }
      return;
    case proto::DaemonMessage::kPrepare:
      return OnPrepare(message.prepare());
    case proto::DaemonMessage::kGo:
      return Move(message.go().session());
    case proto::DaemonMessage::kFinish:
      return Finish(message.finish().session());
    case proto::DaemonMessage::kFlipPrepare:
      return Flip(message.flip_prepare().session(), false);
    case proto::DaemonMessage::kFlipCommit:
      return Flip(message.flip_commit().session(), true);
    case proto::DaemonMessage::kAbort:
      return EndSession(message.abort().session(), rpc::FromProto(message.abort().error()), 0);
    case proto::DaemonMessage::kSessionEnded:
      return EndSession(message.session_ended().session(), {}, message.session_ended().version());
    default:
      return;
  }
}

void FakeAgent::OnPrepare(const proto::Prepare& prepare) {
  if (fail_prepare) {
    proto::AgentMessage message;
    message.mutable_session_failed()->set_session(prepare.session());
    *message.mutable_session_failed()->mutable_error() = rpc::ToProto(*fail_prepare);
    return Say(std::move(message));
  }
  sessions_[prepare.session()] = prepare;
  prepared_epoch = prepare.channel_epoch();
  capabilities[prepare.session()] = prepare.capability();
  if (prepare.go()) return Move(prepare.session());
  world_.executor.PostAfter(kStep, [this, session = prepare.session()] {
    if (!sessions_.contains(session)) return;
    proto::AgentMessage message;
    message.mutable_session_ready()->set_session(session);
    *message.mutable_session_ready()->mutable_plan_digest() =
        rpc::ToProto(HashOf(std::string_view(plan)));
    Say(std::move(message));
  });
}

void FakeAgent::Move(std::uint64_t session) {
  world_.executor.PostAfter(kStep, [this, session] {
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) return;
    const proto::Prepare prepare = found->second;
    moved_.insert(session);
    for (const std::uint32_t target : Self(prepare, name_).target_ranks()) {
      proto::AgentMessage message;
      proto::SessionReceipt& receipt = *message.mutable_session_receipt();
      receipt.set_session(session);
      receipt.set_target_rank(target);
      receipt.set_version(prepare.version());
      receipt.set_channel_epoch(prepare.channel_epoch() + (stale_receipts ? 1 : 0));
      for (std::uint32_t source = 0; source < RankCount(prepare, true); ++source) {
        const proto::Digest digest = DigestOfRoute(prepare, source, target);
        if (digest.bytes() == 0) continue;
        proto::RouteReceipt& route = *receipt.add_routes();
        route.set_source_rank(source);
        route.set_target_rank(target);
        *route.mutable_source() = digest;
        *route.mutable_target() = digest;
        *route.mutable_boxes() = BoxesOfRoute(prepare, source, target);
        if (corrupt_target == target) route.mutable_target()->set_a(digest.a() ^ 1);
      }
      Say(std::move(message));
    }
  });
}

void FakeAgent::Finish(std::uint64_t session) {
  world_.executor.PostAfter(kStep, [this, session] {
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) return;
    const proto::Prepare prepare = found->second;
    for (const std::uint32_t source : Self(prepare, name_).source_ranks()) {
      proto::AgentMessage message;
      message.mutable_source_done()->set_session(session);
      message.mutable_source_done()->set_source_rank(source);
      message.mutable_source_done()->set_version(prepare.version());
      message.mutable_source_done()->set_channel_epoch(prepare.channel_epoch());
      for (std::uint32_t target = 0; target < RankCount(prepare, false); ++target) {
        proto::Digest digest = DigestOfRoute(prepare, source, target);
        if (digest.bytes() == 0) continue;
        if (corrupt_source == source) digest.set_b(digest.b() + 1);
        proto::RouteReceipt& route = *message.mutable_source_done()->add_routes();
        route.set_source_rank(source);
        route.set_target_rank(target);
        *route.mutable_source() = digest;
        *route.mutable_boxes() = BoxesOfRoute(prepare, source, target);
      }
      Say(std::move(message));
    }
  });
}

void FakeAgent::Flip(std::uint64_t session, bool commit) {
  world_.executor.PostAfter(kStep, [this, session, commit] {
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) return;
    const proto::Prepare prepare = found->second;
    for (const std::uint32_t target : Self(prepare, name_).target_ranks()) {
      proto::AgentMessage message;
      if (commit) {
        message.mutable_flip_done()->set_session(session);
        message.mutable_flip_done()->set_target_rank(target);
        Worker& worker =
            world_.worker(prepare.target_job(), target, prepare.replica(), prepare.channel());
        worker.live = prepare.version();
        worker.content = prepare.version();
      } else {
        message.mutable_flip_ready()->set_session(session);
        message.mutable_flip_ready()->set_target_rank(target);
      }
      Say(std::move(message));
    }
  });
}

void FakeAgent::EndSession(std::uint64_t session, const Status& status, std::uint64_t version) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  const proto::Prepare prepare = found->second;
  sessions_.erase(found);
  const bool moved = moved_.erase(session) != 0;
  if (!status.ok() && Self(prepare, name_).target_ranks_size() != 0) {
    proto::AgentMessage message;  // what is left behind
    message.mutable_session_failed()->set_session(session);
    *message.mutable_session_failed()->mutable_error() = rpc::ToProto(status);
    if (moved && prepare.flip() == static_cast<std::uint32_t>(FlipMode::kInPlace)) {
      *message.mutable_session_failed()->mutable_dirty_target_ranks() =
          Self(prepare, name_).target_ranks();
    }
    Say(std::move(message));
  }
  for (const std::uint32_t target : Self(prepare, name_).target_ranks()) {
    Worker& worker =
        world_.worker(prepare.target_job(), target, prepare.replica(), prepare.channel());
    worker.updated = status;
    if (status.ok()) {
      EXPECT_EQ(worker.live, version) << "told of an end without a flip";
      worker.dirty = false;
    }
  }
}

void FakeAgent::AnswerQuery(const proto::Query& query) {
  proto::AgentMessage message;
  proto::Answer& answer = *message.mutable_answer();
  answer.set_query(query.query());
  if (query.has_digest()) {
    const auto identity = rpc::FromProto(query.digest().rank());
    const Worker& worker = world_.workers.at(identity->ToString());
    const std::uint64_t snapshot = query.digest().snapshot_version();
    if (snapshot != 0 && !worker.snapshots.contains(snapshot)) {
      *answer.mutable_error() = rpc::ToProto(Status(Code::kNotFound, "no such snapshot"));
      return Say(std::move(message));
    }
    for (const proto::TensorDigest& want : query.digest().boxes()) {
      proto::TensorDigest& out = *answer.add_digests();
      out = want;
      *out.mutable_digest() =
          DigestOf(rpc::FromProto(want.box()).value(), snapshot != 0 ? snapshot : worker.content);
    }
  }
  Say(std::move(message));
}

// ---- World --------------------------------------------------------------------------------------

World::World()
    : core(std::make_unique<daemon::Core>(daemon::CoreOptions{}, executor, side_work, metrics)) {}

FakeAgent& World::AddAgent(const std::string& name, const std::string& host) {
  agents_[name] = std::make_unique<FakeAgent>(*this, name, host);
  agents_[name]->Attach();
  executor.RunReady();
  return *agents_[name];
}

RankLayout World::LayoutOf(std::uint32_t rank, std::uint32_t rank_count) {
  RankLayout layout;
  const std::uint64_t w_shape[] = {kElements};
  const std::uint64_t norm_shape[] = {16};
  const Shape shape = Shape::Create(w_shape).value();
  const Shape norm = Shape::Create(norm_shape).value();
  const Range range[] = {ShareOf(rank, rank_count)};
  layout.tensors.push_back({.spec = {.name = "w", .dtype = DType::kF32, .shape = shape},
                            .boxes = {Box(std::span<const Range>(range))}});
  layout.tensors.push_back(
      {.spec = {.name = "norm", .dtype = DType::kF32, .shape = norm}, .boxes = {Box::Whole(norm)}});
  return layout;
}

Worker& World::Register(const std::string& agent, const std::string& job, Role role,
                        std::uint32_t rank, std::uint32_t rank_count, const JobOptions& options) {
  Worker fresh;
  fresh.identity = {.channel = options.channel,
                    .job = job,
                    .role = role,
                    .replica = options.replica,
                    .rank = rank,
                    .rank_count = rank_count};
  fresh.agent = agent;
  fresh.request = ++requests_;
  fresh.live = options.live_version;
  fresh.content = options.live_version;
  for (const Held& held : options.held) {
    if (held.policy == daemon::SlowConsumer::kSnapshot) fresh.snapshots.insert(held.version);
  }
  Worker& worker = workers[fresh.identity.ToString()] = fresh;
  RankLayout layout = LayoutOf(rank, rank_count);
  if (options.change) options.change(layout);
  proto::AgentMessage message;
  proto::RegisterRank& registration = *message.mutable_register_rank();
  registration.set_request(worker.request);
  *registration.mutable_rank() = rpc::ToProto(worker.identity);
  registration.set_layout(rpc::ToString(Serialize(layout)));
  registration.set_flip(static_cast<std::uint32_t>(options.flip));
  registration.set_proof(static_cast<std::uint32_t>(options.proof));
  registration.set_memory_mode(1);
  registration.set_pid(options.pid + rank);
  registration.set_known_epoch(options.known_epoch);
  registration.set_seen_epoch(options.seen_epoch);
  registration.set_live_version(options.live_version);
  registration.set_dirty(options.dirty);
  registration.set_publishing(options.publishing);
  for (const Held& held : options.held) {
    proto::HeldVersion& out = *registration.add_held();
    out.set_version(held.version);
    out.set_policy(static_cast<std::uint32_t>(held.policy));
    out.set_min_replicas(held.min_replicas);
    out.set_keep_last(held.keep_last);
  }
  for (const std::string& name : options.leave_out) registration.add_leave_out(name);
  this->agent(agent).Say(std::move(message));
  executor.RunReady();
  return worker;
}

void World::StartJob(const std::string& job, Role role, std::uint32_t rank_count,
                     const std::vector<std::string>& agents, const JobOptions& options) {
  for (std::uint32_t rank = 0; rank < rank_count; ++rank) {
    const Worker& worker =
        Register(agents[rank % agents.size()], job, role, rank, rank_count, options);
    ASSERT_TRUE(worker.registered) << worker.identity.ToString();
    ASSERT_TRUE(worker.registered->ok()) << *worker.registered;
  }
}

Worker& World::worker(const std::string& job, std::uint32_t rank, std::uint32_t replica,
                      const std::string& channel) {
  for (auto& [name, worker] : workers) {
    if (worker.identity.job == job && worker.identity.rank == rank &&
        worker.identity.replica == replica && worker.identity.channel == channel) {
      return worker;
    }
  }
  TB_CHECK(false);
}

std::vector<Worker*> World::WorkersOf(const std::string& job, std::uint32_t replica) {
  std::vector<Worker*> out;
  for (auto& [name, worker] : workers) {
    if (worker.identity.job == job && worker.identity.replica == replica) out.push_back(&worker);
  }
  return out;
}

void World::Publish(Worker& worker, std::uint64_t version, daemon::SlowConsumer policy,
                    std::uint32_t min_replicas, std::uint32_t keep_last) {
  worker.request = ++requests_;
  worker.published.reset();
  proto::AgentMessage message;
  proto::Publish& publish = *message.mutable_publish();
  publish.set_request(worker.request);
  *publish.mutable_rank() = rpc::ToProto(worker.identity);
  publish.set_version(version);
  publish.set_policy(static_cast<std::uint32_t>(policy));
  publish.set_min_replicas(min_replicas);
  publish.set_keep_last(keep_last);
  publish.set_snapshot_made(policy == daemon::SlowConsumer::kSnapshot);
  worker.content = version;
  if (publish.snapshot_made()) worker.snapshots.insert(version);
  agent(worker.agent).Say(std::move(message));
  executor.RunReady();
}

void World::PublishAll(const std::string& job, std::uint64_t version, daemon::SlowConsumer policy,
                       std::uint32_t min_replicas, std::uint32_t keep_last) {
  for (Worker* worker : WorkersOf(job)) {
    Publish(*worker, version, policy, min_replicas, keep_last);
    ASSERT_TRUE(worker->published && worker->published->ok())
        << worker->identity.ToString() << ": " << worker->published.value_or(Status());
  }
}

void World::Release(Worker& worker, std::uint64_t version, Nanos timeout) {
  worker.released.erase(version);
  proto::AgentMessage message;
  *message.mutable_request_release()->mutable_rank() = rpc::ToProto(worker.identity);
  message.mutable_request_release()->set_version(version);
  message.mutable_request_release()->set_timeout_ms(static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count()));
  agent(worker.agent).Say(std::move(message));
  executor.RunReady();
}

Status World::Explain(Worker& worker, std::uint64_t version) {
  worker.explained.reset();
  proto::AgentMessage message;
  *message.mutable_explain_wait()->mutable_rank() = rpc::ToProto(worker.identity);
  message.mutable_explain_wait()->set_version(version);
  agent(worker.agent).Say(std::move(message));
  executor.RunReady();
  EXPECT_TRUE(worker.explained);
  return worker.explained.value_or(Status());
}

void World::Update(Worker& worker, daemon::Selector selector, Nanos timeout,
                   std::uint64_t version) {
  worker.request = ++requests_;
  worker.updated.reset();
  proto::AgentMessage message;
  proto::RequestVersion& request = *message.mutable_request_version();
  request.set_request(worker.request);
  *request.mutable_rank() = rpc::ToProto(worker.identity);
  request.set_selector(static_cast<std::uint32_t>(selector));
  request.set_version(version);
  request.set_timeout_ms(static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count()));
  agent(worker.agent).Say(std::move(message));
  executor.RunReady();
}

void World::UpdateAll(const std::string& job, daemon::Selector selector, Nanos timeout,
                      std::uint64_t version, std::uint32_t replica) {
  for (Worker* worker : WorkersOf(job, replica)) Update(*worker, selector, timeout, version);
}

void World::Claim(Worker& worker, std::optional<std::uint64_t> alias) {
  worker.request = ++requests_;
  worker.claimed.reset();
  proto::AgentMessage message;
  proto::ClaimVersion& claim = *message.mutable_claim_version();
  claim.set_request(worker.request);
  *claim.mutable_rank() = rpc::ToProto(worker.identity);
  for (const RankLayout::Tensor& tensor :
       LayoutOf(worker.identity.rank, worker.identity.rank_count).tensors) {
    for (const Box& box : tensor.boxes) {
      for (const std::uint64_t content : {worker.content, alias.value_or(worker.content)}) {
        proto::TensorDigest& out = *claim.add_tensors();
        out.set_tensor(tensor.spec.name);
        *out.mutable_box() = rpc::ToProto(box);
        *out.mutable_digest() = DigestOf(box, content);
      }
    }
  }
  agent(worker.agent).Say(std::move(message));
  executor.RunReady();
}

Result<proto::VerifyReply> World::Verify(std::uint64_t version, std::uint64_t timeout_ms) {
  proto::VerifyRequest request;
  request.set_version(version);
  request.set_timeout_ms(timeout_ms);
  std::optional<Result<proto::VerifyReply>> reply;
  core->Verify(request, [&](Result<proto::VerifyReply> got) { reply = std::move(got); });
  executor.AdvanceUntil([&] { return reply.has_value(); }, 10s);
  if (!reply) return Status(Code::kInternal, "verify never answered");
  return *reply;
}

proto::StatusReply World::GetStatus() {
  proto::StatusReply reply;
  core->GetStatus({}, [&](Result<proto::StatusReply> got) { reply = std::move(got).value(); });
  return reply;
}

Result<proto::ExplainReply> World::Explain(const std::string& tensor, const std::string& channel) {
  proto::ExplainRequest request;
  request.set_tensor(tensor);
  request.set_channel(channel);
  std::optional<Result<proto::ExplainReply>> reply;
  core->Explain(request, [&](Result<proto::ExplainReply> got) { reply = std::move(got); });
  executor.AdvanceUntil([&] { return reply.has_value(); }, 10s);
  if (!reply) return Status(Code::kInternal, "explain never answered");
  return *reply;
}

std::vector<proto::MissingStatus> World::WhoIsMissing() {
  std::vector<proto::MissingStatus> missing;
  core->WhoIsMissing({}, [&](const Result<proto::WhoIsMissingReply>& got) {
    missing.assign(got->missing().begin(), got->missing().end());
  });
  return missing;
}

void World::Leave(Worker& worker, const std::string& why) {
  proto::AgentMessage message;
  *message.mutable_leave_rank()->mutable_rank() = rpc::ToProto(worker.identity);
  message.mutable_leave_rank()->set_why(why);
  agent(worker.agent).Say(std::move(message));
  executor.RunReady();
  const std::string name = worker.identity.ToString();
  workers.erase(name);
}

void World::RestartDaemon(std::uint64_t first_session) {
  for (auto& [name, agent] : agents_) agent->Die();
  executor.RunReady();
  executor.Advance(24h);  // every timer of the old core has run out: none refers to it any more
  core = std::make_unique<daemon::Core>(daemon::CoreOptions{.first_session = first_session},
                                        executor, side_work, metrics);
  for (auto& [name, agent] : agents_) agent->Attach();
  executor.RunReady();
}

void World::ExpectQuiet() {
  executor.Advance(5s);
  const daemon::Core::Counts counts = core->counts();
  EXPECT_EQ(counts.sessions, 0U);
  EXPECT_EQ(counts.queries, 0U);
  for (auto& [name, worker] : workers) {
    if (!agent(worker.agent).attached()) continue;
    EXPECT_TRUE(worker.updated || worker.identity.role == Role::kProducer)
        << name << " still waits";
  }
}

}  // namespace tensorbus::sim
