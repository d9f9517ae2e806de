#include <fmt/format.h>

#include "agent/worker_desk.h"
#include "tensorbus/rpc/convert.h"

// What a worker's request waits for, said to a worker that is about to give up waiting. The request
// itself goes on.
namespace tensorbus::agent {
namespace {

Status Waits(std::string what) {
  return {Code::kDeadlineExceeded, std::move(what), Reason::kBusy};
}

}  // namespace

void WorkerDesk::OnExplain(Worker& worker, const wire::Frame& frame) {
  const bool at_daemon = AsksDaemon(worker, frame.request);
  if (at_daemon && host_.daemon_ready() && worker.rank->registered) {
    if (!worker.explaining.insert(frame.request).second) return;
    proto::AgentMessage message;
    proto::ExplainWait& out = *message.mutable_explain_wait();
    out.set_request(frame.request);
    *out.mutable_rank() = rpc::ToProto(worker.rank->identity);
    for (const auto& [version, pending] : worker.releases) {
      if (pending.worker_request == frame.request) out.set_version(version.value);
    }
    return host_.SendToDaemon(std::move(message));
  }
  Explained(worker, frame.request,
            at_daemon ? NotAtDaemon(worker) : OwnWork(worker, frame.request));
}

// Whether only the daemon can say what is missing.
bool WorkerDesk::AsksDaemon(const Worker& worker, std::uint64_t request) const {
  if (worker.update.has_value() && worker.update->worker_request == request) {
    return !worker.update->failure.has_value();
  }
  for (const auto& [version, pending] : worker.releases) {
    if (pending.worker_request == request) return true;
  }
  return false;
}

Status WorkerDesk::NotAtDaemon(const Worker& worker) const {
  if (!host_.daemon_ready()) return host_.no_daemon();
  return Waits(fmt::format("{} is being registered with the daemon again", worker.rank->Name()));
}

/// What this agent is still busy with, or what the daemon owes without a choice.
Status WorkerDesk::OwnWork(const Worker& worker, std::uint64_t request) const {
  const std::string name = worker.rank->Name();
  if (worker.update.has_value() && worker.update->worker_request == request) {
    return Waits(
        fmt::format("the update of {} failed ({}), and the session that writes to it has "
                    "not ended yet",
                    name, worker.update->failure->message()));
  }
  const bool registers = worker.register_request == request && request != 0;
  const bool publishes = worker.publish.has_value() && worker.publish->worker_request == request;
  const bool claims = worker.claim.has_value() && worker.claim->worker_request == request;
  if (publishes && worker.publish->daemon_request == 0) {
    return Waits(fmt::format("version {} of {} is being {}", worker.publish->publish.version.value,
                             name,
                             worker.publish->publish.policy == wire::SlowConsumer::kSnapshot
                                 ? "copied into a snapshot"
                                 : "digested for its receipts"));
  }
  if ((registers || publishes || claims) && !host_.daemon_ready()) return host_.no_daemon();
  if (registers) {
    return Waits(
        fmt::format("the layout of {} is being checked, and compared where there is "
                    "something to compare it with",
                    name));
  }
  if (publishes) return Waits(fmt::format("the daemon has not accepted the publish of {}", name));
  if (claims) return Waits(fmt::format("the memory of {} is being digested and compared", name));
  return Waits(fmt::format("{} waits for nothing under number {}", name, request));
}

void WorkerDesk::OnWaitExplained(std::uint64_t request, const RankKey& key, const Status& why) {
  Worker* const worker = Find(key);
  if (worker == nullptr || worker->explaining.erase(request) == 0) return;
  Explained(*worker, request, why);
}

void WorkerDesk::Explained(const Worker& worker, std::uint64_t request, const Status& why) {
  wire::Reply answer;
  answer.status = why;
  Send(worker, wire::MessageType::kExplained, request, answer);
}

}  // namespace tensorbus::agent
