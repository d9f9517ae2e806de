#include <algorithm>
#include <fmt/format.h>

#include "agent/piece_work.h"
#include "agent/session.h"
#include "agent/tensor_digests.h"
#include "agent/worker_desk.h"
#include "agent/worker_desk_internal.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

// What a registered consumer asks: update and claim; and the hooks that it is asked to run.
namespace tensorbus::agent {
namespace {

/// Longest a worker may ask to wait; also what 0 (no deadline of its own) means.
constexpr std::uint64_t kWaitMsMax = 7ULL * 24 * 3600 * 1000;

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

Nanos TimeoutOf(std::uint64_t timeout_ms) {
  const std::uint64_t bounded = timeout_ms == 0 ? kWaitMsMax : std::min(timeout_ms, kWaitMsMax);
  return std::chrono::milliseconds(bounded);
}

std::uint64_t MillisecondsUntil(TimePoint deadline, TimePoint now) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - now).count();
  return static_cast<std::uint64_t>(std::max<std::int64_t>(1, left));
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
               fmt::format("{} has asked for a version already; wait for that request, or "
                           "cancel it first",
                           rank.Name()),
               Reason::kBusy);
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
                           : host_.no_daemon());
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
  if (refused.status.ok() && !host_.daemon_ready()) refused.status = host_.no_daemon();
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
