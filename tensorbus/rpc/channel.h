#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>
#include <memory>
#include <string>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/status.h"
#include "tensorbus/rpc/control_link.h"

namespace tensorbus::rpc {

/// Metadata key of the shared token.
inline constexpr char kTokenKey[] = "tensorbus-token";
/// Most bytes of one message: a layout of 140,000 tensors with its boxes.
inline constexpr int kMaxMessageBytes = 256 << 20;
/// Most messages that wait to be written to one stream.
inline constexpr std::size_t kMaxQueuedMessages = 65536;

/// A channel to the daemon and the token its calls must carry. Thread-safe, immutable.
struct DaemonChannel {
  std::shared_ptr<grpc::Channel> channel;
  std::string target;
  std::string token;  ///< "" for none

  /// Prepares one call: its token and, unless zero, its deadline.
  void Equip(grpc::ClientContext& context, Nanos timeout) const;
  /// What a call that failed is told as: the daemon's own status as it is, and in our words, with
  /// the target and what helps, that nothing answered, or something that is no daemon.
  Status FailureOf(const grpc::Status& outcome) const;
};

/// Makes the channel; nothing connects yet. Connections are not shared with other channels.
///
/// Errors: from reading the files; kInvalidArgument when only some of the three TLS files are set.
Result<DaemonChannel> OpenChannel(const DaemonAddress& address);

}  // namespace tensorbus::rpc
