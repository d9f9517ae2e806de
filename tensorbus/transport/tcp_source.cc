#include "tensorbus/transport/tcp_source.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <fmt/format.h>
#include <sys/epoll.h>

#include "tensorbus/kernels/copy.h"
#include "tensorbus/transport/foreign_landing.h"
#include "tensorbus/transport/route_check.h"
#include "tensorbus/transport/tcp_auth.h"

namespace tensorbus::transport::tcp {

SourceConnection::SourceConnection(IoLoop& loop, SourceContext& context, UniqueFd fd)
    : loop_(loop), context_(context), fd_(std::move(fd)) {
  ++context_.connections;
}

SourceConnection::~SourceConnection() {
  --context_.connections;
}

void SourceConnection::Start() {
  interest_ = EPOLLIN;
  if (const Status status = loop_.Watch(fd_.get(), interest_, shared_from_this()); !status.ok()) {
    context_.log.Write("tcp_connection_dropped", status);
    return fd_.reset();  // the peer sees the end of it
  }
  const auto when = std::chrono::steady_clock::now() + context_.options.handshake_timeout;
  handshake_timer_ = loop_.RunAt(when, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      self->handshake_timer_.reset();
      self->context_.log.Write("tcp_connection_dropped",
                               Status(Code::kDeadlineExceeded, "no handshake came in time"));
      self->Close();
    }
  });
}

void SourceConnection::Close() {
  if (!fd_.valid()) return;
  if (handshake_timer_.has_value()) loop_.CancelTimer(*handshake_timer_);
  handshake_timer_.reset();
  window_.reset();
  requests_.clear();
  buffer_ = ForeignBuffer();
  loop_.Unwatch(fd_.get());
  fd_.reset();
}

void SourceConnection::OnReady(std::uint32_t events) {
  if (!fd_.valid()) return;
  Status status;
  if ((events & (EPOLLERR | EPOLLHUP)) != 0) {
    status = Lost(peer_, SocketError(fd_.get()));
  } else if ((events & EPOLLIN) != 0) {
    status = Receive();
  }
  if (status.ok()) status = Flush();
  if (!status.ok()) {
    // A lost target is the target's affair; bytes that are no frames are worth a line.
    if (status.reason() != Reason::kPeerLost) {
      context_.log.Write("tcp_connection_dropped", status);
    }
    return Close();
  }
  if (stage_ == Stage::kRefused && out_.empty()) return Close();
  UpdateInterest();
}

void SourceConnection::UpdateInterest() {
  std::uint32_t interest = 0;
  if (requests_.size() < kRequestsMax && stage_ != Stage::kRefused) interest |= EPOLLIN;
  const bool has_answers = !loading_ && (window_.has_value() || !requests_.empty());
  if (!out_.empty() || has_answers) interest |= EPOLLOUT;
  if (interest == interest_) return;
  interest_ = interest;
  loop_.Rewatch(fd_.get(), interest);
}

Status SourceConnection::Receive() {
  while (stage_ != Stage::kRefused && requests_.size() < kRequestsMax) {
    TB_ASSIGN_OR_RETURN(const auto frame, reader_.Read(fd_.get(), peer_));
    if (!frame.has_value()) return {};
    TB_RETURN_IF_ERROR(HandleFrame(*frame));
  }
  return {};
}

Status SourceConnection::HandleFrame(const FrameReader::Frame& frame) {
  if (stage_ == Stage::kHello && frame.type == FrameType::kHello) return HandleHello(frame.body);
  if (stage_ == Stage::kAnswer && frame.type == FrameType::kAnswer) {
    return HandleAnswer(frame.body);
  }
  if (stage_ == Stage::kServing && frame.type == FrameType::kRequest) {
    TB_ASSIGN_OR_RETURN(const Request request, ParseRequest(frame.body));
    requests_.push_back(request);
    return {};
  }
  return {Code::kInvalidArgument,
          fmt::format("frame {} has no place here", static_cast<int>(frame.type)),
          Reason::kMalformed};
}

Status SourceConnection::HandleHello(std::span<const std::byte> body) {
  TB_ASSIGN_OR_RETURN(const Hello hello, ParseHello(body));
  if (hello.version != kTcpProtocolVersion) {
    Refuse(Status(Code::kFailedPrecondition,
                  fmt::format("the source speaks tcp protocol {}, the target {}",
                              kTcpProtocolVersion, hello.version),
                  Reason::kProtocolVersion));
    return {};
  }
  const std::string token = context_.options.Token();
  if (token.empty()) {
    Refuse(Status(Code::kUnavailable, "the source was not told the shared token yet"));
    return {};
  }
  target_nonce_ = hello.nonce;
  TB_ASSIGN_OR_RETURN(source_nonce_, MakeNonce());
  out_.Append(Encode(Challenge{
      .nonce = source_nonce_,
      .mac = SourceMac(token, target_nonce_, source_nonce_),
  }));
  stage_ = Stage::kAnswer;
  return {};
}

