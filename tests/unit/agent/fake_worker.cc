#include "tests/unit/agent/fake_worker.h"

#include <cstring>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace tensorbus::testing {
namespace {

constexpr Nanos kPatience = std::chrono::seconds(20);

TimePoint Deadline() {
  return std::chrono::steady_clock::now() + kPatience;
}

}  // namespace

FakeWorker::FakeWorker(std::string socket_path, RankIdentity identity)
    : socket_path_(std::move(socket_path)), identity_(std::move(identity)) {
  page_fd_ = *CreateMemfd("test-page", wire::kControlPageBytes);
  page_ = *Mapping::Create(page_fd_.get(), wire::kControlPageBytes, Mapping::Access::kReadWrite);
  new (page_.data()) wire::ControlPage();
}

float FakeWorker::ValueAt(std::uint64_t linear, std::uint32_t seed) {
  return static_cast<float>((linear * 31 + seed * 1009) % 16777213);
}

FakeWorker::~FakeWorker() {
  Disconnect();
}

void FakeWorker::AddTensor(const std::string& name, const Shape& shape, const Box& box) {
  if (registration.segment_bytes.empty()) registration.segment_bytes.push_back(0);
  std::uint32_t tensor = 0;
  while (tensor < registration.tensors.size() && registration.tensors[tensor].name != name) {
    ++tensor;
  }
  if (tensor == registration.tensors.size()) {
    registration.tensors.push_back({.name = name, .dtype = DType::kF32, .shape = shape});
  }
  Piece piece;
  piece.tensor = tensor;
  piece.box = box;
  piece.offset = registration.segment_bytes[0];
  std::uint64_t stride = 4;
  for (int d = box.rank() - 1; d >= 0; --d) {
    piece.strides[static_cast<std::size_t>(d)] = stride;
    stride *= box[d].size();
  }
  registration.segment_bytes[0] += box.volume() * 4;
  registration.pieces.push_back(piece);
}

void FakeWorker::AddAlias() {
  Piece alias = registration.pieces.back();
  alias.offset = registration.segment_bytes[0];
  registration.segment_bytes[0] += alias.box.volume() * 4;
  registration.pieces.push_back(alias);
}

void FakeWorker::UsePrivateMemory(std::uint8_t mode) {
  private_mode_ = mode;
}

void FakeWorker::ServeBuckets(bool serve) {
  MutexLock lock(mutex_);
  serve_buckets_ = serve;
}

void FakeWorker::HoldBuckets(bool hold) {
  MutexLock lock(mutex_);
  hold_buckets_ = hold;
  changed_.NotifyAll();
}

std::uint64_t FakeWorker::bucket_orders() const {
  MutexLock lock(mutex_);
  return bucket_orders_;
}

Status FakeWorker::Connect() {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, socket_path_.data(), socket_path_.size());
  socket_ = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return ErrnoStatus(errno, "connect " + socket_path_);
  }
  thread_ = std::thread([this] { Serve(); });
  wire::Hello hello;
  hello.identity = identity_;
  hello.pid = static_cast<std::uint32_t>(::getpid());
  hello.library = "test";
  std::vector<UniqueFd> fds;
  fds.emplace_back(::fcntl(page_fd_.get(), F_DUPFD_CLOEXEC, 0));
  TB_ASSIGN_OR_RETURN(const wire::Frame frame,
                      Ask(wire::MessageType::kHello, wire::Encode(hello), std::move(fds)));
  TB_ASSIGN_OR_RETURN(const wire::Welcome welcome, wire::Decode<wire::Welcome>(frame.body));
  return welcome.status;
}

Result<wire::Registered> FakeWorker::Register(FlipMode flip, Proof proof) {
  arena_fd_ = *CreateMemfd("test-arena", registration.segment_bytes[0]);
  arena_ =
      *Mapping::Create(arena_fd_.get(), registration.segment_bytes[0], Mapping::Access::kReadWrite);
  wire::AttachSegment attach;
  attach.mapped = !private_mode_.has_value();
  attach.bytes = registration.segment_bytes[0];
  attach.address = reinterpret_cast<std::uintptr_t>(arena_.data());
  std::vector<UniqueFd> fds;
  if (attach.mapped) fds.emplace_back(::fcntl(arena_fd_.get(), F_DUPFD_CLOEXEC, 0));
  buckets_.SetMemory(registration, {arena_.data()});
  TB_ASSIGN_OR_RETURN(const wire::Frame attached,
                      Ask(wire::MessageType::kAttachSegment, wire::Encode(attach), std::move(fds)));
  TB_ASSIGN_OR_RETURN(const wire::Reply reply, wire::Decode<wire::Reply>(attached.body));
  TB_RETURN_IF_ERROR(reply.status);
  wire::Register ask;
  ask.registration = registration;
  ask.flip = flip;
  ask.proof = proof;
  ask.private_mode = private_mode_.value_or(0);
  ask.back = back;
  TB_ASSIGN_OR_RETURN(const wire::Frame frame,
                      Ask(wire::MessageType::kRegister, wire::Encode(ask)));
  TB_ASSIGN_OR_RETURN(const wire::Registered registered,
                      wire::Decode<wire::Registered>(frame.body));
  TB_RETURN_IF_ERROR(registered.status);
  return registered;
}

