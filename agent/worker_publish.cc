#include <algorithm>
#include <fmt/format.h>

#include "agent/piece_work.h"
#include "agent/receipts.h"
#include "agent/session.h"
#include "agent/worker_desk.h"
#include "agent/worker_desk_internal.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

// What a registered producer asks: publish and release.
namespace tensorbus::agent {
namespace {

/// Snapshots beyond what the publisher asked to keep, while sessions that read them end.
constexpr std::size_t kExtraSnapshots = 4;
constexpr std::size_t kReleasesMax = 16;

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
  const bool sent = worker.publish->sent;
  if (sent) worker.rank->unanswered = worker.publish->publish.version;
  if (!host_.daemon_ready()) return AnswerPublish(worker, host_.no_daemon());
  const Status late(Code::kDeadlineExceeded,
                    fmt::format("the daemon has not answered the publish of version {} by {} in "
                                "{:.1f} s",
                                worker.publish->publish.version.value, worker.rank->Name(),
                                Seconds(options_.publish_wait)),
                    Reason::kBusy);
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
                : host_.no_daemon());
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

}  // namespace tensorbus::agent
