#include "agent/daemon_link.h"

#include <algorithm>
#include <fmt/format.h>

#include "tensorbus/base/log.h"
#include "tensorbus/rpc/status_map.h"
#include "tensorbus/types/ids.h"

namespace tensorbus::agent {

DaemonLink::DaemonLink(Options options, Executor& executor, LinkFactory factory, Handler handler)
    : options_(std::move(options)),
      executor_(executor),
      factory_(std::move(factory)),
      handler_(std::move(handler)),
      pause_(options_.retry_min),
      alive_(std::make_shared<bool>(true)) {}

DaemonLink::~DaemonLink() {
  *alive_ = false;
}

void DaemonLink::Start() {
  Open();
}

void DaemonLink::Open() {
  const std::uint64_t stream = ++stream_;
  link_ = factory_(
      executor_,
      [this, stream](const proto::DaemonMessage& message) {
        if (stream == stream_) OnMessage(message);
      },
      [this, stream](const Status& why) {
        if (stream == stream_) Lost(why);
      });
  proto::AgentMessage message;
  *message.mutable_hello() = options_.hello;
  link_->Send(std::move(message));
  executor_.PostAfter(options_.welcome_timeout, IfAlive([this, stream] {
                        if (stream != stream_ || ready_) return;
                        Lost(Status(Code::kUnavailable, "the daemon did not answer the hello",
                                    Reason::kNotRunning));
                      }));
}

void DaemonLink::OnMessage(const proto::DaemonMessage& message) {
  if (message.body_case() == proto::DaemonMessage::kWelcome) return OnWelcome(message.welcome());
  if (ready_) handler_.on_message(message);
}

void DaemonLink::OnWelcome(const proto::Welcome& welcome) {
  if (ready_) return;
  Status refused = rpc::FromProto(welcome.error());
  if (refused.ok() && welcome.protocol() != rpc::kControlProtocol) {
    refused = Status(Code::kFailedPrecondition,
                     fmt::format("the daemon speaks protocol {}, this agent {}; install the same "
                                 "version of tensorbus on both sides",
                                 welcome.protocol(), rpc::kControlProtocol),
                     Reason::kProtocolVersion);
  }
  if (!refused.ok()) {
    if (refused != refused_) Log(LogLevel::kError, "daemon_refused", {{"error", refused}});
    refused_ = refused;
    told_ = true;
    pause_ = options_.retry_max;  // it takes somebody to change that
    return Lost(refused);
  }
  ready_ = true;
  told_ = false;
  refused_ = {};
  pause_ = options_.retry_min;
  Log(LogLevel::kInfo, "daemon_connected", {{"daemon", welcome.daemon()}});
  if (welcome.heartbeat_ms() != 0) {
    Beat(stream_, std::chrono::milliseconds(welcome.heartbeat_ms()));
  }
  handler_.on_ready(welcome);
}

void DaemonLink::Beat(std::uint64_t stream, Nanos interval) {
  executor_.PostAfter(interval, IfAlive([this, stream, interval] {
                        if (stream != stream_ || !ready_) return;
                        proto::AgentMessage message;
                        message.mutable_heartbeat();
                        link_->Send(std::move(message));
                        Beat(stream, interval);
                      }));
}

void DaemonLink::Lost(const Status& why) {
  ++stream_;
  const bool was_ready = std::exchange(ready_, false);
  if (!told_) Log(LogLevel::kWarn, "daemon_lost", {{"error", why}});
  told_ = true;
  executor_.PostAfter(pause_, IfAlive([this, stream = stream_] {
                        if (stream != stream_) return;
                        link_.reset();
                        Open();
                      }));
  pause_ = std::min(options_.retry_max, pause_ * 2);
  if (was_ready) handler_.on_lost(why);
}

void DaemonLink::Send(proto::AgentMessage message) {
  if (ready_) link_->Send(std::move(message));
}

void DaemonLink::GetLayout(const Hash128& hash, Nanos timeout, rpc::ControlLink::OnLayout done) {
  if (ready_) return link_->GetLayout(hash, timeout, std::move(done));
  executor_.Post([done = std::move(done)] {
    done(Status(Code::kUnavailable, "the daemon is not there", Reason::kNotRunning));
  });
}

std::function<void()> DaemonLink::IfAlive(std::function<void()> task) {
  return [alive = alive_, task = std::move(task)] {
    if (*alive) task();
  };
}

}  // namespace tensorbus::agent