Status FakeWorker::Publish(std::uint64_t version, wire::SlowConsumer policy, bool receipts) {
  wire::Publish publish;
  publish.version = Version{version};
  publish.policy = policy;
  publish.receipts = receipts;
  publish.keep_last = policy == wire::SlowConsumer::kSnapshot ? 1 : 0;
  TB_ASSIGN_OR_RETURN(const wire::Frame frame,
                      Ask(wire::MessageType::kPublish, wire::Encode(publish)));
  TB_ASSIGN_OR_RETURN(const wire::Reply reply, wire::Decode<wire::Reply>(frame.body));
  return reply.status;
}

wire::Updated FakeWorker::Update(std::uint64_t timeout_ms) {
  return AwaitUpdate(StartUpdate(timeout_ms));
}

std::uint64_t FakeWorker::StartUpdate(std::uint64_t timeout_ms) {
  wire::Update update;
  update.timeout_ms = timeout_ms;
  const std::uint64_t request = next_request_++;
  EXPECT_TRUE(Send(wire::MessageType::kUpdate, request, wire::Encode(update)).ok());
  return request;
}

wire::Updated FakeWorker::AwaitUpdate(std::uint64_t request) {
  wire::Updated failed;
  Result<wire::Frame> frame = Await(request);
  if (!frame.ok()) {
    failed.status = frame.status();
    return failed;
  }
  Result<wire::Updated> updated = wire::Decode<wire::Updated>(frame->body);
  if (updated.ok()) return *updated;
  failed.status = updated.status();
  return failed;
}

wire::Released FakeWorker::Release(std::uint64_t version, std::uint64_t timeout_ms) {
  wire::RequestRelease ask;
  ask.version = Version{version};
  ask.timeout_ms = timeout_ms;
  wire::Released failed;
  Result<wire::Frame> frame = Ask(wire::MessageType::kRequestRelease, wire::Encode(ask));
  if (!frame.ok()) {
    failed.status = frame.status();
    return failed;
  }
  return *wire::Decode<wire::Released>(frame->body);
}

void FakeWorker::BumpWriteCount() {
  ++page().write_count;
}

void FakeWorker::Goodbye() {
  EXPECT_TRUE(Send(wire::MessageType::kGoodbye, 0, {}).ok());
}

void FakeWorker::Disconnect() {
  if (socket_.valid()) ::shutdown(socket_.get(), SHUT_RDWR);
  if (thread_.joinable()) thread_.join();
  socket_.reset();
}

void FakeWorker::SetHook(std::function<Status(wire::MessageType)> hook) {
  MutexLock lock(mutex_);
  hook_ = std::move(hook);
}

std::vector<wire::MessageType> FakeWorker::hooks() const {
  MutexLock lock(mutex_);
  return hooks_;
}

Status FakeWorker::broken_off() const {
  MutexLock lock(mutex_);
  return broken_off_;
}

std::vector<wire::Updated> FakeWorker::unasked() const {
  MutexLock lock(mutex_);
  return unasked_;
}

float& FakeWorker::At(std::size_t piece, std::uint64_t i) {
  return reinterpret_cast<float*>(arena_.data() + registration.pieces[piece].offset)[i];
}

std::uint64_t FakeWorker::ElementCount(std::size_t piece) const {
  return registration.pieces[piece].box.volume();
}

namespace {

/// Place in the logical tensor of element `i` of a box, both row-major.
std::uint64_t LinearIndex(const Box& box, const Shape& shape, std::uint64_t i) {
  std::uint64_t linear = 0;
  std::uint64_t stride = 1;
  for (int d = box.rank() - 1; d >= 0; --d) {
    linear += (box[d].lo + i % box[d].size()) * stride;
    i /= box[d].size();
    stride *= shape[d];
  }
  return linear;
}

/// Calls `visit(i, linear)` for every element of a box: its place there and in the logical tensor.
template <typename Visit>
void ForEachElement(const Box& box, const Shape& shape, const Visit& visit) {
  const std::uint64_t row = box.rank() == 0 ? 1 : box[box.rank() - 1].size();
  for (std::uint64_t i = 0; i < box.volume(); i += row) {
    const std::uint64_t linear = LinearIndex(box, shape, i);
    for (std::uint64_t k = 0; k < row; ++k) visit(i + k, linear + k);
  }
}

}  // namespace

void FakeWorker::Fill(std::uint32_t seed) {
  for (const Piece& piece : registration.pieces) {
    auto* values = reinterpret_cast<float*>(arena_.data() + piece.offset);
    ForEachElement(piece.box, registration.tensors[piece.tensor].shape,
                   [&](std::uint64_t i, std::uint64_t linear) {
                     values[i] = ValueAt(linear + piece.tensor * 7919, seed);
                   });
  }
}