Status SourceConnection::HandleAnswer(std::span<const std::byte> body) {
  TB_ASSIGN_OR_RETURN(const Answer answer, ParseAnswer(body));
  const std::string token = context_.options.Token();
  if (!SameMac(answer.mac, TargetMac(token, target_nonce_, source_nonce_))) {
    Refuse(Status(Code::kUnauthenticated, "the target does not know the shared token"));
    return {};
  }
  if (handshake_timer_.has_value()) loop_.CancelTimer(*handshake_timer_);
  handshake_timer_.reset();
  out_.Append(EncodeWelcome());
  stage_ = Stage::kServing;
  return {};
}

void SourceConnection::Refuse(const Status& status) {
  context_.log.Write("tcp_connection_refused", status);
  out_.Append(EncodeRefusal(status));
  stage_ = Stage::kRefused;
}

Status SourceConnection::Flush() {
  for (std::uint64_t burst = 0; burst < kBurstBytes;) {
    Transfer transfer;
    if (!out_.empty()) {
      transfer = out_.Flush(fd_.get(), window_.has_value());
    } else if (window_.has_value() && window_->sent < window_->request.count) {
      transfer = SendStretch(*window_);
      burst += transfer.bytes;
    } else if (window_.has_value()) {
      FinishWindow();
    } else if (!requests_.empty()) {
      StartWindow();
    } else {
      return {};
    }
    if (transfer.would_block) return {};
    if (transfer.closed || transfer.error_number != 0) return Lost(peer_, transfer.error_number);
  }
  return {};
}

void SourceConnection::StartWindow() {
  const Request request = requests_.front();
  requests_.pop_front();
  std::shared_ptr<Exposure> source = context_.exposures.Find(request.key);
  if (source == nullptr) {
    return out_.Append(EncodeFailure(request.id, NotExposed(request.key)));
  }
  // Before anything of the source is told or read.
  const Mac expected = PullMac(source->end.capability, target_nonce_, source_nonce_, request.key);
  if (!SameMac(request.mac, expected)) {
    const Status refused = NotAllowed(request.key);
    context_.log.Write("tcp_pull_refused", refused);
    return out_.Append(EncodeFailure(request.id, refused));
  }
  if (source->shape != request.shape || source->end.blocks.size() != request.blocks ||
      source->map.bytes() != request.bytes) {
    const Status differs(
        Code::kInvalidArgument,
        fmt::format("{}: the two ends differ: {} blocks of {} bytes in all at the source, {} of {} "
                    "at the target, or other extents",
                    RouteName(request.key), source->end.blocks.size(), source->map.bytes(),
                    request.blocks, request.bytes),
        Reason::kPlanMismatch);
    return out_.Append(EncodeFailure(request.id, differs));
  }
  if (request.count != source->map.Window(request.first, request.count, kPartsMax)) {
    return out_.Append(EncodeFailure(
        request.id,
        Status(Code::kInvalidArgument, "a window touches too many blocks", Reason::kMalformed)));
  }
  const std::uint64_t runs = source->map.RunCount(request.first, request.count);
  const bool packed = request.count < runs * kDirectRunBytes;
  out_.Append(Encode(Data{.id = request.id, .first = request.first, .count = request.count}));
  window_.emplace(Window{.request = request, .source = std::move(source), .packed = packed});
  checksum_.Reset();
}

