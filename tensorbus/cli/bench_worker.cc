#include "tensorbus/cli/bench_worker.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <fmt/format.h>
#include <optional>
#include <poll.h>
#include <span>
#include <sys/mman.h>
#include <thread>

#include "tensorbus/base/mapping.h"
#include "tensorbus/cli/bench_pattern.h"
#include "tensorbus/cli/bench_protocol.h"
#include "tensorbus/cli/commands.h"
#include "tensorbus/client/client.h"
#include "tensorbus/formats/file.h"

namespace tensorbus::cli {
namespace {

constexpr auto kConnectRetry = std::chrono::milliseconds(50);

template <typename Enum, std::size_t N>
Result<Enum> ParseName(const std::array<std::pair<const char*, Enum>, N>& names, const char* what,
                       const std::string& text) {
  std::vector<const char*> known;
  for (const auto& [name, value] : names) {
    if (text == name) return value;
    known.push_back(name);
  }
  return Status(Code::kInvalidArgument,
                fmt::format("no {} '{}'; known are {}", what, text, fmt::join(known, ", ")),
                Reason::kMalformed);
}

/// The memory of one rank: an arena that the agent maps, or private memory.
class RankMemory {
 public:
  static Result<RankMemory> Create(std::uint64_t bytes, MemoryMode mode) {
    RankMemory memory;
    if (mode == MemoryMode::kMapped) {
      TB_ASSIGN_OR_RETURN(memory.arena_, client::Arena::Create(bytes));
      memory.span_ = memory.arena_->memory();
      return memory;
    }
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return ErrnoStatus(errno, fmt::format("map {} bytes", bytes));
    memory.span_ = {static_cast<std::byte*>(at), static_cast<std::size_t>(bytes)};
    // What an engine's weights are before the first refresh: allocated and touched.
    TB_RETURN_IF_ERROR(TouchPages(memory.span_));
    return memory;
  }

  Status AttachTo(client::Client& client) const {
    const auto segment = arena_ ? client.Attach(*arena_) : client.AttachPrivate(span_);
    return segment.status();
  }
  std::byte* data() const { return span_.data(); }

 private:
  std::optional<client::Arena> arena_;
  std::span<std::byte> span_;
};

Piece PieceOf(const ArenaPiece& placed, std::uint32_t tensor, std::uint32_t item_bytes) {
  Piece piece;
  piece.tensor = tensor;
  piece.box = placed.box;
  piece.offset = placed.offset;
  std::uint64_t stride = item_bytes;
  for (int d = placed.box.rank() - 1; d >= 0; --d) {
    piece.strides[static_cast<std::size_t>(d)] = stride;
    stride *= placed.box[d].size();
  }
  return piece;
}

class BenchWorker {
 public:
  explicit BenchWorker(const BenchWorkerOptions& options)
      : options_(options),
        timeout_(std::chrono::duration_cast<Nanos>(
            std::chrono::duration<double>(options.timeout_seconds))) {}

  Status SetUp(BenchReply* reply) {
    TB_ASSIGN_OR_RETURN(const FlipMode flip, ParseFlipMode(options_.flip));
    TB_ASSIGN_OR_RETURN(const Proof proof, ParseProof(options_.proof));
    TB_ASSIGN_OR_RETURN(const MemoryMode mode, ParseMemoryMode(options_.memory));
    TB_ASSIGN_OR_RETURN(const std::string text, formats::ReadText(options_.layout));
    TB_ASSIGN_OR_RETURN(layout_, ParseJobLayout(std::as_bytes(std::span(text))));
    arena_ = PlaceRank(layout_, options_.rank);
    TB_ASSIGN_OR_RETURN(memory_, RankMemory::Create(arena_.bytes, mode));
    // A trainer has weights before it registers.
    if (options_.source) FillArena(layout_, arena_, 0, memory_->data());
    receipts_ = proof == Proof::kStream;
    TB_ASSIGN_OR_RETURN(client_, Connect());
    TB_RETURN_IF_ERROR(memory_->AttachTo(*client_));
    client::RegisterOptions registration = Describe();
    registration.flip = flip;
    registration.proof = proof;
    if (mode != MemoryMode::kMapped) registration.private_mode = mode;
    TB_ASSIGN_OR_RETURN(const client::Registered registered, client_->Register(registration));
    reply->values[kRegisterSeconds] = registered.register_seconds;
    reply->values[kPrefaultSeconds] = registered.prefault_seconds;
    reply->text = fmt::format("{}: {}", MemoryModeName(registered.mode), registered.why);
    return {};
  }

