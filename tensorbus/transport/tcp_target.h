#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tensorbus/base/hash.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/transport/foreign_buffer.h"
#include "tensorbus/transport/io_loop.h"
#include "tensorbus/transport/pull_state.h"
#include "tensorbus/transport/stream_map.h"
#include "tensorbus/transport/tcp_frame.h"
#include "tensorbus/transport/tcp_options.h"
#include "tensorbus/transport/tcp_socket.h"

namespace tensorbus::transport::tcp {

class Peer;
class TargetStream;

/// One pull over TCP.
struct TcpPull {
  TcpPull(const RouteKey& key, RouteEnd target, PullOptions options, Transport::Done done);

  PullState state;
  const StreamMap map;
  const std::uint64_t shape;
  std::shared_ptr<Peer> peer;            ///< set once, before other threads see the pull
  std::atomic<bool> confirmed{false};    ///< the source answered that it has this very route
  std::optional<IoLoop::TimerId> timer;  ///< belongs to the transport's first loop
  // Belong to the peer's mutex.
  bool asked = false;
  std::uint64_t next = 0;
  std::uint64_t in_flight_bytes = 0;
};

/// What the streams of a transport share. Outlives them.
struct TargetContext {
  const TcpOptions& options;
  /// Ends the pull if it is over; on any loop's thread.
  std::function<void(const std::shared_ptr<TcpPull>&)> finish;
  /// Runs a task that may block, off the loops.
  std::function<void(std::function<void()>)> offload;
};

/// A window a stream asked for.
struct PullWindow {
  std::shared_ptr<TcpPull> pull;
  std::uint64_t id = 0;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

/// Another transport that routes are pulled from, with its streams. Gives out the windows of its
/// pulls in turn, each within its credit. Thread-safe.
class Peer {
 public:
  Peer(std::string endpoint, Address address, TargetContext& context,
       const std::vector<std::unique_ptr<IoLoop>>& loops);

  const std::string& endpoint() const { return endpoint_; }
  const Address& address() const { return address_; }

  void Add(std::shared_ptr<TcpPull> pull);
  void Remove(const std::shared_ptr<TcpPull>& pull);
  std::vector<std::shared_ptr<TcpPull>> Pulls() const;

  /// The next window that somebody should ask for; none when all are asked for or out of credit.
  std::optional<PullWindow> Claim();
  /// Gives back the credit of a window that landed or never will.
  void Return(const PullWindow& window);

  /// Makes every stream look for work.
  void Wake();
  /// Closes the streams; each on its own thread.
  void Shutdown();
  /// After Shutdown(): the streams are closed and nobody else refers to them; it may be destroyed.
  bool closed() const;

 private:
  const std::string endpoint_;
  const Address address_;
  TargetContext& context_;
  std::vector<std::pair<IoLoop*, std::shared_ptr<TargetStream>>> streams_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<TcpPull>> pulls_ TB_GUARDED_BY(mutex_);
  std::size_t turn_ TB_GUARDED_BY(mutex_) = 0;
};

/// The target's end of one connection: connects when there is work, asks for windows, receives them
/// straight into tensor memory, checks them. What belongs in foreign memory is received into a
/// buffer and taken on from there by a thread that may block, one window at a time. Confined to its
/// loop.
class TargetStream final : public IoHandler, public std::enable_shared_from_this<TargetStream> {
 public:
  TargetStream(IoLoop& loop, Peer& peer, TargetContext& context);

  void Wake();
  void Shutdown();
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  void OnReady(std::uint32_t events) override;

 private:
  enum class Stage { kIdle, kConnecting, kChallenge, kWelcome, kReady, kClosed };

  void Connect();
  Status HandleConnected();
  /// Closes the connection and fails the pulls with a window on it; all of the peer's pulls when it
  /// never came to work.
  void Fail(const Status& status);
  void CloseSocket();

  void Ask();
  Status Flush();
  Status Receive();
  Transfer ReceiveStretch(const PullWindow& window);
  Transfer ReceiveInto(const PullWindow& window, TcpPull& pull);
  Status HandleFrame(const FrameReader::Frame& frame);
  Status HandleChallenge(std::span<const std::byte> body);
  Status HandleData(std::span<const std::byte> body);
  Status HandleTrailer(std::span<const std::byte> body);
  Status HandleFailure(std::span<const std::byte> body);
  /// False when what arrived is not what was sent; the pull has failed then.
  bool CheckArrived(const PullWindow& window, const Trailer& trailer);
  /// The first block of the window that did not arrive as it was sent; none where the sums of its
  /// blocks do not tell.
  std::optional<std::uint32_t> DamagedBlock(const PullWindow& window, const Trailer& trailer);
  void Land(const PullWindow& window, const Trailer& trailer);
  /// Gets a buffer for the window at the front. Fails its pull when the budget has none.
  void PrepareForeign(const PullWindow& window);
  /// Has the window at the front written; ForeignLanded() follows.
  void LandForeign(const PullWindow& window, const Trailer& trailer);
  void ForeignLanded(std::uint64_t connection, ForeignBuffer buffer);
  void FinishWindow();
  void UpdateInterest();

  IoLoop& loop_;
  Peer& peer_;
  TargetContext& context_;
  Stage stage_ = Stage::kIdle;
  UniqueFd fd_;
  std::optional<IoLoop::TimerId> handshake_timer_;
  Nonce nonce_ = {};         ///< ours
  Nonce source_nonce_ = {};  ///< the source's
  FrameReader reader_;
  OutBuffer out_;
  std::deque<PullWindow> windows_;  // asked for on this connection, in order
  std::uint64_t asked_bytes_ = 0;
  std::uint64_t next_id_ = 1;
  // Of the window at the front.
  bool announced_ = false;
  bool packed_ = false;
  std::uint64_t received_ = 0;
  Checksum64Stream checksum_;
  ForeignBuffer buffer_;
  std::uint64_t connection_ = 0;  ///< counts connections: what belongs to an older one is dropped
  bool landing_ = false;          ///< the window at the front is being written by another thread
  bool unwatched_ = false;        ///< the connection ended meanwhile: looked at after the landing
  std::uint32_t interest_ = 0;
  std::atomic<bool> closed_{false};  ///< set last of all: pairs with closed()
};

}  // namespace tensorbus::transport::tcp
