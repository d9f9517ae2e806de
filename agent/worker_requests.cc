#include <algorithm>
#include <fmt/format.h>

#include "agent/piece_work.h"
#include "agent/receipts.h"
#include "agent/session.h"
#include "agent/tensor_digests.h"
#include "agent/worker_desk.h"
#include "agent/worker_desk_internal.h"
#include "tensorbus/base/log.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

// What a registered worker asks: publish, release, update, claim; and the hooks it is asked to run.
namespace tensorbus::agent {
namespace {

/// Longest a worker may ask to wait; also what 0 (no deadline of its own) means.
constexpr std::uint64_t kTimeoutMsMax = 7ULL * 24 * 3600 * 1000;
/// Snapshots beyond what the publisher asked to keep, while sessions that read them end.
constexpr std::size_t kExtraSnapshots = 4;
constexpr std::size_t kReleasesMax = 16;

Nanos TimeoutOf(std::uint64_t timeout_ms) {
  const std::uint64_t bounded =
      timeout_ms == 0 ? kTimeoutMsMax : std::min(timeout_ms, kTimeoutMsMax);
  return std::chrono::milliseconds(bounded);
}

std::uint64_t MillisecondsUntil(TimePoint deadline, TimePoint now) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - now).count();
  return static_cast<std::uint64_t>(std::max<std::int64_t>(1, left));
}

Status WrittenMeanwhile(const Rank& rank) {
  return {Code::kAborted, rank.Name() + " was brought a version while it was digested; claim again",
          Reason::kBusy};
}

std::string_view HookName(wire::MessageType hook) {
  switch (hook) {
    case wire::MessageType::kFence:
      return "fence";
    case wire::MessageType::kFlipBegin:
      return "flip begin";
    default:
      return "live";
  }
}

}  // namespace

// ---- publish

void WorkerDesk::OnPublish(Worker& worker, wire::Frame frame) {
  const auto publish = Parse<wire::Publish>(worker, frame);
  if (!publish.has_value()) return;
  Rank& rank = *worker.rank;
  Status refused = CheckRegistered(worker);
  if (refused.ok() && !rank.is_producer()) {
    refused = Status(Code::kFailedPrecondition,
                     fmt::format("{} is a consumer and cannot publish", rank.Name()));
  }
  if (refused.ok() && worker.publish.has_value()) {
    refused = Status(Code::kFailedPrecondition,
                     fmt::format("{} is publishing version {} still", rank.Name(),
                                 worker.publish->publish.version.value),
                     Reason::kBusy);
  }
  if (refused.ok() && publish->version <= rank.published) {
    refused = Status(Code::kFailedPrecondition,
                     fmt::format("{} published version {} already; version {} is not newer",
                                 rank.Name(), rank.published.value, publish->version.value),
                     Reason::kStaleVersion);
  }
  if (!refused.ok()) return Reply(worker, frame.request, refused);
  PendingPublish pending;
  pending.worker_request = frame.request;
  pending.publish = *publish;
  pending.write_count = rank.write_count();
  worker.publish = std::move(pending);
  if (publish->policy == wire::SlowConsumer::kSnapshot) return MakeSnapshot(worker);
  MakeReceipts(worker, rank.memory);
}

void WorkerDesk::MakeSnapshot(Worker& worker) {
  Rank& rank = *worker.rank;
  std::shared_ptr<const MemoryAccess> twin = std::exchange(rank.spare_snapshot, nullptr);
  if (twin == nullptr) {
    Result<std::shared_ptr<const MemoryAccess>> made =
        CreateTwin("tensorbus-snapshot", rank.memory->segment_bytes());
    if (!made.ok()) return AnswerPublish(worker, made.status().Annotate("snapshot"));
    twin = *std::move(made);
  }
  worker.publish->snapshot = twin;
  // Pages first, asked of the kernel: running out of them in the copy itself would be a SIGBUS.
  std::vector<WorkPool::Task> touch;
  auto touched = std::make_shared<Status>();
  touch.push_back([touched, twin, pieces = rank.pieces] {
    *touched = TouchPieces(pieces->registration(), *twin);
  });
  const PieceWork work{pool_, executor_};
  pool_.SubmitAll(
      std::move(touch), executor_,
      IfThere(worker.connection, [this, touched, twin, work](Worker& at) {
        if (!at.publish.has_value() || at.publish->snapshot != twin) return;
        if (!touched->ok()) return AnswerPublish(at, touched->Annotate("snapshot"));
        CopyPieces(work, at.rank->pieces, at.rank->memory, twin,
                   [this, alive = alive_, connection = at.connection, twin](const Status& copied) {
                     if (!*alive) return;
                     IfThere(connection, [this, twin, copied](Worker& there) {
                       if (!there.publish.has_value() || there.publish->snapshot != twin) return;
                       const Rank& writer = *there.rank;
                       if (writer.write_count() != there.publish->write_count) {
                         return AnswerPublish(
                             there,
                             WrittenDuringPublish(writer, there.publish->publish.version, ""));
                       }
                       if (!copied.ok()) return AnswerPublish(there, copied.Annotate("snapshot"));
                       MakeReceipts(there, twin);
                     })();
                   });
      }));
}

