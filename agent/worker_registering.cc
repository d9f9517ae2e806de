#include <algorithm>
#include <fmt/format.h>

#include "agent/piece_work.h"
#include "agent/worker_desk.h"
#include "agent/worker_desk_internal.h"
#include "tensorbus/base/log.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

// What a worker's memory is: its segments, its registration, and how the daemon hears of both.
namespace tensorbus::agent {
namespace {

/// The first of a registration's messages opens the collection of its memory.
void BeginSegments(Rank& rank) {
  if (rank.segments.has_value()) return;
  rank.segments.emplace(rank.is_producer() ? Mapping::Access::kRead : Mapping::Access::kReadWrite);
  rank.attach_failure = {};
}

/// A producer that published through another agent, which is gone: what that knew of it.
void TakeReturn(Rank& rank, const wire::Return& back) {
  rank.epoch = back.epoch;
  rank.published = back.published;
  rank.unanswered = back.publishing;
  // What a registration that failed said counts no more.
  rank.publishes.clear();
  rank.receipts.clear();
  rank.write_count_at_publish = 0;
  if (back.held.version.value == 0 || back.held.policy == wire::SlowConsumer::kSnapshot) return;
  rank.publishes[back.held.version] = back.held;
  rank.write_count_at_publish = back.write_count;
}

}  // namespace

void WorkerDesk::OnAttach(Worker& worker, wire::Frame frame) {
  const auto attach = Parse<wire::AttachSegment>(worker, frame);
  if (!attach.has_value()) return;
  Rank& rank = *worker.rank;
  BeginSegments(rank);
  SegmentOffer offer{.attach = *attach, .fd = {}};
  if (attach->mapped && !frame.fds.empty()) offer.fd = std::move(frame.fds.front());
  const Status added = rank.registering
                           ? Status(Code::kFailedPrecondition,
                                    "a registration of this rank is under way", Reason::kBusy)
                           : rank.segments->Add(std::move(offer));
  if (rank.attach_failure.ok()) rank.attach_failure = added;
  Reply(worker, frame.request, added);
}

void WorkerDesk::OnRegister(Worker& worker, wire::Frame frame) {
  auto asked = Parse<wire::Register>(worker, frame);
  if (!asked.has_value()) return;
  Rank& rank = *worker.rank;
  if (!rank.registering) BeginSegments(rank);  // a rank that holds nothing has none to attach
  Status refused;
  if (rank.registering) {
    refused = Status(Code::kFailedPrecondition, "a registration of this rank is under way",
                     Reason::kBusy);
  } else if (worker.waits()) {
    refused = Status(Code::kFailedPrecondition,
                     "another request of this rank has no answer yet; wait for it, or cancel it, "
                     "before registering anew",
                     Reason::kBusy);
  } else if (!rank.attach_failure.ok()) {
    refused = rank.attach_failure;
  }
  if (!refused.ok()) {
    rank.segments.reset();
    wire::Registered answer;
    answer.status = refused;
    return Send(worker, wire::MessageType::kRegistered, frame.request, answer);
  }
  if (rank.pieces != nullptr) {
    // Another layout or other places: for everybody else this rank leaves and another one comes,
    // also while no daemon knows it. Routes bound to its old memory must not outlive that.
    Leave(worker, true, "registers a new layout");
    auto fresh = std::make_shared<Rank>();
    fresh->identity = rank.identity;
    fresh->connection = rank.connection;
    fresh->peer = rank.peer;
    fresh->page_mapping = rank.page_mapping;
    fresh->page = rank.page;
    fresh->segments = std::move(rank.segments);
    worker.rank = std::move(fresh);
    by_key_.emplace(RankKey::Of(worker.rank->identity), worker.connection);
  }
  Rank& joining = *worker.rank;
  joining.registering = true;
  joining.memory = joining.segments->Finish();
  joining.segments.reset();
  joining.dirty = asked->dirty;
  joining.flip = asked->flip;
  joining.proof = asked->proof;
  joining.leave_out = asked->leave_out;
  if (joining.is_producer()) TakeReturn(joining, asked->back);
  worker.register_request = frame.request;
  worker.register_deadline = executor_.Now() + options_.daemon_wait;
  CheckOnPool(worker, *std::move(asked));
}

// What is private is reached in a way that has to be tried, which may wait for the worker.
void WorkerDesk::CheckOnPool(const Worker& worker, wire::Register asked) {
  Rank& rank = *worker.rank;
  PrivateOwner owner;
  owner.peer = worker.peer;
  owner.name = rank.Name();
  owner.writable = !rank.is_producer();
  owner.wanted_mode = asked.private_mode;
  if (!rank.memory->addressable()) {
    rank.buckets = std::make_shared<BucketChannel>(
        owner.name, next_channel_++,
        [&host = host_, connection = worker.connection](
            wire::MessageType type, std::uint64_t request, std::vector<std::byte> body,
            std::vector<UniqueFd> fds) {
          host.SendToWorker(connection, type, request, std::move(body), std::move(fds));
        },
        options_.private_memory.bucket_patience);
    owner.channel = rank.buckets;
  }
  pool_.Submit([this, alive = alive_, connection = worker.connection, announced = rank.memory,
                identity = rank.identity, owner, plant = options_.private_memory,
                &executor = executor_, job = std::make_shared<wire::Register>(std::move(asked))] {
    auto checked = std::make_shared<Result<CheckedRegistration>>(
        CheckRegistration(identity, std::move(*job), *announced));
    if (checked->ok() && !announced->addressable()) {
      Result<std::shared_ptr<const MemoryAccess>> memory =
          OpenPrivateMemory(plant, owner, *announced, (*checked)->pieces);
      if (memory.ok()) {
        (*checked)->memory = *std::move(memory);
      } else {
        *checked = memory.status();
      }
    }
    executor.Post([this, alive, connection, checked] {
      if (*alive) RegistrationChecked(connection, std::move(*checked));
    });
  });
}

void WorkerDesk::RegistrationChecked(ConnectionId connection, Result<CheckedRegistration> checked) {
  Worker* const worker = Find(connection);
  if (worker == nullptr || worker->closing) return;  // it has left: nobody would take it back
  Rank& rank = *worker->rank;
  if (!checked.ok()) {
    return AnswerRegistered(*worker, checked.status().Annotate(rank.Name()), {});
  }
  worker->register_limit = executor_.Now() + options_.register_wait;
  const auto held = rank.publishes.find(rank.published);
  if (held == rank.publishes.end() || !held->second.receipts) {
    return JoinDaemon(*worker, *std::move(checked));
  }
  MakeReceiptsAgain(*worker, *std::move(checked));
}

// The receipts that were made at publish went with the agent that made them.
void WorkerDesk::MakeReceiptsAgain(Worker& worker, CheckedRegistration checked) {
  const auto kept = std::make_shared<CheckedRegistration>(std::move(checked));
  // Another registration, after this one failed, has other memory.
  const auto still = [announced = worker.rank->memory](const Worker& at) {
    return !at.closing && at.rank->memory == announced && at.rank->pieces == nullptr;
  };
  executor_.PostAt(
      worker.register_limit, IfThere(worker.connection, [this, still](Worker& at) {
        if (!still(at)) return;
        const Status late(
            Code::kDeadlineExceeded,
            fmt::format("the receipts of version {} of {} were not made in {:.1f} s",
                        at.rank->published.value, at.rank->Name(), Seconds(options_.register_wait)),
            Reason::kBusy);
        AnswerRegistered(at, late, {});
      }));
  DigestPieces({pool_, executor_}, kept->pieces,
               kept->memory != nullptr ? kept->memory : worker.rank->memory,
               [this, alive = alive_, connection = worker.connection, kept,
                still](Result<std::vector<DigestSum>> sums) {
                 if (!*alive) return;
                 IfThere(connection, [this, kept, still, &sums](Worker& at) {
                   if (!still(at)) return;
                   if (!sums.ok()) {
                     return AnswerRegistered(at, sums.status().Annotate("receipts"), {});
                   }
                   at.rank->receipts[at.rank->published].pieces = *std::move(sums);
                   JoinDaemon(at, std::move(*kept));
                 })();
               });
}

void WorkerDesk::JoinDaemon(Worker& worker, CheckedRegistration checked) {
  Rank& rank = *worker.rank;
  rank.pieces = std::move(checked.pieces);
  if (checked.memory != nullptr) rank.memory = std::move(checked.memory);
  rank.shadow = std::move(checked.shadow);
  rank.layout = std::move(checked.layout);
  worker.register_seconds = checked.register_seconds;
  worker.prefault_seconds = checked.prefault_seconds;
  AwaitRegistered(worker);
  if (host_.daemon_ready()) RegisterAtDaemon(worker);
}

// A daemon that is not there is soon given up; one that is may take its time.
void WorkerDesk::AwaitRegistered(Worker& worker) {
  worker.register_deadline =
      std::min(executor_.Now() + options_.daemon_wait, worker.register_limit);
  executor_.PostAt(worker.register_deadline, IfThere(worker.connection, [this](Worker& at) {
                     if (at.register_request == 0 || executor_.Now() < at.register_deadline) return;
                     if (host_.daemon_ready() && executor_.Now() < at.register_limit) {
                       return AwaitRegistered(at);
                     }
                     GiveUpRegistering(at);
                   }));
}

void WorkerDesk::GiveUpRegistering(Worker& worker) {
  if (!host_.daemon_ready()) return AnswerRegistered(worker, host_.no_daemon(), {});
  const Status late(Code::kDeadlineExceeded,
                    fmt::format("the daemon has not answered the registration of {} in {:.1f} s",
                                worker.rank->Name(), Seconds(options_.register_wait)),
                    Reason::kBusy);
  LeaveAtDaemon(*worker.rank, false, late.message());
  AnswerRegistered(worker, late, {});
}

void WorkerDesk::LeaveAtDaemon(const Rank& rank, bool on_purpose, const std::string& why,
                               bool returns) {
  proto::AgentMessage message;
  *message.mutable_leave_rank()->mutable_rank() = rpc::ToProto(rank.identity);
  message.mutable_leave_rank()->set_returns(returns);
  message.mutable_leave_rank()->set_on_purpose(on_purpose);
  message.mutable_leave_rank()->set_why(why);
  host_.SendToDaemon(std::move(message));
}

// After a question was given up that the daemon may still answer: whatever it takes this rank for
// then, it hears next that the rank left and came back as what it is.
void WorkerDesk::RegisterAnew(Worker& worker, const std::string& why) {
  if (!host_.daemon_ready()) return;  // it will be said when the daemon is back
  worker.rank->registered = false;
  LeaveAtDaemon(*worker.rank, false, why, /*returns=*/true);
  RegisterAtDaemon(worker);
}

void WorkerDesk::RegisterAtDaemon(Worker& worker) {
  const Rank& rank = *worker.rank;
  worker.daemon_register_request = next_request_++;
  proto::AgentMessage message;
  proto::RegisterRank& out = *message.mutable_register_rank();
  out.set_request(worker.daemon_register_request);
  *out.mutable_rank() = rpc::ToProto(rank.identity);
  out.set_layout(rank.layout);
  out.set_flip(static_cast<std::uint32_t>(rank.flip));
  out.set_proof(static_cast<std::uint32_t>(rank.proof));
  out.set_memory_mode(static_cast<std::uint32_t>(rank.memory->mode()));
  for (const std::string& name : rank.leave_out) out.add_leave_out(name);
  out.set_known_epoch(rank.epoch.value);
  out.set_seen_epoch(host_.epochs().Highest(rank.identity.channel).value);
  out.set_live_version(rank.is_producer() ? rank.published.value : rank.live_version.value);
  out.set_dirty(rank.dirty);
  out.set_pid(static_cast<std::uint32_t>(worker.peer.pid));
  const bool publishing = worker.publish.has_value() && worker.publish->sent;
  out.set_publishing((publishing ? worker.publish->publish.version : rank.unanswered).value);
  for (const auto& [version, publish] : rank.publishes) {
    if (!rank.snapshots.contains(version) && !rank.holds_published()) continue;
    proto::HeldVersion& held = *out.add_held();
    held.set_version(version.value);
    held.set_policy(static_cast<std::uint32_t>(publish.policy));
    held.set_min_replicas(publish.min_replicas);
    held.set_keep_last(publish.keep_last);
  }
  host_.SendToDaemon(std::move(message));
}

void WorkerDesk::OnRankRegistered(const proto::RankRegistered& message) {
  for (const auto& [id, worker] : workers_) {
    if (worker->daemon_register_request != message.request()) continue;
    worker->daemon_register_request = 0;
    const Status status = rpc::FromProto(message.error());
    const JoinedChannel joined{.epoch = ChannelEpoch{message.channel_epoch()},
                               .latest_version = Version{message.latest_version()}};
    if (worker->register_request != 0) return AnswerRegistered(*worker, status, joined);
    Rank& rank = *worker->rank;
    if (!status.ok()) return BreakOff(*worker, status.Annotate("registering again"));
    rank.registered = true;
    rank.epoch = joined.epoch;
    // What was asked of a daemon that is gone is asked of this one.
    if (worker->update.has_value()) AskUpdate(*worker);
    for (const auto& [version, pending] : worker->releases) AskRelease(*worker, version, pending);
    const bool sent = worker->publish.has_value() && worker->publish->daemon_request != 0;
    if (sent) PublishAtDaemon(*worker);
    return;
  }
}

void WorkerDesk::AnswerRegistered(Worker& worker, const Status& status,
                                  const JoinedChannel& joined) {
  Rank& rank = *worker.rank;
  wire::Registered answer;
  answer.status = status;
  if (status.ok()) {
    rank.registered = true;
    rank.epoch = joined.epoch;
    answer.mode = rank.memory->mode();
    answer.why = rank.memory->why();
    answer.expected_gb_per_s = rank.memory->expected_gb_per_s();
    answer.epoch = joined.epoch;
    answer.latest_version = joined.latest_version;
    answer.register_seconds = worker.register_seconds;
    answer.prefault_seconds = worker.prefault_seconds;
    Log(LogLevel::kInfo, "rank_registered",
        {{"rank", rank.Name()},
         {"bytes", rank.pieces->piece_bytes()},
         {"epoch", joined.epoch.value},
         {"prefault_seconds", fmt::format("{:.3f}", worker.prefault_seconds)}});
  } else {
    Log(LogLevel::kWarn, "rank_refused", {{"rank", rank.Name()}, {"error", status}});
    rank.memory.reset();
    rank.shadow.reset();
    rank.pieces.reset();
    worker.daemon_register_request = 0;
  }
  rank.registering = false;
  Send(worker, wire::MessageType::kRegistered, std::exchange(worker.register_request, 0), answer);
}

}  // namespace tensorbus::agent
