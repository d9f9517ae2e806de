#include "agent/worker_desk.h"

#include <fmt/format.h>

#include "agent/worker_desk_internal.h"
#include "tensorbus/base/log.h"
#include "tensorbus/rpc/convert.h"

// A worker's way in and out: Hello, which desk serves a frame, leaving.
namespace tensorbus::agent {
namespace {

/// How often, and how long apart, a rank's new process waits for the kernel to tell us that the old
/// one is gone.
constexpr int kHelloAttempts = 20;
constexpr Nanos kHelloRetry = std::chrono::milliseconds(50);

Status CheckIdentity(const RankIdentity& identity) {
  TB_RETURN_IF_ERROR(rpc::CheckName("the channel's name", identity.channel));
  TB_RETURN_IF_ERROR(rpc::CheckName("the job's name", identity.job));
  const char* fault = nullptr;
  if (identity.rank_count == 0 || identity.rank_count > kMaxRanks) {
    fault = "the number of ranks is out of range";
  } else if (identity.rank >= identity.rank_count) {
    fault = "the rank is not below the number of ranks";
  } else if (identity.role == Role::kProducer && identity.replica != 0) {
    fault = "a producer has no replicas";
  }
  if (fault == nullptr) return {};
  return {Code::kInvalidArgument, fmt::format("{}: {}", identity.ToString(), fault),
          Reason::kMalformed};
}

}  // namespace

WorkerDesk::WorkerDesk(Options options, Executor& executor, WorkPool& pool, DeskHost& host)
    : options_(std::move(options)),
      executor_(executor),
      pool_(pool),
      host_(host),
      alive_(std::make_shared<bool>(true)) {}

WorkerDesk::~WorkerDesk() {
  *alive_ = false;
}

void WorkerDesk::OnOpen(ConnectionId connection, PeerProcess peer) {
  auto worker = std::make_unique<Worker>();
  worker->connection = connection;
  worker->peer = peer;
  workers_.emplace(connection.value, std::move(worker));
}

void WorkerDesk::OnFrame(ConnectionId connection, wire::Frame frame) {
  Worker* const worker = Find(connection);
  if (worker == nullptr || worker->closing) return;
  using wire::MessageType;
  if (worker->rank == nullptr && frame.type != MessageType::kHello) {
    return BreakOff(*worker, Status(Code::kInvalidArgument, "the first message must be a hello",
                                    Reason::kMalformed));
  }
  switch (frame.type) {
    case MessageType::kHello:
      return OnHello(*worker, std::move(frame), 0);
    case MessageType::kAttachSegment:
      return OnAttach(*worker, std::move(frame));
    case MessageType::kRegister:
      return OnRegister(*worker, std::move(frame));
    case MessageType::kPublish:
      return OnPublish(*worker, std::move(frame));
    case MessageType::kRequestRelease:
      return OnRequestRelease(*worker, std::move(frame));
    case MessageType::kUpdate:
      return OnUpdate(*worker, std::move(frame));
    case MessageType::kCancelUpdate:
      return OnCancelUpdate(*worker, frame);
    case MessageType::kHookDone:
      return OnHookDone(*worker, frame);
    case MessageType::kBucketDone:
      return OnBucketDone(*worker, frame);
    case MessageType::kClaim:
      return OnClaim(*worker, frame);
    case MessageType::kExplain:
      return OnExplain(*worker, frame);
    case MessageType::kGoodbye:
      Leave(*worker, true, "left on purpose");
      worker->closing = true;
      return host_.CloseWorker(connection, "left on purpose");
    case MessageType::kPing:
      return host_.SendToWorker(connection, MessageType::kPong, frame.request, {});
    default:
      return BreakOff(*worker, Status(Code::kInvalidArgument,
                                      fmt::format("message type {} is not for an agent",
                                                  static_cast<int>(frame.type)),
                                      Reason::kMalformed));
  }
}

void WorkerDesk::OnClosed(ConnectionId connection, const std::string& why) {
  Worker* const worker = Find(connection);
  if (worker == nullptr) return;
  Leave(*worker, false, why);
  workers_.erase(connection.value);
}

// ---- hello

void WorkerDesk::OnHello(Worker& worker, wire::Frame frame, int attempt) {
  if (worker.rank != nullptr) {
    return BreakOff(worker, Status(Code::kInvalidArgument, "a second hello", Reason::kMalformed));
  }
  const auto hello = Parse<wire::Hello>(worker, frame);
  if (!hello.has_value()) return;
  const bool right_protocol = hello->protocol == wire::kProtocol;
  if (right_protocol && by_key_.contains(RankKey::Of(hello->identity)) &&
      attempt < kHelloAttempts) {
    // A restarted worker can be faster than the news of its predecessor's death.
    auto kept = std::make_shared<wire::Frame>(std::move(frame));
    executor_.PostAfter(kHelloRetry, IfThere(worker.connection, [this, kept, attempt](Worker& at) {
                          OnHello(at, std::move(*kept), attempt + 1);
                        }));
    return;
  }
  wire::Welcome welcome;
  welcome.status = AcceptHello(worker, *hello, frame);
  welcome.agent = options_.agent_name;
  welcome.staging_bytes = options_.staging_bytes;
  Send(worker, wire::MessageType::kWelcome, frame.request, welcome);
  if (welcome.status.ok()) return;
  Log(LogLevel::kWarn, "worker_refused", {{"pid", worker.peer.pid}, {"error", welcome.status}});
  worker.closing = true;
  host_.CloseWorker(worker.connection, welcome.status.message());
}

Status WorkerDesk::AcceptHello(Worker& worker, const wire::Hello& hello, const wire::Frame& frame) {
  if (hello.protocol != wire::kProtocol) {
    return {Code::kFailedPrecondition,
            fmt::format("the worker library speaks protocol {}, this agent {}; install the same "
                        "version of tensorbus on both sides",
                        hello.protocol, wire::kProtocol),
            Reason::kProtocolVersion};
  }
  TB_RETURN_IF_ERROR(CheckIdentity(hello.identity));
  const RankKey key = RankKey::Of(hello.identity);
  if (const auto held = by_key_.find(key); held != by_key_.end()) {
    return {Code::kAlreadyExists, fmt::format("{} is process {} already", hello.identity.ToString(),
                                              workers_.at(held->second.value)->peer.pid)};
  }
  if (frame.fds.size() != 1) {
    return {Code::kInvalidArgument, "a hello comes with one descriptor, the control page",
            Reason::kMalformed};
  }
  Result<Mapping> page =
      MapForeign(frame.fds.front().get(), wire::kControlPageBytes, Mapping::Access::kReadWrite);
  if (!page.ok()) return page.status().Annotate("control page");
  auto* const control = reinterpret_cast<wire::ControlPage*>(page->data());
  if (control->magic != wire::ControlPage::kMagic || control->protocol != wire::kProtocol) {
    return {Code::kInvalidArgument, "the control page is none", Reason::kMalformed};
  }
  auto rank = std::make_shared<Rank>();
  rank->identity = hello.identity;
  rank->connection = worker.connection;
  rank->peer = worker.peer;
  rank->page_mapping = std::make_shared<const Mapping>(*std::move(page));
  rank->page = control;
  worker.rank = std::move(rank);
  by_key_.emplace(key, worker.connection);
  Log(LogLevel::kInfo, "worker_connected",
      {{"rank", worker.rank->Name()}, {"pid", worker.peer.pid}, {"library", hello.library}});
  return {};
}

// ---- buckets

void WorkerDesk::OnBucketDone(Worker& worker, const wire::Frame& frame) {
  const auto done = Parse<wire::BucketDone>(worker, frame);
  if (!done.has_value() || worker.rank->buckets == nullptr) return;
  worker.rank->buckets->OnDone(frame.request, done->status);
}

void WorkerDesk::CloseBuckets(const Status& why) {
  for (const auto& [id, worker] : workers_) {
    if (worker->rank != nullptr && worker->rank->buckets != nullptr) {
      worker->rank->buckets->Close(why);
    }
  }
}

// ---- leaving

void WorkerDesk::Leave(Worker& worker, bool on_purpose, const std::string& why) {
  if (worker.rank == nullptr) return;
  const std::shared_ptr<Rank> rank = worker.rank;
  const RankKey key = RankKey::Of(rank->identity);
  const auto held = by_key_.find(key);
  if (held == by_key_.end() || held->second != worker.connection) return;
  by_key_.erase(held);
  for (auto& [version, pending] : worker.releases) executor_.CancelTimer(pending.timer);
  if (worker.update.has_value()) executor_.CancelTimer(worker.update->timer);
  if (worker.claim.has_value()) executor_.CancelTimer(worker.claim->timer);
  worker.releases.clear();
  worker.update.reset();
  worker.publish.reset();
  worker.claim.reset();
  const bool known = rank->registered || worker.daemon_register_request != 0;
  rank->registered = false;
  worker.daemon_register_request = 0;  // its answer would be about who left
  const Status gone(Code::kUnavailable, fmt::format("{} left: {}", rank->Name(), why),
                    Reason::kPeerLost);
  Log(on_purpose ? LogLevel::kInfo : LogLevel::kWarn, "rank_left",
      {{"rank", rank->Name()}, {"why", why}});
  if (known && host_.daemon_ready()) LeaveAtDaemon(*rank, on_purpose, why);
  if (rank->buckets != nullptr) rank->buckets->Close(gone);
  FailHooks(*rank, gone);
  host_.OnRankLeft(*rank, why);
}

// ---- the daemon comes and goes

void WorkerDesk::OnDaemonReady() {
  for (const auto& [id, worker] : workers_) {
    if (worker->closing || worker->rank == nullptr || worker->rank->pieces == nullptr) continue;
    RegisterAtDaemon(*worker);
  }
}

void WorkerDesk::OnDaemonLost(const Status& why) {
  for (const auto& [id, worker] : workers_) {
    worker->daemon_register_request = 0;
    if (worker->rank != nullptr) worker->rank->registered = false;
    if (worker->claim.has_value()) AnswerClaim(*worker, why, {});
    for (const std::uint64_t request : worker->explaining) Explained(*worker, request, why);
    worker->explaining.clear();
  }
}

std::shared_ptr<Rank> WorkerDesk::FindRank(const RankKey& key) const {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  const std::shared_ptr<Rank>& rank = workers_.at(found->second.value)->rank;
  return rank->pieces != nullptr ? rank : nullptr;
}

WorkerDesk::Worker* WorkerDesk::Find(ConnectionId connection) {
  const auto found = workers_.find(connection.value);
  return found == workers_.end() ? nullptr : found->second.get();
}

WorkerDesk::Worker* WorkerDesk::Find(const RankKey& key) {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : Find(found->second);
}

std::function<void()> WorkerDesk::IfThere(ConnectionId connection,
                                          std::function<void(Worker&)> task) {
  return [this, alive = alive_, connection, task = std::move(task)] {
    if (!*alive) return;
    if (Worker* const worker = Find(connection)) task(*worker);
  };
}

Status WorkerDesk::CheckRegistered(const Worker& worker) const {
  if (worker.rank->pieces != nullptr && !worker.rank->registering) return {};
  return {Code::kFailedPrecondition, fmt::format("{} has not registered", worker.rank->Name())};
}

void WorkerDesk::Reply(const Worker& worker, std::uint64_t request, const Status& status) {
  if (request == 0) return;
  wire::Reply reply;
  reply.status = status;
  Send(worker, wire::MessageType::kReply, request, reply);
}

void WorkerDesk::BreakOff(Worker& worker, const Status& why) {
  Log(LogLevel::kWarn, "worker_broken_off", {{"pid", worker.peer.pid}, {"error", why}});
  Leave(worker, false, why.message());
  worker.closing = true;
  LastFrame last = MakeLastFrame(worker.rank == nullptr, why);
  host_.SendToWorker(worker.connection, last.type, 0, std::move(last.body));
  host_.CloseWorker(worker.connection, why.message());
}

}  // namespace tensorbus::agent