// For every plan this rank is bound to, the sums of what its routes will read; with none known yet,
// the sums of its pieces, which the first session checks before it makes the others.
void WorkerDesk::MakeReceipts(Worker& worker, std::shared_ptr<const MemoryAccess> memory) {
  Rank& rank = *worker.rank;
  if (!worker.publish->publish.receipts && !rank.wants_receipts) return PublishAtDaemon(worker);
  std::vector<PlanKey> keys;
  for (const auto& [key, routes] : rank.bound.entries()) keys.push_back(key);
  if (!keys.empty())
    return MakeRouteReceipts(worker.connection, std::move(memory), std::move(keys));
  const Version version = worker.publish->publish.version;
  DigestPieces({pool_, executor_}, rank.pieces, std::move(memory),
               [this, alive = alive_, connection = worker.connection,
                version](Result<std::vector<DigestSum>> sums) {
                 if (!*alive) return;
                 IfThere(connection, [this, version, &sums](Worker& at) {
                   if (!at.publish.has_value() || at.publish->publish.version != version) return;
                   if (!sums.ok()) return AnswerPublish(at, sums.status().Annotate("receipts"));
                   at.publish->receipts.pieces = *std::move(sums);
                   PublishAtDaemon(at);
                 })();
               });
}

void WorkerDesk::MakeRouteReceipts(ConnectionId connection,
                                   std::shared_ptr<const MemoryAccess> memory,
                                   std::vector<PlanKey> keys) {
  Worker* const worker = Find(connection);
  if (worker == nullptr || !worker->publish.has_value()) return;
  if (keys.empty()) return PublishAtDaemon(*worker);
  const PlanKey key = keys.back();
  keys.pop_back();
  const std::shared_ptr<const BoundRoutes> routes = worker->rank->bound.Find(key);
  if (routes == nullptr) return MakeRouteReceipts(connection, std::move(memory), std::move(keys));
  const Version version = worker->publish->publish.version;
  MakeRouteSums(
      {pool_, executor_}, routes, memory,
      [this, alive = alive_, connection, memory, keys, key, version](Result<RouteSums> sums) {
        if (!*alive) return;
        Worker* const at = Find(connection);
        if (at == nullptr || !at->publish.has_value()) return;
        if (at->publish->publish.version != version) return;
        if (!sums.ok()) return AnswerPublish(*at, sums.status().Annotate("receipts"));
        at->publish->receipts.routes[key] = *std::move(sums);
        MakeRouteReceipts(connection, memory, keys);
      });
}

void WorkerDesk::PublishAtDaemon(Worker& worker) {
  PendingPublish& pending = *worker.publish;
  if (pending.daemon_request == 0) {
    pending.limit = executor_.Now() + options_.publish_wait;
    AwaitAccepted(worker);
  }
  pending.daemon_request = next_request_++;
  if (!host_.daemon_ready() || !worker.rank->registered) return;  // sent when it is there again
  pending.sent = true;
  proto::AgentMessage message;
  proto::Publish& out = *message.mutable_publish();
  out.set_request(pending.daemon_request);
  *out.mutable_rank() = rpc::ToProto(worker.rank->identity);
  out.set_version(pending.publish.version.value);
  out.set_policy(static_cast<std::uint32_t>(pending.publish.policy));
  out.set_min_replicas(pending.publish.min_replicas);
  out.set_keep_last(pending.publish.keep_last);
  out.set_snapshot_made(pending.snapshot != nullptr);
  host_.SendToDaemon(std::move(message));
}

