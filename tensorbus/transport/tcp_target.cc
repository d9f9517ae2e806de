#include "tensorbus/transport/tcp_target.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <fmt/format.h>
#include <sys/epoll.h>

#include "tensorbus/kernels/copy.h"
#include "tensorbus/transport/foreign_landing.h"
#include "tensorbus/transport/route_check.h"
#include "tensorbus/transport/tcp_auth.h"
#include "tensorbus/transport/tcp_source.h"

namespace tensorbus::transport::tcp {

namespace {

Status Unexpected(std::string_view what) {
  return {Code::kInvalidArgument, std::string(what), Reason::kMalformed};
}

}  // namespace

TargetStream::TargetStream(IoLoop& loop, Peer& peer, TargetContext& context)
    : loop_(loop), peer_(peer), context_(context) {}

void TargetStream::Wake() {
  if (stage_ == Stage::kIdle && !peer_.Pulls().empty()) Connect();
  if (stage_ != Stage::kReady) return;
  Ask();
  if (const Status status = Flush(); !status.ok()) return Fail(status);
  UpdateInterest();
}

void TargetStream::Shutdown() {
  CloseSocket();
  stage_ = Stage::kClosed;
  closed_.store(true, std::memory_order_release);
}

void TargetStream::Connect() {
  Result<UniqueFd> fd = StartConnect(peer_.address());
  if (!fd.ok()) return Fail(fd.status());
  fd_ = std::move(*fd);
  stage_ = Stage::kConnecting;
  interest_ = EPOLLOUT;
  if (const Status status = loop_.Watch(fd_.get(), interest_, shared_from_this()); !status.ok()) {
    return Fail(status);
  }
  const auto when = std::chrono::steady_clock::now() + context_.options.handshake_timeout;
  handshake_timer_ = loop_.RunAt(when, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      self->handshake_timer_.reset();
      self->Fail(Status(Code::kUnavailable,
                        fmt::format("peer {} does not answer", self->peer_.endpoint()),
                        Reason::kPeerLost));
    }
  });
}

Status TargetStream::HandleConnected() {
  if (const int error = SocketError(fd_.get()); error != 0) return Lost(peer_.endpoint(), error);
  TB_ASSIGN_OR_RETURN(nonce_, MakeNonce());
  out_.Append(Encode(Hello{.nonce = nonce_}));
  stage_ = Stage::kChallenge;
  return {};
}

void TargetStream::CloseSocket() {
  if (handshake_timer_.has_value()) loop_.CancelTimer(*handshake_timer_);
  handshake_timer_.reset();
  if (fd_.valid() && !unwatched_) loop_.Unwatch(fd_.get());
  fd_.reset();
  reader_ = FrameReader();
  out_ = OutBuffer();
  for (const PullWindow& window : windows_) peer_.Return(window);
  windows_.clear();
  asked_bytes_ = 0;
  announced_ = false;
  landing_ = false;
  unwatched_ = false;
  ++connection_;
  buffer_ = ForeignBuffer();
  if (stage_ != Stage::kClosed) stage_ = Stage::kIdle;
}

void TargetStream::Fail(const Status& status) {
  const bool was_ready = stage_ == Stage::kReady;
  std::vector<std::shared_ptr<TcpPull>> hit;
  for (const PullWindow& window : windows_) hit.push_back(window.pull);
  CloseSocket();
  if (!was_ready) hit = peer_.Pulls();
  for (const auto& pull : hit) {
    pull->state.Fail(status.Annotate(RouteName(pull->state.key())));
    context_.finish(pull);
  }
  // A connection that broke while nobody used it says nothing about the pulls that wait now.
  if (was_ready) Wake();
}

void TargetStream::OnReady(std::uint32_t events) {
  if (!fd_.valid()) return;
  const auto self = shared_from_this();
  if (landing_ && (events & (EPOLLERR | EPOLLHUP)) != 0) {
    // There may be more to read in it; epoll would report its end over and over until then.
    loop_.Unwatch(fd_.get());
    unwatched_ = true;
    return;
  }
  Status status;
  if (stage_ == Stage::kConnecting) {
    status = HandleConnected();
  } else if ((events & EPOLLIN) != 0) {
    // Before the error bits: what the peer said before it went counts.
    status = Receive();
  } else if ((events & (EPOLLERR | EPOLLHUP)) != 0) {
    status = Lost(peer_.endpoint(), SocketError(fd_.get()));
  }
  if (status.ok() && stage_ == Stage::kReady) Ask();
  if (status.ok() && fd_.valid()) status = Flush();
  if (!status.ok()) return Fail(status);
  if (fd_.valid()) UpdateInterest();
}

void TargetStream::UpdateInterest() {
  if (unwatched_) return;
  const std::uint32_t interest = (landing_ ? 0U : EPOLLIN) | (out_.empty() ? 0U : EPOLLOUT);
  if (interest == interest_) return;
  interest_ = interest;
  loop_.Rewatch(fd_.get(), interest);
}

