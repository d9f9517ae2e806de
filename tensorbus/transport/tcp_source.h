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
#include "tensorbus/transport/exposure.h"
#include "tensorbus/transport/foreign_buffer.h"
#include "tensorbus/transport/io_loop.h"
#include "tensorbus/transport/peer_log.h"
#include "tensorbus/transport/tcp_frame.h"
#include "tensorbus/transport/tcp_options.h"
#include "tensorbus/transport/tcp_socket.h"

namespace tensorbus::transport::tcp {

/// Most requests one connection may have waiting; more is a protocol error.
inline constexpr std::size_t kRequestsMax = 64;
/// Most bytes handed to the socket or taken from it in one call.
inline constexpr std::uint64_t kStretchBytes = 256 << 10;
/// Most bytes moved for one connection before others of the loop get their turn.
inline constexpr std::uint64_t kBurstBytes = std::uint64_t{4} << 20;
/// Windows whose runs are shorter on average go through the scratch.
inline constexpr std::uint64_t kDirectRunBytes = 512;

/// What the accepted connections of a transport share. Outlives them.
struct SourceContext {
  const TcpOptions& options;
  ExposureTable& exposures;
  /// Runs a task that may block, off the loops.
  std::function<void(std::function<void()>)> offload;
  std::atomic<unsigned> connections{0};
  PeerLog log = {};
};

/// The source's end of one connection: proves itself, checks the target, then answers requests in
/// order, straight from tensor memory; what lies in foreign memory is loaded into a buffer first,
/// by a thread that may block. Confined to its loop.
class SourceConnection final : public IoHandler,
                               public std::enable_shared_from_this<SourceConnection> {
 public:
  SourceConnection(IoLoop& loop, SourceContext& context, UniqueFd fd);
  ~SourceConnection() override;
  SourceConnection(const SourceConnection&) = delete;
  SourceConnection& operator=(const SourceConnection&) = delete;

  void Start();
  void OnReady(std::uint32_t events) override;
  void Close();

 private:
  enum class Stage { kHello, kAnswer, kServing, kRefused };

  /// The request being answered.
  struct Window {
    Request request;
    std::shared_ptr<Exposure> source;
    std::uint64_t sent = 0;
    bool packed = false;
    Status failure = {};  ///< the rest of the payload is zeros, this follows
    /// Foreign sources: bytes [loaded_first, loaded_first + loaded_bytes) of the window are loaded.
    std::uint64_t loaded_first = 0;
    std::uint64_t loaded_bytes = 0;
    std::uint32_t last_block = 0;
    std::vector<Trailer::Part> parts = {};
  };

  Status Receive();
  Status HandleFrame(const FrameReader::Frame& frame);
  Status HandleHello(std::span<const std::byte> body);
  Status HandleAnswer(std::span<const std::byte> body);
  /// Says why and closes once that is sent.
  void Refuse(const Status& status);

  Status Flush();
  void StartWindow();
  void FinishWindow();
  Transfer SendStretch(Window& window);
  /// Takes bytes that left into the checksum and the sums.
  void Account(Window& window, std::span<const std::span<std::byte>> runs, std::uint64_t bytes);
  /// Has the next bytes of a foreign source loaded; Loaded() follows.
  void Load(Window& window);
  void Loaded(std::uint64_t load, std::uint64_t bytes, ForeignBuffer buffer, const Status& status);
  void UpdateInterest();

  IoLoop& loop_;
  SourceContext& context_;
  UniqueFd fd_;
  std::string peer_ = "target";
  Stage stage_ = Stage::kHello;
  std::optional<IoLoop::TimerId> handshake_timer_;
  Nonce target_nonce_ = {};
  Nonce source_nonce_ = {};
  FrameReader reader_;
  OutBuffer out_;
  std::deque<Request> requests_;
  std::optional<Window> window_;
  Checksum64Stream checksum_;
  ForeignBuffer buffer_;     ///< what was loaded; kept while requests wait
  std::uint64_t loads_ = 0;  ///< counts loads: what an older one brings is dropped
  bool loading_ = false;
  std::uint32_t interest_ = 0;
};

}  // namespace tensorbus::transport::tcp
