#include "tensorbus/rpc/server_services.h"

#include <deque>
#include <fmt/format.h>
#include <optional>
#include <utility>

#include "tensorbus/base/log.h"
#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/channel.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::rpc {

Status Gate::Check(const grpc::CallbackServerContext& context) const {
  if (context.peer().starts_with("fd:")) return {};
  if (tls) return {};
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kTokenKey);
  if (found == metadata.end()) {
    return {Code::kUnauthenticated,
            "this daemon asks for a shared token; give its file with --token-file"};
  }
  if (token.empty() || !EqualSecrets({found->second.data(), found->second.size()}, token)) {
    return {Code::kUnauthenticated, "the shared token is not this daemon's"};
  }
  return {};
}

/// One agent's stream. gRPC's threads post what comes; the daemon writes from its executor.
///
/// Shared by gRPC (through self_, until OnDone) and by the port handed to the daemon.
class ServerStream final
    : public grpc::ServerBidiReactor<proto::AgentMessage, proto::DaemonMessage>,
      public AgentPort,
      public std::enable_shared_from_this<ServerStream> {
 public:
  ServerStream(ControlService& service, PortId port) : service_(service), port_(port) {}

  void Start(const std::string& peer);
  void Send(proto::DaemonMessage message) override;
  void Close(Status status) override;

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  void WriteNext() TB_REQUIRES(mutex_);
  void End(Status status) TB_REQUIRES(mutex_);

  ControlService& service_;  // outlives all its streams: gRPC's shutdown waits for them
  const PortId port_;
  proto::AgentMessage incoming_;
  Mutex mutex_;
  bool finished_ TB_GUARDED_BY(mutex_) = false;  // Finish() was called
  bool writing_ TB_GUARDED_BY(mutex_) = false;
  std::optional<Status> closing_ TB_GUARDED_BY(mutex_);  // ends once the queue is written
  Status why_ TB_GUARDED_BY(mutex_);
  proto::DaemonMessage outgoing_ TB_GUARDED_BY(mutex_);
  std::deque<proto::DaemonMessage> queue_ TB_GUARDED_BY(mutex_);
  std::shared_ptr<ServerStream> self_ TB_GUARDED_BY(mutex_);
};

void ServerStream::Start(const std::string& peer) {
  {
    MutexLock lock(mutex_);
    self_ = shared_from_this();
  }
  service_.executor_.Post([self = shared_from_this(), peer] {
    self->service_.handler_.OnAttach(self->port_, self, peer);
  });
  StartSendInitialMetadata();
  StartRead(&incoming_);
}

void ServerStream::Send(proto::DaemonMessage message) {
  MutexLock lock(mutex_);
  if (finished_ || closing_) return;
  if (queue_.size() >= kMaxQueuedMessages) {
    End(Status(Code::kResourceExhausted,
               fmt::format("the agent does not keep up: {} messages wait", queue_.size()),
               Reason::kBusy));
    return;
  }
  queue_.push_back(std::move(message));
  WriteNext();
}

void ServerStream::Close(Status status) {
  MutexLock lock(mutex_);
  if (finished_ || closing_) return;
  closing_ = std::move(status);
  WriteNext();
}

void ServerStream::WriteNext() {
  if (writing_ || finished_) return;
  if (queue_.empty()) {
    if (closing_) End(*closing_);
    return;
  }
  outgoing_ = std::move(queue_.front());
  queue_.pop_front();
  writing_ = true;
  StartWrite(&outgoing_);
}

void ServerStream::End(Status status) {
  if (finished_) return;
  finished_ = true;
  queue_.clear();
  why_ = status;
  Finish(ToGrpc(status));
}

void ServerStream::OnReadDone(bool ok) {
  if (!ok) {
    MutexLock lock(mutex_);
    End({});
    return;
  }
  service_.executor_.Post([self = shared_from_this()] {
    self->service_.handler_.OnMessage(self->port_, self->incoming_);
    MutexLock lock(self->mutex_);
    if (!self->finished_) self->StartRead(&self->incoming_);
  });
}

void ServerStream::OnWriteDone(bool ok) {
  MutexLock lock(mutex_);
  writing_ = false;
  if (ok) {
    WriteNext();
  } else {
    End({});
  }
}

void ServerStream::OnCancel() {
  MutexLock lock(mutex_);
  End(Status(Code::kCancelled, "the connection broke", Reason::kPeerLost));
}

void ServerStream::OnDone() {
  std::shared_ptr<ServerStream> self;  // dies last
  Status why;
  {
    MutexLock lock(mutex_);
    self = std::move(self_);
    why = why_;
  }
  service_.Forget(port_);
  service_.executor_.Post(
      [&handler = service_.handler_, port = port_, why] { handler.OnDetach(port, why); });
}