void TargetStream::Ask() {
  const TcpOptions& options = context_.options;
  const std::uint64_t share = options.credit_bytes / options.streams_per_peer;
  while (windows_.size() < kRequestsMax && (windows_.empty() || asked_bytes_ < share)) {
    std::optional<PullWindow> window = peer_.Claim();
    if (!window.has_value()) return;
    window->id = next_id_++;
    const TcpPull& pull = *window->pull;
    out_.Append(Encode(Request{
        .id = window->id,
        .key = pull.state.key(),
        .shape = pull.shape,
        .blocks = static_cast<std::uint32_t>(pull.state.target().end().blocks.size()),
        .bytes = pull.map.bytes(),
        .proof = pull.state.options().proof,
        .first = window->first,
        .count = window->count,
        .mac = PullMac(pull.state.options().capability, nonce_, source_nonce_, pull.state.key())}));
    asked_bytes_ += window->count;
    windows_.push_back(std::move(*window));
  }
}

Status TargetStream::Flush() {
  const Transfer transfer = out_.Flush(fd_.get(), false);
  if (transfer.closed || transfer.error_number != 0) {
    return Lost(peer_.endpoint(), transfer.error_number);
  }
  return {};
}

Status TargetStream::Receive() {
  for (std::uint64_t burst = 0; burst < kBurstBytes && !landing_;) {
    if (announced_ && received_ < windows_.front().count) {
      const Transfer transfer = ReceiveStretch(windows_.front());
      if (transfer.would_block) return {};
      if (transfer.bytes == 0) return Lost(peer_.endpoint(), transfer.error_number);
      burst += transfer.bytes;
      continue;
    }
    TB_ASSIGN_OR_RETURN(const auto frame, reader_.Read(fd_.get(), peer_.endpoint()));
    if (!frame.has_value()) return {};
    const Status status = HandleFrame(*frame);
    if (!status.ok()) return status.Annotate("peer " + peer_.endpoint());
    if (!fd_.valid()) return {};
  }
  return {};
}

Transfer TargetStream::ReceiveStretch(const PullWindow& window) {
  TcpPull& pull = *window.pull;
  Transfer transfer;
  if (pull.state.Enter()) {
    transfer = ReceiveInto(window, pull);
    pull.state.Leave();
    if (pull.state.failed()) context_.finish(window.pull);
  } else {
    // The pull is over; its bytes still come and go nowhere.
    const std::span<std::byte> scratch = loop_.scratch();
    const std::span<std::byte> rest =
        scratch.first(std::min<std::size_t>(scratch.size(), window.count - received_));
    transfer = ReceiveRuns(fd_.get(), {&rest, 1});
  }
  received_ += transfer.bytes;
  return transfer;
}

Transfer TargetStream::ReceiveInto(const PullWindow& window, TcpPull& pull) {
  const std::uint64_t at = window.first + received_;
  const std::uint64_t left = window.count - received_;
  const std::span<const StridedBlock> blocks = pull.state.target().end().blocks;
  if (pull.state.target().end().memory != nullptr) {
    const std::span<std::byte> room = buffer_.bytes().subspan(received_, left);
    const Transfer transfer = ReceiveRuns(fd_.get(), {&room, 1});
    checksum_.Add(room.first(transfer.bytes));
    return transfer;
  }
  if (packed_) {
    const std::span<std::byte> scratch = loop_.scratch();
    const std::span<std::byte> room = scratch.first(std::min<std::size_t>(scratch.size(), left));
    const Transfer transfer = ReceiveRuns(fd_.get(), {&room, 1});
    checksum_.Add(room.first(transfer.bytes));
    std::size_t used = 0;
    pull.map.ForEachPart(at, transfer.bytes, [&](const BlockPart& part) {
      kernels::UnpackRange(room.subspan(used, part.range.count), part.range.first,
                           blocks[part.block]);
      used += part.range.count;
    });
    return transfer;
  }
  std::array<std::span<std::byte>, kRunsPerCall> runs;
  std::size_t run_count = 0;
  StreamCursor cursor(pull.map, blocks, at);
  std::uint64_t bytes = 0;
  while (run_count < runs.size() && bytes < std::min(left, kStretchBytes)) {
    runs[run_count] = cursor.Next(std::min(left, kStretchBytes) - bytes);
    bytes += runs[run_count++].size();
  }
  const Transfer transfer = ReceiveRuns(fd_.get(), std::span(runs).first(run_count));
  std::uint64_t landed = transfer.bytes;
  for (std::size_t i = 0; i < run_count && landed != 0; ++i) {
    const auto part = std::min<std::uint64_t>(runs[i].size(), landed);
    checksum_.Add(runs[i].first(part));
    landed -= part;
  }
  return transfer;
}