  /// Serves the channel until it ends.
  int Serve() {
    while (true) {
      if (!AwaitCommand()) return kExitFailed;
      const auto message = ReceiveCommand(options_.fd);
      if (!message.ok()) return kExitFailed;  // whoever started us has gone
      if (message->command == BenchCommand::kQuit) return kExitFine;
      BenchReply reply = ReplyTo(message->command, {});
      const std::uint64_t cpu = ProcessCpuNs();
      const Status status = Do(*message, &reply);
      if (!status.ok()) reply = ReplyTo(message->command, status);
      reply.cpu_ns = ProcessCpuNs() - cpu;
      if (!SendBench(options_.fd, reply).ok()) return kExitFailed;
    }
  }

 private:
  /// Answers the agent while there is nothing to do. False once the channel is closed for good.
  bool AwaitCommand() {
    while (true) {
      std::array<pollfd, 2> items = {pollfd{options_.fd, POLLIN, 0}, pollfd{-1, POLLIN, 0}};
      if (client_.has_value()) {
        const auto fd = client_->PollFd();
        if (fd.ok()) items[1].fd = *fd;
      }
      if (::poll(items.data(), items.size(), -1) < 0 && errno != EINTR) return false;
      if (items[0].revents != 0) return true;
      // A lost agent shows in the next request; polling on would spin.
      if (items[1].revents != 0 && !client_->Poll().ok()) return true;
    }
  }

  Status Do(const BenchMessage& message, BenchReply* reply) {
    switch (message.command) {
      case BenchCommand::kHello:
        return SetUp(reply);
      case BenchCommand::kWrite:
        return Write(message.version);
      case BenchCommand::kPublish:
        return Publish(Version{message.version}, message.count == 0, reply);
      case BenchCommand::kAsk:
        return AskForNext();
      case BenchCommand::kWait:
        return AwaitLive(Version{message.version}, reply);
      case BenchCommand::kVerify:
        return CheckArena(layout_, arena_, message.version, memory_->data());
      case BenchCommand::kFault:
        return Misbehave(static_cast<BenchFault>(message.a));
      default:
        return {Code::kUnimplemented, "not a command for a rank of ours"};
    }
  }

  Result<client::Client> Connect() const {
    client::ConnectOptions connect;
    connect.identity = {.channel = options_.channel,
                        .job = options_.source ? "trainer" : "engine",
                        .role = options_.source ? Role::kProducer : Role::kConsumer,
                        .replica = options_.replica,
                        .rank = options_.rank,
                        .rank_count = layout_.rank_count};
    connect.agent_socket = options_.agent_socket;
    connect.library = "tensorbusctl bench";
    const TimePoint deadline = Clock::Real().Now() + timeout_;
    // The agent may listen before it has found its daemon.
    while (true) {
      auto client = client::Client::Connect(connect);
      if (client.ok() || client.status().code() != Code::kUnavailable) return client;
      if (Clock::Real().Now() >= deadline) return client;
      std::this_thread::sleep_for(kConnectRetry);
    }
  }

  client::RegisterOptions Describe() const {
    client::RegisterOptions registration;
    registration.timeout = timeout_;
    std::vector<std::uint32_t> index(layout_.tensors.size(), 0);
    std::optional<std::uint32_t> last;
    for (const ArenaPiece& placed : arena_.pieces) {
      const TensorSpec& spec = layout_.tensors[placed.tensor].spec;
      if (last != placed.tensor) {
        index[placed.tensor] = static_cast<std::uint32_t>(registration.tensors.size());
        registration.tensors.push_back(spec);
        last = placed.tensor;
      }
      registration.pieces.push_back(PieceOf(placed, index[placed.tensor], ItemBytes(spec.dtype)));
    }
    if (!options_.source) registration.leave_out = options_.leave_out;
    return registration;
  }