namespace {

/// A call that is over before it began.
class RefusedStream final
    : public grpc::ServerBidiReactor<proto::AgentMessage, proto::DaemonMessage> {
 public:
  explicit RefusedStream(const Status& why) { Finish(ToGrpc(why)); }
  void OnDone() override { delete this; }
};

}  // namespace

grpc::ServerBidiReactor<proto::AgentMessage, proto::DaemonMessage>* ControlService::Attach(
    grpc::CallbackServerContext* context) {
  if (const Status status = gate_.Check(*context); !status.ok()) {
    Log(LogLevel::kWarn, "agent_refused", {{"peer", context->peer()}, {"error", status}});
    return new RefusedStream(status);  // deletes itself in OnDone, as gRPC's reactors do
  }
  const PortId port{next_port_.fetch_add(1)};
  auto stream = std::make_shared<ServerStream>(*this, port);
  {
    MutexLock lock(mutex_);
    streams_.emplace(port, stream);
  }
  stream->Start(context->peer());
  return stream.get();
}

grpc::ServerUnaryReactor* ControlService::GetLayout(grpc::CallbackServerContext* context,
                                                    const proto::GetLayoutRequest* request,
                                                    proto::GetLayoutReply* reply) {
  auto* reactor = context->DefaultReactor();
  if (const Status status = gate_.Check(*context); !status.ok()) {
    reactor->Finish(ToGrpc(status));
    return reactor;
  }
  executor_.Post([this, hash = FromProto(request->hash()), reply, reactor] {
    handler_.OnGetLayout(hash, [reply, reactor](Result<std::string> layout) {
      if (layout.ok()) reply->set_layout(std::move(layout).value());
      reactor->Finish(ToGrpc(layout.status()));
    });
  });
  return reactor;
}

void ControlService::CloseAll(const Status& why) {
  std::vector<std::shared_ptr<ServerStream>> open;
  {
    MutexLock lock(mutex_);
    for (const auto& [port, weak] : streams_) {
      if (auto stream = weak.lock()) open.push_back(std::move(stream));
    }
  }
  for (const auto& stream : open) stream->Close(why);
}

void ControlService::Forget(PortId port) {
  MutexLock lock(mutex_);
  streams_.erase(port);
}

template <typename Request, typename Reply>
grpc::ServerUnaryReactor* AdminService::Forward(
    grpc::CallbackServerContext* context, const Request* request, Reply* reply,
    void (AdminHandler::*method)(const Request&, std::function<void(Result<Reply>)>)) {
  auto* reactor = context->DefaultReactor();
  if (const Status status = gate_.Check(*context); !status.ok()) {
    reactor->Finish(ToGrpc(status));
    return reactor;
  }
  executor_.Post([this, request, reply, reactor, method] {
    (handler_.*method)(*request, [reply, reactor](Result<Reply> result) {
      if (result.ok()) *reply = std::move(result).value();
      reactor->Finish(ToGrpc(result.status()));
    });
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::GetStatus(grpc::CallbackServerContext* context,
                                                  const proto::StatusRequest* request,
                                                  proto::StatusReply* reply) {
  return Forward(context, request, reply, &AdminHandler::GetStatus);
}
grpc::ServerUnaryReactor* AdminService::GetVersions(grpc::CallbackServerContext* context,
                                                    const proto::VersionsRequest* request,
                                                    proto::VersionsReply* reply) {
  return Forward(context, request, reply, &AdminHandler::GetVersions);
}
grpc::ServerUnaryReactor* AdminService::Rollback(grpc::CallbackServerContext* context,
                                                 const proto::RollbackRequest* request,
                                                 proto::RollbackReply* reply) {
  return Forward(context, request, reply, &AdminHandler::Rollback);
}
grpc::ServerUnaryReactor* AdminService::Explain(grpc::CallbackServerContext* context,
                                                const proto::ExplainRequest* request,
                                                proto::ExplainReply* reply) {
  return Forward(context, request, reply, &AdminHandler::Explain);
}
grpc::ServerUnaryReactor* AdminService::WhoIsMissing(grpc::CallbackServerContext* context,
                                                     const proto::WhoIsMissingRequest* request,
                                                     proto::WhoIsMissingReply* reply) {
  return Forward(context, request, reply, &AdminHandler::WhoIsMissing);
}
grpc::ServerUnaryReactor* AdminService::Verify(grpc::CallbackServerContext* context,
                                               const proto::VerifyRequest* request,
                                               proto::VerifyReply* reply) {
  return Forward(context, request, reply, &AdminHandler::Verify);
}
grpc::ServerUnaryReactor* AdminService::Trace(grpc::CallbackServerContext* context,
                                              const proto::TraceRequest* request,
                                              proto::TraceReply* reply) {
  return Forward(context, request, reply, &AdminHandler::Trace);
}

}  // namespace tensorbus::rpc
