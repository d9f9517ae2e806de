#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "agent/local_socket.h"
#include "tensorbus/base/executor.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"
#include "tensorbus/types/ids.h"
#include "worker_shim/framing.h"

namespace tensorbus::agent {

/// One worker's connection; never used again within an agent's life.
using ConnectionId = Id<struct ConnectionTag>;

/// Why a connection ends, in the frame that its worker waits for or expects as the last.
struct LastFrame {
  wire::MessageType type;
  std::vector<std::byte> body;
};
/// A Welcome for who has not had one and waits for it, else a BrokenOff.
LastFrame MakeLastFrame(bool awaits_welcome, const Status& why);

/// Accepts worker processes on a UNIX socket and exchanges frames with them.
///
/// It knows frames and bounds, not their meaning. A peer is let in by its uid; a connection that
/// breaks a rule of the framing, overruns a bound or whose process dies is closed, and the handler
/// hears why, once; the worker hears it too, as far as its socket takes that at once. Reading from
/// a worker stops while its earlier frames wait to be handled.
///
/// Threads: Send() and Close() are thread-safe. The handler runs on the executor given at
/// creation, never inside a call, and never after Stop() returned when Stop() runs there.
class WorkerServer {
 public:
  struct Options {
    std::string socket_path;
    std::vector<uid_t> allow_uids;
    std::size_t connection_count_max = 4096;
    /// A connection that has not said kHello by then is closed.
    Nanos hello_timeout = std::chrono::seconds(10);
    /// Most bytes that wait for one worker to read them; more closes the connection.
    std::uint64_t outbound_bytes_max = 64U << 20;
    /// Most frames, and bytes in them, of all workers that wait for the server's thread. A frame
    /// beyond them closes its connection.
    std::size_t waiting_frames_max = 1U << 16;
    std::uint64_t waiting_bytes_max = std::uint64_t{1} << 30;
    /// Frames of one worker that wait to be handled before its socket is left alone.
    std::uint32_t inbound_frames_max = 64;
  };

  struct Handler {
    std::function<void(ConnectionId, PeerProcess)> on_open;
    std::function<void(ConnectionId, wire::Frame)> on_frame;
    /// The connection is gone; nothing more arrives from it.
    std::function<void(ConnectionId, std::string why)> on_closed;
  };

  /// Listens and starts the thread "tb-workers". Errors: as LocalListener::Create().
  static Result<std::unique_ptr<WorkerServer>> Create(Options options, Executor& executor,
                                                      Handler handler);
  ~WorkerServer();
  WorkerServer(const WorkerServer&) = delete;
  WorkerServer& operator=(const WorkerServer&) = delete;

  const std::string& path() const { return listener_.path(); }

  /// Queues one frame. A connection that is gone swallows it.
  void Send(ConnectionId connection, wire::MessageType type, std::uint64_t request,
            std::vector<std::byte> body, std::vector<UniqueFd> fds = {});
  /// Sends what is queued before, for at most a second, then closes. on_closed gets `why`.
  void Close(ConnectionId connection, std::string why);

  /// Joins the thread and closes every connection. The workers hear that the agent was stopped, as
  /// far as their sockets take that at once; the handler hears nothing. Idempotent.
  void Stop();

 private:
  struct Connection;
  struct Order;
  struct Shared;

  WorkerServer(Options options, Executor& executor, Handler handler, LocalListener listener,
               UniqueFd epoll, UniqueFd wake);

  void Run();
  void TakeOrders();
  void Accept();
  void PauseAccepting(const Status& why);
  void ResumeAccepting();
  void Admit(UniqueFd socket);
  Status CheckAdmitted(const Result<PeerProcess>& peer) const;
  void Refuse(const UniqueFd& socket, const Status& why) const;
  Status WatchNew(int fd, std::uint64_t token) const;
  void ProcessEnded(Connection& connection);
  void Read(Connection& connection);
  void Deliver(Connection& connection, wire::Frame frame);
  void Flush(Connection& connection);
  /// The connection may be gone after it, as after Read() and Flush().
  void Watch(Connection& connection);
  void Drop(ConnectionId id, std::string why);
  /// Tells the worker, then closes. The connection is gone after it.
  void BreakOff(Connection& connection, const Status& why);
  /// Sends the worker its last frame, unless it has that; never waits for it to read.
  void TellWhy(Connection& connection, const Status& why);
  void DropLate();
  std::string WhyEnded(const Connection& connection, const Status& status) const;

  Options options_;
  Executor& executor_;
  std::shared_ptr<Shared> shared_;
  LocalListener listener_;
  UniqueFd epoll_;
  // Confined to the thread; Stop() has them once it has joined that.
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::uint64_t next_connection_ = 1;
  std::optional<TimePoint> accept_again_;  ///< while paused
  std::thread thread_;
};

}  // namespace tensorbus::agent