// As with a registration: a daemon that is not there is soon given up, and one that is there
// answers. Without one the failure is true: a daemon that is gone, or has lost us, serves no
// version of ours.
void WorkerDesk::AwaitAccepted(Worker& worker) {
  PendingPublish& pending = *worker.publish;
  pending.deadline = std::min(executor_.Now() + options_.daemon_wait, pending.limit);
  executor_.PostAt(
      pending.deadline,
      IfThere(worker.connection, [this, version = pending.publish.version](Worker& at) {
        if (!at.publish.has_value() || at.publish->publish.version != version) return;
        if (executor_.Now() < at.publish->deadline) return;
        if (host_.daemon_ready() && executor_.Now() < at.publish->limit) return AwaitAccepted(at);
        GiveUpPublishing(at);
      }));
}

void WorkerDesk::GiveUpPublishing(Worker& worker) {
  if (!host_.daemon_ready()) return AnswerPublish(worker, NoDaemon());
  const Status late(Code::kDeadlineExceeded,
                    fmt::format("the daemon has not answered the publish of version {} by {} in "
                                "{:.1f} s",
                                worker.publish->publish.version.value, worker.rank->Name(),
                                Seconds(options_.publish_wait)),
                    Reason::kBusy);
  const bool sent = worker.publish->sent;
  if (sent) worker.rank->unanswered = worker.publish->publish.version;
  AnswerPublish(worker, late);
  if (sent) RegisterAnew(worker, late.message());
}

void WorkerDesk::OnPublishAccepted(const proto::PublishAccepted& message) {
  for (const auto& [id, worker] : workers_) {
    if (!worker->publish.has_value()) continue;
    if (worker->publish->daemon_request != message.request()) continue;
    return AnswerPublish(*worker, rpc::FromProto(message.error()));
  }
}

void WorkerDesk::AnswerPublish(Worker& worker, const Status& status) {
  PendingPublish pending = std::move(*worker.publish);
  worker.publish.reset();
  Rank& rank = *worker.rank;
  if (!status.ok()) {
    if (pending.snapshot != nullptr) rank.spare_snapshot = std::move(pending.snapshot);
    return Reply(worker, pending.worker_request, status);
  }
  const Version version = pending.publish.version;
  rank.published = version;
  rank.unanswered = {};
  rank.write_count_at_publish = pending.write_count;
  rank.publishes[version] = pending.publish;
  if (pending.snapshot != nullptr) {
    rank.snapshots[version] = std::move(pending.snapshot);
    while (rank.snapshots.size() > pending.publish.keep_last + kExtraSnapshots) {
      rank.snapshots.erase(rank.snapshots.begin());
    }
  }
  std::erase_if(rank.receipts,
                [&rank](const auto& entry) { return !rank.snapshots.contains(entry.first); });
  std::erase_if(rank.publishes, [&rank, version](const auto& entry) {
    return entry.first != version && !rank.snapshots.contains(entry.first);
  });
  if (!pending.receipts.routes.empty() || !pending.receipts.pieces.empty()) {
    rank.receipts[version] = std::move(pending.receipts);
  }
  Reply(worker, pending.worker_request, {});
  if (rank.snapshots.contains(version)) Released(worker, version);
}

void WorkerDesk::OnDropSnapshot(const RankKey& key, Version version) {
  Worker* const worker = Find(key);
  if (worker == nullptr) return;
  Rank& rank = *worker->rank;
  const auto found = rank.snapshots.find(version);
  if (found == rank.snapshots.end()) return;
  // Reused only when no session reads it any more.
  if (found->second.use_count() == 1) rank.spare_snapshot = found->second;
  rank.snapshots.erase(found);
  rank.publishes.erase(version);
  if (version != rank.published) rank.receipts.erase(version);
}

// ---- release