Status TargetStream::HandleFrame(const FrameReader::Frame& frame) {
  if (frame.type == FrameType::kRefusal && stage_ != Stage::kReady) {
    TB_ASSIGN_OR_RETURN(const Failure refusal, ParseFailure(frame.body));
    return refusal.status;
  }
  if (stage_ == Stage::kChallenge && frame.type == FrameType::kChallenge) {
    return HandleChallenge(frame.body);
  }
  if (stage_ == Stage::kWelcome && frame.type == FrameType::kWelcome) {
    TB_RETURN_IF_ERROR(ParseWelcome(frame.body));
    loop_.CancelTimer(*handshake_timer_);
    handshake_timer_.reset();
    stage_ = Stage::kReady;
    return {};
  }
  if (stage_ == Stage::kReady && !windows_.empty()) {
    if (frame.type == FrameType::kData) return HandleData(frame.body);
    if (frame.type == FrameType::kTrailer) return HandleTrailer(frame.body);
    if (frame.type == FrameType::kFailure) return HandleFailure(frame.body);
  }
  return Unexpected(fmt::format("frame {} has no place here", static_cast<int>(frame.type)));
}

Status TargetStream::HandleChallenge(std::span<const std::byte> body) {
  TB_ASSIGN_OR_RETURN(const Challenge challenge, ParseChallenge(body));
  if (challenge.version != kTcpProtocolVersion) {
    return {Code::kFailedPrecondition,
            fmt::format("the source speaks tcp protocol {}, the target {}", challenge.version,
                        kTcpProtocolVersion),
            Reason::kProtocolVersion};
  }
  const std::string token = context_.options.Token();
  if (token.empty()) {
    return {Code::kUnavailable, "the target was not told the shared token yet"};
  }
  if (!SameMac(challenge.mac, SourceMac(token, nonce_, challenge.nonce))) {
    return {Code::kUnauthenticated, "the source does not know the shared token"};
  }
  source_nonce_ = challenge.nonce;
  out_.Append(Encode(Answer{.mac = TargetMac(token, nonce_, challenge.nonce)}));
  stage_ = Stage::kWelcome;
  return {};
}

Status TargetStream::HandleData(std::span<const std::byte> body) {
  TB_ASSIGN_OR_RETURN(const Data data, ParseData(body));
  const PullWindow& window = windows_.front();
  if (announced_ || data.id != window.id || data.first != window.first ||
      data.count != window.count) {
    return Unexpected("data that was not asked for");
  }
  const std::uint64_t runs = window.pull->map.RunCount(window.first, window.count);
  announced_ = true;
  packed_ = window.count < runs * kDirectRunBytes;
  received_ = 0;
  checksum_.Reset();
  if (window.pull->state.target().end().memory != nullptr) PrepareForeign(window);
  return {};
}

void TargetStream::PrepareForeign(const PullWindow& window) {
  if (buffer_.bytes().size() >= window.count) return;
  Result<StagingBudget::Lease> lease = context_.options.staging->TryAcquire(kForeignBufferBytes);
  if (lease.ok()) {
    buffer_ = ForeignBuffer(*std::move(lease));
  } else {
    window.pull->state.Fail(lease.status().Annotate(RouteName(window.pull->state.key())));
  }
}

Status TargetStream::HandleTrailer(std::span<const std::byte> body) {
  TB_ASSIGN_OR_RETURN(const Trailer trailer, ParseTrailer(body));
  const PullWindow& window = windows_.front();
  if (!announced_ || trailer.id != window.id) return Unexpected("a trailer without its data");
  std::size_t parts = 0;
  window.pull->map.ForEachPart(window.first, window.count, [&](const BlockPart&) { ++parts; });
  if (trailer.parts.size() != parts) return Unexpected("a trailer with other parts");
  if (window.pull->state.Enter()) {
    const bool arrived = CheckArrived(window, trailer);
    const bool foreign = window.pull->state.target().end().memory != nullptr;
    if (arrived && !foreign) Land(window, trailer);
    window.pull->state.Leave();
    if (arrived && foreign && window.count != 0) {
      LandForeign(window, trailer);
      return {};
    }
    if (arrived) window.pull->confirmed.store(true);
  }
  FinishWindow();
  return {};
}

bool TargetStream::CheckArrived(const PullWindow& window, const Trailer& trailer) {
  if (trailer.checksum == checksum_.Finish()) return true;
  PullState& pull = window.pull->state;
  const std::string detail =
      fmt::format("bytes {} to {} of the route changed on their way from {}", window.first,
                  window.first + window.count, peer_.endpoint());
  const std::optional<std::uint32_t> block = DamagedBlock(window, trailer);
  pull.Fail(block.has_value() ? BlockMismatch(pull.key(), *block, detail)
                              : RouteMismatch(pull.key(), detail));
  return false;
}