  Status Write(std::uint64_t version) {
    TB_RETURN_IF_ERROR(client_->BeforeWrite(timeout_).status());
    FillArena(layout_, arena_, version, memory_->data());
    return {};
  }

  Status Misbehave(BenchFault fault) {
    if (fault == BenchFault::kDie) ::raise(SIGKILL);
    if (arena_.pieces.empty()) return {Code::kFailedPrecondition, "this rank holds nothing"};
    memory_->data()[arena_.pieces.front().offset] ^= std::byte{1};
    return {};
  }

  Status Publish(Version version, bool until_free, BenchReply* reply) {
    const std::uint64_t begin = MonotonicNs();
    TB_ASSIGN_OR_RETURN(
        client::Request request,
        client_->Publish(
            {.version = version, .min_replicas = options_.replicas, .receipts = receipts_}));
    TB_RETURN_IF_ERROR(request.Wait(timeout_).status());
    if (!until_free) return {};
    const std::uint64_t accepted = MonotonicNs();
    TB_RETURN_IF_ERROR(client_->BeforeWrite(timeout_).status());
    const std::uint64_t free = MonotonicNs();
    reply->begin_ns = begin;
    reply->values[kAcceptSeconds] = static_cast<double>(accepted - begin) * 1e-9;
    reply->values[kBlockedSeconds] = static_cast<double>(free - begin) * 1e-9;
    return {};
  }

  Status AskForNext() {
    update_.reset();
    TB_ASSIGN_OR_RETURN(
        client::Request request,
        client_->Update({.selector = client::Selector::kNext, .timeout = timeout_}));
    update_.emplace(std::move(request));
    return {};
  }

  Status AwaitLive(Version version, BenchReply* reply) {
    if (!update_.has_value()) return {Code::kFailedPrecondition, "nothing was asked for"};
    const auto outcome = update_->Wait(timeout_);
    reply->end_ns = MonotonicNs();
    update_.reset();
    if (!outcome.ok()) return outcome.status();
    if (outcome->version != version) {
      return {Code::kInternal, fmt::format("version {} came live where {} was published",
                                           outcome->version.value, version.value)};
    }
    reply->bytes = outcome->bytes;
    reply->values[kSessionSeconds] = outcome->seconds;
    reply->values[kCopySeconds] = outcome->copy_seconds;
    return {};
  }

  const BenchWorkerOptions& options_;
  Nanos timeout_;
  JobLayout layout_;
  RankArena arena_;
  bool receipts_ = false;
  std::optional<RankMemory> memory_;
  std::optional<client::Client> client_;
  std::optional<client::Request> update_;  // dies before its client
};

}  // namespace

Result<FlipMode> ParseFlipMode(const std::string& text) {
  static constexpr std::array<std::pair<const char*, FlipMode>, 2> kNames = {
      {{"in_place", FlipMode::kInPlace}, {"shadow", FlipMode::kShadow}}};
  return ParseName(kNames, "flip mode", text);
}

Result<Proof> ParseProof(const std::string& text) {
  static constexpr std::array<std::pair<const char*, Proof>, 4> kNames = {
      {{"readback", Proof::kReadback},
       {"stream", Proof::kStream},
       {"memory", Proof::kMemory},
       {"off", Proof::kOff}}};
  return ParseName(kNames, "proof", text);
}

Result<MemoryMode> ParseMemoryMode(const std::string& text) {
  static constexpr std::array<std::pair<const char*, MemoryMode>, 3> kNames = {
      {{"mapped", MemoryMode::kMapped},
       {"cma", MemoryMode::kCma},
       {"bucket", MemoryMode::kBucket}}};
  return ParseName(kNames, "memory mode", text);
}

const char* MemoryModeName(MemoryMode mode) {
  switch (mode) {
    case MemoryMode::kCma:
      return "cma";
    case MemoryMode::kBucket:
      return "bucket";
    default:
      return "mapped";
  }
}

int RunBenchWorker(const BenchWorkerOptions& options) {
  BenchWorker worker(options);
  return worker.Serve();
}

}  // namespace tensorbus::cli