void WorkerDesk::OnRequestRelease(Worker& worker, wire::Frame frame) {
  const auto asked = Parse<wire::RequestRelease>(worker, frame);
  if (!asked.has_value()) return;
  wire::Released answer;
  answer.version = asked->version;
  answer.status = CheckRegistered(worker);
  if (answer.status.ok() && worker.releases.size() >= kReleasesMax) {
    answer.status =
        Status(Code::kResourceExhausted, "too many releases are asked for at once", Reason::kBusy);
  }
  const bool released =
      worker.rank->page->released_version.load(std::memory_order_relaxed) >= asked->version.value;
  if (!answer.status.ok() || released || worker.releases.contains(asked->version)) {
    if (answer.status.ok() && !released) {
      answer.status =
          Status(Code::kFailedPrecondition, "this release is asked for already", Reason::kBusy);
    }
    return Send(worker, wire::MessageType::kReleased, frame.request, answer);
  }
  PendingRelease pending;
  pending.worker_request = frame.request;
  pending.deadline = executor_.Now() + TimeoutOf(asked->timeout_ms);
  pending.timer = executor_.PostAt(
      pending.deadline + options_.deadline_grace,
      IfThere(worker.connection, [this, version = asked->version](Worker& at) {
        if (!at.releases.contains(version)) return;
        AnswerRelease(
            at, version,
            host_.daemon_ready()
                ? Status(Code::kDeadlineExceeded,
                         fmt::format("version {} was not released in time", version.value))
                : NoDaemon());
      }));
  worker.releases.emplace(asked->version, pending);
  AskRelease(worker, asked->version, pending);
}

void WorkerDesk::AskRelease(Worker& worker, Version version, const PendingRelease& pending) {
  if (!host_.daemon_ready() || !worker.rank->registered) return;
  proto::AgentMessage message;
  proto::RequestRelease& out = *message.mutable_request_release();
  *out.mutable_rank() = rpc::ToProto(worker.rank->identity);
  out.set_version(version.value);
  out.set_timeout_ms(MillisecondsUntil(pending.deadline, executor_.Now()));
  host_.SendToDaemon(std::move(message));
}

void WorkerDesk::OnVersionReleased(const RankKey& key, Version version, const Status& status) {
  Worker* const worker = Find(key);
  if (worker == nullptr) return;
  if (status.ok()) return Released(*worker, version);
  AnswerRelease(*worker, version, status);
}

// The worker may write again: says so in the page first, where it looks first.
void WorkerDesk::Released(Worker& worker, Version version) {
  std::atomic<std::uint64_t>& page = worker.rank->page->released_version;
  if (page.load(std::memory_order_relaxed) < version.value) {
    page.store(version.value, std::memory_order_release);
  }
  AnswerRelease(worker, version, {});
}

void WorkerDesk::AnswerRelease(Worker& worker, Version version, const Status& status) {
  wire::Released answer;
  answer.version = version;
  answer.status = status;
  std::uint64_t request = 0;
  if (const auto pending = worker.releases.find(version); pending != worker.releases.end()) {
    executor_.CancelTimer(pending->second.timer);
    request = pending->second.worker_request;
    worker.releases.erase(pending);
  }
  Send(worker, wire::MessageType::kReleased, request, answer);
}

// ---- update

void WorkerDesk::OnUpdate(Worker& worker, wire::Frame frame) {
  const auto update = Parse<wire::Update>(worker, frame);
  if (!update.has_value()) return;
  const Rank& rank = *worker.rank;
  wire::Updated refused;
  refused.version = rank.live_version;
  refused.status = CheckRegistered(worker);
  if (refused.status.ok() && rank.is_producer()) {
    refused.status = Status(Code::kFailedPrecondition,
                            fmt::format("{} is the producer and cannot update", rank.Name()));
  }
  if (refused.status.ok() && worker.update.has_value()) {
    refused.status =
        Status(Code::kFailedPrecondition,
               fmt::format("{} has asked for a version already", rank.Name()), Reason::kBusy);
  }
  if (!refused.status.ok()) {
    return Send(worker, wire::MessageType::kUpdated, frame.request, refused);
  }
  PendingUpdate pending;
  pending.worker_request = frame.request;
  pending.update = *update;
  pending.deadline = executor_.Now() + TimeoutOf(update->timeout_ms);
  pending.timer = executor_.PostAt(
      pending.deadline + options_.deadline_grace,
      IfThere(worker.connection, [this, request = frame.request](Worker& at) {
        if (!at.update.has_value() || at.update->worker_request != request) return;
        FailUpdate(at, host_.daemon_ready()
                           ? Status(Code::kDeadlineExceeded,
                                    fmt::format("no new version for {} in time", at.rank->Name()))
                           : NoDaemon());
      }));
  worker.update = pending;
  AskUpdate(worker);
}

