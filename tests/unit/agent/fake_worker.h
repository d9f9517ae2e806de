#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tensorbus/base/mapping.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"
#include "tensorbus/types/ids.h"
#include "tensorbus/types/piece.h"
#include "worker_shim/bucket_service.h"
#include "worker_shim/framing.h"
#include "worker_shim/wire.h"

namespace tensorbus::testing {

/// A worker process as far as its agent can tell: one arena, one connection, hooks answered by a
/// thread of its own. Everything that waits has a deadline.
class FakeWorker {
 public:
  FakeWorker(std::string socket_path, RankIdentity identity);
  ~FakeWorker();
  FakeWorker(const FakeWorker&) = delete;
  FakeWorker& operator=(const FakeWorker&) = delete;

  /// Adds a contiguous f32 piece to the arena; call before Register().
  void AddTensor(const std::string& name, const Shape& shape, const Box& box);
  /// Adds one more place of the last added box.
  void AddAlias();
  /// Register() announces the arena as private memory, to be reached in `mode` (0: any).
  void UsePrivateMemory(std::uint8_t mode);
  /// Whether orders to pack and unpack are served at once (the default) or never: as a worker does
  /// that is busy with something else.
  void ServeBuckets(bool serve);
  /// Whether orders, and all that comes behind them, wait until this is taken back.
  void HoldBuckets(bool hold);
  /// Orders to pack or unpack that came.
  std::uint64_t bucket_orders() const;

  Status Connect();
  Result<wire::Registered> Register(FlipMode flip = FlipMode::kInPlace,
                                    Proof proof = Proof::kReadback);
  Status Publish(std::uint64_t version, wire::SlowConsumer policy = wire::SlowConsumer::kWait,
                 bool receipts = false);
  /// Asks and waits.
  wire::Updated Update(std::uint64_t timeout_ms = 10000);
  /// Asks; the answer is waited for with AwaitUpdate().
  std::uint64_t StartUpdate(std::uint64_t timeout_ms = 10000);
  wire::Updated AwaitUpdate(std::uint64_t request);
  wire::Released Release(std::uint64_t version, std::uint64_t timeout_ms = 5000);
  /// The optimizer's pre-step hook.
  void BumpWriteCount();
  void Goodbye();
  /// As the death of the process looks from outside.
  void Disconnect();

  /// What the worker answers to a hook, and what it does before; default: OK.
  void SetHook(std::function<Status(wire::MessageType)> hook);
  /// Hooks that were answered, in order.
  std::vector<wire::MessageType> hooks() const;
  /// Why the agent broke the connection off; OK while it has not. What waits fails with it.
  Status broken_off() const;
  /// Updates that came unasked.
  std::vector<wire::Updated> unasked() const;

  /// Element `i` of piece `piece`, counted row-major.
  float& At(std::size_t piece, std::uint64_t i);
  std::uint64_t ElementCount(std::size_t piece) const;
  /// What Fill(seed) writes into element `linear` of a logical tensor, the first of a worker.
  static float ValueAt(std::uint64_t linear, std::uint32_t seed);
  /// Writes into every element a number made of its place in the logical tensor and `seed`.
  void Fill(std::uint32_t seed);
  /// Elements that are not what Fill(seed) writes.
  std::uint64_t CountWrong(std::uint32_t seed) const;
  const wire::ControlPage& page() const;
  wire::ControlPage& page();

  /// Sends any frame and, with a request, waits for its answer.
  Result<wire::Frame> Ask(wire::MessageType type, std::vector<std::byte> body,
                          std::vector<UniqueFd> fds = {});
  /// Asks what the request of that number waits for; the answer comes under the same one.
  Result<wire::Frame> Explain(std::uint64_t request);
  /// Sends any frame under any number.
  Status Send(wire::MessageType type, std::uint64_t request, std::vector<std::byte> body,
              std::vector<UniqueFd> fds = {});
  Registration registration;
  /// What Register() says of the worker's time with another agent.
  wire::Return back;

 private:
  void Serve();
  void Handle(wire::Frame frame);
  void HandleBucket(wire::Frame frame);
  Result<wire::Frame> Await(std::uint64_t request);

  const std::string socket_path_;
  const RankIdentity identity_;
  UniqueFd arena_fd_;
  Mapping arena_;
  Mapping page_;
  UniqueFd page_fd_;
  UniqueFd socket_;
  std::optional<std::uint8_t> private_mode_;
  worker_shim::BucketService buckets_;
  std::thread thread_;
  std::uint64_t next_request_ = 1;  // test thread only

  mutable Mutex mutex_;
  CondVar changed_;
  bool closed_ TB_GUARDED_BY(mutex_) = false;
  Status broken_off_ TB_GUARDED_BY(mutex_);
  std::map<std::uint64_t, wire::Frame> answers_ TB_GUARDED_BY(mutex_);
  std::vector<wire::MessageType> hooks_ TB_GUARDED_BY(mutex_);
  std::vector<wire::Updated> unasked_ TB_GUARDED_BY(mutex_);
  std::function<Status(wire::MessageType)> hook_ TB_GUARDED_BY(mutex_);
  bool serve_buckets_ TB_GUARDED_BY(mutex_) = true;
  bool hold_buckets_ TB_GUARDED_BY(mutex_) = false;
  std::uint64_t bucket_orders_ TB_GUARDED_BY(mutex_) = 0;
  Mutex send_mutex_;
};

}  // namespace tensorbus::testing