std::optional<std::uint32_t> TargetStream::DamagedBlock(const PullWindow& window,
                                                        const Trailer& trailer) {
  const RouteEnd& end = window.pull->state.target().end();
  std::vector<BlockPart> parts;
  window.pull->map.ForEachPart(window.first, window.count,
                               [&](const BlockPart& part) { parts.push_back(part); });
  if (parts.size() == 1) return parts[0].block;
  if (window.pull->state.options().proof == Proof::kOff) return std::nullopt;
  std::uint64_t packed = 0;  // bytes of the window before this part, for memory not in reach
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [block, range] = parts[i];
    const StridedBlock& placed = end.blocks[block];
    const DigestSum arrived = end.memory == nullptr
                                  ? kernels::DigestRange(placed, range)
                                  : DigestPacked(placed, range, buffer_.bytes().data() + packed);
    if (arrived.a != trailer.parts[i].a || arrived.b != trailer.parts[i].b) return block;
    packed += range.count;
  }
  return std::nullopt;
}

void TargetStream::LandForeign(const PullWindow& window, const Trailer& trailer) {
  struct Job {
    std::shared_ptr<TcpPull> pull;
    std::vector<BlockPart> parts;
    std::vector<DigestSum> sent;
    std::uint64_t bytes = 0;
    ForeignBuffer buffer;
  };
  const auto job = std::make_shared<Job>();
  job->pull = window.pull;
  job->bytes = window.count;
  job->buffer = std::move(buffer_);
  window.pull->map.ForEachPart(window.first, window.count, [&](const BlockPart& part) {
    const Trailer::Part& sums = trailer.parts[job->sent.size()];
    job->sent.push_back({.a = sums.a, .b = sums.b, .bytes = part.range.count});
    job->parts.push_back(part);
  });
  landing_ = true;
  context_.offload([self = shared_from_this(), connection = connection_, job] {
    PullState& state = job->pull->state;
    if (state.Enter()) {
      const LandingContext landing = {.key = state.key(),
                                      .target = state.target(),
                                      .proof = state.options().proof,
                                      .deadline = state.options().deadline,
                                      .hook = self->context_.options.landing_hook};
      const std::span<std::byte> bytes = job->buffer.bytes().first(job->bytes);
      Status status = WritePacked(state.target(), job->parts, bytes, landing.deadline);
      if (status.ok()) {
        status = LandWritten(
            landing, job->parts, job->sent, bytes,
            [&state](std::uint32_t block, const Landing& landed) { state.Add(block, landed); });
      }
      if (!status.ok()) state.Fail(status.Annotate(RouteName(state.key())));
      state.Leave();
    }
    job->pull->confirmed.store(true);
    self->context_.finish(job->pull);
    self->loop_.Post(
        [self, connection, job] { self->ForeignLanded(connection, std::move(job->buffer)); });
  });
}

void TargetStream::ForeignLanded(std::uint64_t connection, ForeignBuffer buffer) {
  if (connection != connection_) return;
  landing_ = false;
  buffer_ = std::move(buffer);
  FinishWindow();
  if (windows_.empty() && peer_.Pulls().empty()) buffer_ = ForeignBuffer();
  if (unwatched_) {
    unwatched_ = false;
    interest_ = EPOLLIN;
    const Status status = loop_.Watch(fd_.get(), interest_, shared_from_this());
    if (!status.ok()) return Fail(status);
  }
  OnReady(EPOLLIN);
}

void TargetStream::Land(const PullWindow& window, const Trailer& trailer) {
  TcpPull& pull = *window.pull;
  std::size_t next = 0;
  pull.map.ForEachPart(window.first, window.count, [&](const BlockPart& part) {
    const Trailer::Part& sums = trailer.parts[next++];
    const DigestSum sent = {.a = sums.a, .b = sums.b, .bytes = part.range.count};
    if (pull.state.failed()) return;
    pull.state.Add(part.block,
                   LandInPlace(pull.state.key(), sent, pull.state.target(), part.block, part.range,
                               pull.state.options().proof, context_.options.landing_hook));
  });
}

Status TargetStream::HandleFailure(std::span<const std::byte> body) {
  TB_ASSIGN_OR_RETURN(const Failure failure, ParseFailure(body));
  const PullWindow& window = windows_.front();
  if (failure.id != window.id) return Unexpected("a failure of another request");
  window.pull->state.Fail(failure.status.Annotate("peer " + peer_.endpoint()));
  FinishWindow();
  return {};
}

void TargetStream::FinishWindow() {
  const PullWindow window = std::move(windows_.front());
  windows_.pop_front();
  announced_ = false;
  asked_bytes_ -= window.count;
  peer_.Return(window);
  context_.finish(window.pull);
}

}  // namespace tensorbus::transport::tcp