void WorkerDesk::AskUpdate(Worker& worker) {
  PendingUpdate& pending = *worker.update;
  pending.daemon_request = next_request_++;
  if (!host_.daemon_ready() || !worker.rank->registered) return;
  proto::AgentMessage message;
  proto::RequestVersion& out = *message.mutable_request_version();
  out.set_request(pending.daemon_request);
  *out.mutable_rank() = rpc::ToProto(worker.rank->identity);
  out.set_selector(static_cast<std::uint32_t>(pending.update.selector));
  out.set_version(pending.update.version.value);
  out.set_timeout_ms(MillisecondsUntil(pending.deadline, executor_.Now()));
  host_.SendToDaemon(std::move(message));
}

void WorkerDesk::OnRequestFailed(std::uint64_t request, const RankKey& key, const Status& status,
                                 Version live) {
  Worker* const worker = Find(key);
  if (worker == nullptr || !worker->update.has_value()) return;
  // A request of 0 means whatever this rank asked for.
  if (request != 0 && worker->update->daemon_request != request) return;
  if (!status.ok()) return FailUpdate(*worker, status);
  // Nothing to do: what it asked for is what it has.
  wire::Updated updated;
  updated.version = live;
  AnswerUpdate(*worker, updated);
}

void WorkerDesk::FailUpdate(Worker& worker, const Status& why) {
  const Rank& rank = *worker.rank;
  if (rank.target_of.has_value()) {
    worker.update->failure = why;
    return;
  }
  wire::Updated updated;
  updated.status = rank.dirty ? DirtyStatus(rank, why) : why;
  updated.version = rank.live_version;
  AnswerUpdate(worker, updated);
}

void WorkerDesk::AnswerUpdate(Worker& worker, wire::Updated updated) {
  if (!worker.update.has_value()) return;
  executor_.CancelTimer(worker.update->timer);
  const std::uint64_t request = worker.update->worker_request;
  worker.update.reset();
  Send(worker, wire::MessageType::kUpdated, request, updated);
}

void WorkerDesk::OnCancelUpdate(Worker& worker, const wire::Frame& frame) {
  Reply(worker, frame.request, {});
  if (!worker.update.has_value()) return;
  // A session that is past its point of no return still ends with its own answer; the daemon
  // decides which it is. Without a daemon there is nothing to wait for.
  if (host_.daemon_ready() && worker.rank->registered) {
    proto::AgentMessage message;
    *message.mutable_cancel_request()->mutable_rank() = rpc::ToProto(worker.rank->identity);
    return host_.SendToDaemon(std::move(message));
  }
  FailUpdate(worker, Status(Code::kCancelled, "the update was cancelled", Reason::kCancelled));
}

void WorkerDesk::OnTargetFree(Rank& rank) {
  Worker* const worker = Find(rank.connection);
  if (worker == nullptr || worker->rank.get() != &rank || !worker->update.has_value()) return;
  if (const std::optional<Status> failure = worker->update->failure) FailUpdate(*worker, *failure);
}

void WorkerDesk::TellUpdated(Rank& rank, const wire::Updated& updated) {
  Worker* const worker = Find(rank.connection);
  if (worker != nullptr && worker->rank.get() == &rank) AnswerUpdate(*worker, updated);
}

// ---- claim

void WorkerDesk::OnClaim(Worker& worker, const wire::Frame& frame) {
  wire::Claimed refused;
  refused.status = CheckRegistered(worker);
  if (refused.status.ok() && worker.claim.has_value()) {
    refused.status = Status(Code::kFailedPrecondition, "a claim is under way", Reason::kBusy);
  }
  if (refused.status.ok() && worker.rank->target_of.has_value()) {
    refused.status = WrittenMeanwhile(*worker.rank);
  }
  if (refused.status.ok() && !host_.daemon_ready()) refused.status = NoDaemon();
  if (!refused.status.ok()) {
    return Send(worker, wire::MessageType::kClaimed, frame.request, refused);
  }
  const std::uint64_t request = next_request_++;
  worker.claim = PendingClaim{.worker_request = frame.request, .daemon_request = request};
  worker.claim->timer = executor_.PostAfter(
      options_.claim_wait, IfThere(worker.connection, [this, request](Worker& at) {
        if (!at.claim.has_value() || at.claim->daemon_request != request) return;
        const Status late(Code::kDeadlineExceeded,
                          fmt::format("the claim of {} was not answered in {:.1f} s",
                                      at.rank->Name(), Seconds(options_.claim_wait)),
                          Reason::kBusy);
        AnswerClaim(at, late, {});
        RegisterAnew(at, late.message());
      }));
  const std::shared_ptr<const PieceIndex> pieces = worker.rank->pieces;
  DigestPieces({pool_, executor_}, pieces, worker.rank->memory,
               [this, alive = alive_, connection = worker.connection, pieces, request,
                sessions = worker.rank->target_count](const Result<std::vector<DigestSum>>& sums) {
                 if (!*alive) return;
                 IfThere(connection, [this, &pieces, &sums, request, sessions](Worker& at) {
                   if (!at.claim.has_value() || at.claim->daemon_request != request) return;
                   if (!sums.ok()) return AnswerClaim(at, sums.status(), {});
                   if (at.rank->target_count != sessions) {
                     return AnswerClaim(at, WrittenMeanwhile(*at.rank), {});
                   }
                   proto::AgentMessage message;
                   proto::ClaimVersion& out = *message.mutable_claim_version();
                   out.set_request(request);
                   *out.mutable_rank() = rpc::ToProto(at.rank->identity);
                   AddTensorDigests(*pieces, *sums, out.mutable_tensors());
                   host_.SendToDaemon(std::move(message));
                 })();
               });
}

