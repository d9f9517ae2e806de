#include "tensorbus/rpc/control_link.h"

#include <deque>
#include <fmt/format.h>
#include <grpcpp/support/client_callback.h>
#include <optional>
#include <utility>

#include "proto/tensorbus.grpc.pb.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/channel.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::rpc {

namespace {

/// The part of a link that gRPC's threads and the executor see. It outlives the link until gRPC has
/// let go of the stream; the executor is touched only while the link lives.
///
/// Threads: thread-safe. gRPC's reactions post to the executor and return; the user's callbacks run
/// there, with no lock held.
class Core final : public grpc::ClientBidiReactor<proto::AgentMessage, proto::DaemonMessage>,
                   public std::enable_shared_from_this<Core> {
 public:
  Core(Executor& executor, ControlLink::OnMessage on_message, ControlLink::OnLost on_lost)
      : executor_(executor), on_message_(std::move(on_message)), on_lost_(std::move(on_lost)) {}

  void Start(DaemonChannel channel, Nanos connect_timeout);
  void Lose(Status why);
  void Send(proto::AgentMessage message);
  void GetLayout(const Hash128& hash, Nanos timeout, ControlLink::OnLayout done);
  /// No callback starts after this; waits for one that runs on another thread.
  void Detach();

  void OnReadInitialMetadataDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  struct LayoutCall {
    grpc::ClientContext context;
    proto::GetLayoutRequest request;
    proto::GetLayoutReply reply;
    ControlLink::OnLayout done;
  };

  /// Posts `task` to the executor, to run there only while the link lives.
  void PostIfAttached(std::function<void()> task);
  void RunAttached(const std::function<void()>& task);
  void WriteNext() TB_REQUIRES(mutex_);
  void EndStream() TB_REQUIRES(mutex_);

  Executor& executor_;  // touched under mutex_ while attached_ only
  const ControlLink::OnMessage on_message_;
  const ControlLink::OnLost on_lost_;  // run on the executor

  DaemonChannel channel_;
  std::unique_ptr<proto::Control::Stub> stub_;
  grpc::ClientContext context_;
  proto::DaemonMessage incoming_;

  Mutex mutex_;
  CondVar idle_;
  bool attached_ TB_GUARDED_BY(mutex_) = true;
  bool in_callback_ TB_GUARDED_BY(mutex_) = false;
  bool open_ TB_GUARDED_BY(mutex_) = false;  // the stream takes writes
  bool connected_ TB_GUARDED_BY(mutex_) = false;
  bool lost_ TB_GUARDED_BY(mutex_) = false;
  std::optional<Status> verdict_ TB_GUARDED_BY(mutex_);  // why we ended the stream ourselves
  bool writing_ TB_GUARDED_BY(mutex_) = false;
  proto::AgentMessage outgoing_ TB_GUARDED_BY(mutex_);
  std::deque<proto::AgentMessage> queue_ TB_GUARDED_BY(mutex_);
  std::optional<Executor::TimerId> connect_timer_ TB_GUARDED_BY(mutex_);
  std::shared_ptr<Core> self_ TB_GUARDED_BY(mutex_);  // until OnDone
};

void Core::Start(DaemonChannel channel, Nanos connect_timeout) {
  channel_ = std::move(channel);
  stub_ = proto::Control::NewStub(channel_.channel);
  channel_.Equip(context_, Nanos::zero());
  MutexLock lock(mutex_);
  self_ = shared_from_this();
  open_ = true;
  stub_->async()->Attach(&context_, this);
  AddHold();  // writes start outside of reactions
  StartRead(&incoming_);
  StartCall();
  connect_timer_ = executor_.PostAfter(connect_timeout, [weak = weak_from_this()] {
    const auto core = weak.lock();
    if (core == nullptr) return;
    MutexLock inner(core->mutex_);
    core->connect_timer_.reset();
    if (core->connected_ || core->lost_) return;
    core->verdict_ = DiagnoseUnreachable(core->channel_.target, "it did not answer in time");
    core->EndStream();
  });
}

void Core::EndStream() {
  queue_.clear();
  if (!open_) return;
  open_ = false;
  context_.TryCancel();
  RemoveHold();
}

void Core::Lose(Status why) {
  PostIfAttached([this, why = std::move(why)] {
    {
      MutexLock lock(mutex_);
      if (std::exchange(lost_, true)) return;
    }
    on_lost_(why);
  });
}

void Core::Send(proto::AgentMessage message) {
  MutexLock lock(mutex_);
  if (!open_) return;
  if (queue_.size() >= kMaxQueuedMessages) {
    verdict_ = Status(Code::kResourceExhausted,
                      fmt::format("the daemon at {} does not keep up: {} messages wait",
                                  channel_.target, queue_.size()),
                      Reason::kBusy);
    EndStream();
    return;
  }
  queue_.push_back(std::move(message));
  WriteNext();
}

void Core::WriteNext() {
  if (writing_ || queue_.empty() || !open_) return;
  outgoing_ = std::move(queue_.front());
  queue_.pop_front();
  writing_ = true;
  StartWrite(&outgoing_);
}

void Core::OnReadInitialMetadataDone(bool ok) {
  MutexLock lock(mutex_);
  connected_ = connected_ || ok;
}

void Core::OnReadDone(bool ok) {
  if (!ok) {
    MutexLock lock(mutex_);
    queue_.clear();
    if (std::exchange(open_, false)) RemoveHold();
    return;
  }
  {
    MutexLock lock(mutex_);
    connected_ = true;
  }
  // One message at a time is on its way to the executor: a fast daemon waits in TCP's buffers.
  PostIfAttached([this] {
    {
      MutexLock lock(mutex_);
      if (lost_) return;
    }
    on_message_(incoming_);
    MutexLock lock(mutex_);
    if (open_) StartRead(&incoming_);
  });
}

void Core::OnWriteDone(bool ok) {
  MutexLock lock(mutex_);
  writing_ = false;
  if (ok) WriteNext();
}

void Core::OnDone(const grpc::Status& status) {
  std::shared_ptr<Core> self;  // dies last
  Status why;
  {
    MutexLock lock(mutex_);
    self = std::move(self_);
    open_ = false;
    if (connect_timer_ && attached_) executor_.CancelTimer(*connect_timer_);
    connect_timer_.reset();
    if (verdict_) {
      why = *verdict_;
    } else if (status.ok()) {
      why = Status(Code::kUnavailable, "the daemon at " + channel_.target + " ended the connection",
                   Reason::kPeerLost);
    } else if (status.error_code() == grpc::StatusCode::UNAVAILABLE && connected_) {
      why = Status(
          Code::kUnavailable,
          fmt::format("lost the daemon at {}: it ended, or the way to it is cut", channel_.target),
          Reason::kPeerLost);
    } else {
      why = channel_.FailureOf(status);
    }
  }
  Lose(std::move(why));
}

void Core::GetLayout(const Hash128& hash, Nanos timeout, ControlLink::OnLayout done) {
  auto call = std::make_shared<LayoutCall>();
  *call->request.mutable_hash() = ToProto(hash);
  call->done = std::move(done);
  channel_.Equip(call->context, timeout);
  if (stub_ == nullptr) {
    PostIfAttached([call] {
      call->done(Status(Code::kUnavailable, "no connection to the daemon", Reason::kNotRunning));
    });
    return;
  }
  stub_->async()->GetLayout(&call->context, &call->request, &call->reply,
                            [self = shared_from_this(), call](const grpc::Status& status) {
                              self->PostIfAttached([self, call, status] {
                                if (!status.ok())
                                  return call->done(self->channel_.FailureOf(status));
                                const auto bytes = BytesOf(call->reply.layout());
                                call->done(std::vector<std::byte>(bytes.begin(), bytes.end()));
                              });
                            });
}

void Core::PostIfAttached(std::function<void()> task) {
  MutexLock lock(mutex_);
  if (!attached_) return;
  executor_.Post([self = shared_from_this(), task = std::move(task)] { self->RunAttached(task); });
}

void Core::RunAttached(const std::function<void()>& task) {
  {
    MutexLock lock(mutex_);
    if (!attached_) return;
    in_callback_ = true;
  }
  task();
  MutexLock lock(mutex_);
  in_callback_ = false;
  idle_.NotifyAll();
}

void Core::Detach() {
  MutexLock lock(mutex_);
  if (connect_timer_) executor_.CancelTimer(*connect_timer_);
  connect_timer_.reset();
  const bool inside = executor_.RunningHere();
  attached_ = false;
  EndStream();
  while (in_callback_ && !inside) idle_.Wait(mutex_);
}

/// Where cores die. A core may let go of its last channel, and with it of gRPC's callback threads,
/// which gRPC joins then and there: on one of these threads that would be a thread joining itself.
/// Never destroyed, so that it is there for whatever ends last.
Executor& Reaper() {
  static auto* const reaper = new ThreadExecutor("tb-reaper");
  return *reaper;
}

std::shared_ptr<Core> MakeCore(Executor& executor, ControlLink::OnMessage on_message,
                               ControlLink::OnLost on_lost) {
  auto core = std::make_unique<Core>(executor, std::move(on_message), std::move(on_lost));
  return {core.release(),
          [](Core* dead) { Reaper().Post([dead] { std::unique_ptr<Core>(dead).reset(); }); }};
}

class GrpcControlLink final : public ControlLink {
 public:
  explicit GrpcControlLink(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  GrpcControlLink(const GrpcControlLink&) = delete;
  GrpcControlLink& operator=(const GrpcControlLink&) = delete;
  ~GrpcControlLink() override { core_->Detach(); }

  void Send(proto::AgentMessage message) override { core_->Send(std::move(message)); }
  void GetLayout(const Hash128& hash, Nanos timeout, OnLayout done) override {
    core_->GetLayout(hash, timeout, std::move(done));
  }

 private:
  const std::shared_ptr<Core> core_;
};

}  // namespace

std::unique_ptr<ControlLink> OpenControlLink(const DaemonAddress& address, Executor& executor,
                                             Nanos connect_timeout,
                                             ControlLink::OnMessage on_message,
                                             ControlLink::OnLost on_lost) {
  auto core = MakeCore(executor, std::move(on_message), std::move(on_lost));
  auto link = std::make_unique<GrpcControlLink>(core);
  Result<DaemonChannel> channel = OpenChannel(address);
  if (channel.ok()) {
    core->Start(std::move(channel).value(), connect_timeout);
  } else {
    core->Lose(channel.status());
  }
  return link;
}

}  // namespace tensorbus::rpc