std::uint64_t FakeWorker::CountWrong(std::uint32_t seed) const {
  std::uint64_t wrong = 0;
  for (const Piece& piece : registration.pieces) {
    const auto* values = reinterpret_cast<const float*>(arena_.data() + piece.offset);
    ForEachElement(piece.box, registration.tensors[piece.tensor].shape,
                   [&](std::uint64_t i, std::uint64_t linear) {
                     if (values[i] != ValueAt(linear + piece.tensor * 7919, seed)) ++wrong;
                   });
  }
  return wrong;
}

const wire::ControlPage& FakeWorker::page() const {
  return *reinterpret_cast<const wire::ControlPage*>(page_.data());
}
wire::ControlPage& FakeWorker::page() {
  return *reinterpret_cast<wire::ControlPage*>(page_.data());
}

void FakeWorker::Serve() {
  wire::FrameReader reader;
  for (;;) {
    Result<wire::Frame> frame = wire::ReadBefore(
        socket_.get(), reader, std::chrono::steady_clock::now() + std::chrono::hours(1));
    if (!frame.ok()) {
      MutexLock lock(mutex_);
      closed_ = true;
      changed_.NotifyAll();
      return;
    }
    Handle(*std::move(frame));
  }
}

void FakeWorker::Handle(wire::Frame frame) {
  using wire::MessageType;
  if (frame.type == MessageType::kAttachBucket || frame.type == MessageType::kPack ||
      frame.type == MessageType::kUnpack) {
    return HandleBucket(std::move(frame));
  }
  if (frame.type == MessageType::kFence || frame.type == MessageType::kFlipBegin ||
      frame.type == MessageType::kLive) {
    std::function<Status(MessageType)> hook;
    {
      MutexLock lock(mutex_);
      hook = hook_;
    }
    wire::HookDone done;
    if (hook) done.status = hook(frame.type);
    {
      MutexLock lock(mutex_);
      hooks_.push_back(frame.type);
    }
    [[maybe_unused]] const Status sent =
        Send(MessageType::kHookDone, frame.request, wire::Encode(done));
    return;
  }
  MutexLock lock(mutex_);
  if (frame.request != 0) {
    answers_[frame.request] = std::move(frame);
  } else if (frame.type == MessageType::kBrokenOff) {
    broken_off_ = wire::Decode<wire::Reply>(frame.body)->status;
  } else if (frame.type == MessageType::kUpdated) {
    unasked_.push_back(*wire::Decode<wire::Updated>(frame.body));
  } else if (frame.type == MessageType::kWelcome) {
    answers_[1] = std::move(frame);  // a refusal before the hello was read
  }
  changed_.NotifyAll();
}

void FakeWorker::HandleBucket(wire::Frame frame) {
  if (frame.type == wire::MessageType::kAttachBucket) {
    EXPECT_TRUE(
        buckets_.Attach(*wire::Decode<wire::AttachBucket>(frame.body), std::move(frame.fds.at(0)))
            .ok());
    return;
  }
  {
    MutexLock lock(mutex_);
    ++bucket_orders_;
    const TimePoint deadline = Deadline();
    while (hold_buckets_ && changed_.WaitUntil(mutex_, deadline)) {
    }
    if (!serve_buckets_) return;
  }
  const wire::BucketWork work = *wire::Decode<wire::BucketWork>(frame.body);
  wire::BucketDone done;
  done.status =
      frame.type == wire::MessageType::kPack ? buckets_.Pack(work) : buckets_.Unpack(work);
  [[maybe_unused]] const Status sent =
      Send(wire::MessageType::kBucketDone, frame.request, wire::Encode(done));
}

Status FakeWorker::Send(wire::MessageType type, std::uint64_t request, std::vector<std::byte> body,
                        std::vector<UniqueFd> fds) {
  MutexLock lock(send_mutex_);
  wire::FrameWriter writer;
  TB_RETURN_IF_ERROR(writer.Add(type, request, std::move(body), std::move(fds)));
  return wire::FlushBefore(socket_.get(), writer, Deadline());
}

Result<wire::Frame> FakeWorker::Ask(wire::MessageType type, std::vector<std::byte> body,
                                    std::vector<UniqueFd> fds) {
  const std::uint64_t request = next_request_++;
  const Status sent = Send(type, request, std::move(body), std::move(fds));
  Result<wire::Frame> answer = Await(request);
  if (!answer.ok() && !sent.ok()) return sent;
  return answer;
}

Result<wire::Frame> FakeWorker::Explain(std::uint64_t request) {
  TB_RETURN_IF_ERROR(Send(wire::MessageType::kExplain, request, {}));
  return Await(request);
}

Result<wire::Frame> FakeWorker::Await(std::uint64_t request) {
  const TimePoint deadline = Deadline();
  MutexLock lock(mutex_);
  while (!answers_.contains(request)) {
    if (closed_ && !broken_off_.ok()) return broken_off_;
    if (closed_) return Status(Code::kUnavailable, "the agent hung up", Reason::kPeerLost);
    if (!changed_.WaitUntil(mutex_, deadline)) {
      return Status(Code::kDeadlineExceeded, "no answer from the agent");
    }
  }
  wire::Frame frame = std::move(answers_[request]);
  answers_.erase(request);
  return frame;
}

}  // namespace tensorbus::testing