void WorkerDesk::OnClaimAnswered(const proto::ClaimAnswered& message) {
  for (const auto& [id, worker] : workers_) {
    if (!worker->claim.has_value()) continue;
    if (worker->claim->daemon_request != message.request()) continue;
    return AnswerClaim(*worker, rpc::FromProto(message.error()), Version{message.version()});
  }
}

void WorkerDesk::AnswerClaim(Worker& worker, const Status& status, Version version) {
  executor_.CancelTimer(worker.claim->timer);
  wire::Claimed answer;
  answer.status = status;
  answer.version = version;
  if (status.ok()) {
    worker.rank->live_version = version;
    worker.rank->dirty = false;
  } else if (status.reason() == Reason::kChecksumMismatch) {
    worker.rank->live_version = {};
  }
  worker.rank->page->live_version.store(worker.rank->live_version.value, std::memory_order_release);
  Send(worker, wire::MessageType::kClaimed, worker.claim->worker_request, answer);
  worker.claim.reset();
}

// ---- hooks

void WorkerDesk::CallHook(const std::shared_ptr<Rank>& rank, wire::MessageType hook,
                          wire::HookEvent event, Nanos timeout, std::function<void(Status)> done) {
  const std::uint64_t request = next_request_++;
  PendingHook pending;
  pending.rank = rank;
  pending.hook = hook;
  pending.done = std::move(done);
  pending.timer = executor_.PostAfter(timeout, [this, alive = alive_, request, timeout] {
    if (!*alive) return;
    const auto found = hooks_.find(request);
    if (found == hooks_.end()) return;
    const PendingHook late = std::move(found->second);
    hooks_.erase(found);
    late.done(Status(Code::kDeadlineExceeded,
                     fmt::format("{} did not answer its {} hook within {:.1f} s", late.rank->Name(),
                                 HookName(late.hook), Seconds(timeout)),
                     Reason::kMissingRank));
  });
  hooks_.emplace(request, std::move(pending));
  host_.SendToWorker(rank->connection, hook, request, wire::Encode(event));
}

void WorkerDesk::OnHookDone(Worker& worker, const wire::Frame& frame) {
  const auto answer = Parse<wire::HookDone>(worker, frame);
  if (!answer.has_value()) return;
  const auto found = hooks_.find(frame.request);
  // An answer that comes too late, or to a question of somebody else's, changes nothing.
  if (found == hooks_.end() || found->second.rank != worker.rank) return;
  const PendingHook hook = std::move(found->second);
  hooks_.erase(found);
  executor_.CancelTimer(hook.timer);
  hook.done(answer->status.ok() ? Status()
                                : answer->status.Annotate(fmt::format(
                                      "{} hook of {}", HookName(hook.hook), hook.rank->Name())));
}

void WorkerDesk::FailHooks(const Rank& rank, const Status& why) {
  std::vector<PendingHook> failed;
  for (auto it = hooks_.begin(); it != hooks_.end();) {
    if (it->second.rank.get() != &rank) {
      ++it;
      continue;
    }
    failed.push_back(std::move(it->second));
    it = hooks_.erase(it);
  }
  for (const PendingHook& hook : failed) {
    executor_.CancelTimer(hook.timer);
    hook.done(why);
  }
}

}  // namespace tensorbus::agent