Transfer SourceConnection::SendStretch(Window& window) {
  const std::uint64_t at = window.request.first + window.sent;
  const std::uint64_t left = window.request.count - window.sent;
  const bool foreign = window.source->end.memory != nullptr;
  const std::span<std::byte> scratch = loop_.scratch();
  std::array<std::span<std::byte>, kRunsPerCall> runs;
  std::size_t run_count = 0;
  if (loading_) return {.would_block = true};
  const AccessScope access(window.source->gate);
  if (!access && window.failure.ok()) window.failure = WithdrawnMeanwhile(window.request.key);
  if (!window.failure.ok()) {
    runs[run_count++] = scratch.first(std::min<std::size_t>(scratch.size(), left));
    std::memset(scratch.data(), 0, runs[0].size());
  } else if (foreign) {
    const std::uint64_t used = window.sent - window.loaded_first;
    if (used == window.loaded_bytes) {
      Load(window);
      return {.would_block = true};
    }
    runs[run_count++] =
        buffer_.bytes().subspan(used, std::min(kStretchBytes, window.loaded_bytes - used));
  } else if (window.packed) {
    const auto bytes = std::min<std::size_t>(scratch.size(), left);
    std::size_t filled = 0;
    window.source->map.ForEachPart(at, bytes, [&](const BlockPart& part) {
      kernels::PackRange(window.source->end.blocks[part.block], part.range.first,
                         scratch.subspan(filled, part.range.count));
      filled += part.range.count;
    });
    runs[run_count++] = scratch.first(bytes);
  } else {
    StreamCursor cursor(window.source->map, window.source->end.blocks, at);
    std::uint64_t bytes = 0;
    while (run_count < runs.size() && bytes < std::min(left, kStretchBytes)) {
      runs[run_count] = cursor.Next(std::min(left, kStretchBytes) - bytes);
      bytes += runs[run_count++].size();
    }
  }
  const Transfer transfer = SendRuns(fd_.get(), std::span(runs).first(run_count), true);
  if (window.failure.ok()) Account(window, std::span(runs).first(run_count), transfer.bytes);
  window.sent += transfer.bytes;
  return transfer;
}

void SourceConnection::Load(Window& window) {
  loading_ = true;
  const std::uint64_t first = window.request.first + window.sent;
  const std::uint64_t count = std::min(kForeignBufferBytes, window.request.count - window.sent);
  // Shared, since a task has to be copyable.
  const auto buffer = std::make_shared<ForeignBuffer>(std::move(buffer_));
  context_.offload([self = shared_from_this(), load = ++loads_, source = window.source, first,
                    count, key = window.request.key, buffer] {
    const TimePoint deadline = source->end.deadline;
    Status status;
    if (buffer->empty()) {
      Result<StagingBudget::Lease> lease =
          self->context_.options.staging->Acquire(kForeignBufferBytes, deadline);
      if (lease.ok()) {
        *buffer = ForeignBuffer(*std::move(lease));
      } else {
        status = lease.status();
      }
    }
    if (status.ok()) {
      std::vector<BlockPart> parts;
      source->map.ForEachPart(first, count, [&](const BlockPart& part) { parts.push_back(part); });
      const AccessScope access(source->gate);
      status = access ? ReadParts(source->end, parts, buffer->bytes().first(count), deadline)
                      : WithdrawnMeanwhile(key);
    }
    self->loop_.Post([self, load, count, buffer, status] {
      self->Loaded(load, count, std::move(*buffer), status);
    });
  });
}

void SourceConnection::Loaded(std::uint64_t load, std::uint64_t bytes, ForeignBuffer buffer,
                              const Status& status) {
  if (load != loads_ || !fd_.valid() || !window_.has_value()) return;
  loading_ = false;
  buffer_ = std::move(buffer);
  window_->failure = status;
  window_->loaded_first = window_->sent;
  window_->loaded_bytes = status.ok() ? bytes : 0;
  OnReady(0);
}

void SourceConnection::Account(Window& window, std::span<const std::span<std::byte>> runs,
                               std::uint64_t bytes) {
  std::uint64_t left = bytes;
  for (const std::span<std::byte> run : runs) {
    const auto part = std::min<std::uint64_t>(run.size(), left);
    checksum_.Add(run.first(part));
    left -= part;
  }
  const RouteEnd& end = window.source->end;
  const std::byte* packed = runs[0].data();
  window.source->map.ForEachPart(
      window.request.first + window.sent, bytes, [&](const BlockPart& part) {
        if (window.parts.empty() || window.last_block != part.block) window.parts.push_back({});
        window.last_block = part.block;
        if (window.request.proof == Proof::kOff) return;
        const StridedBlock& block = end.blocks[part.block];
        const DigestSum sum = end.memory == nullptr ? kernels::DigestRange(block, part.range)
                                                    : DigestPacked(block, part.range, packed);
        packed += part.range.count;
        window.parts.back().a += sum.a;
        window.parts.back().b += sum.b;
      });
}

void SourceConnection::FinishWindow() {
  const Request& request = window_->request;
  if (!window_->failure.ok()) {
    out_.Append(EncodeFailure(request.id, window_->failure));
  } else {
    out_.Append(Encode(Trailer{
        .id = request.id, .checksum = checksum_.Finish(), .parts = std::move(window_->parts)}));
  }
  window_.reset();
  if (requests_.empty()) buffer_ = ForeignBuffer();
}

}  // namespace tensorbus::transport::tcp
