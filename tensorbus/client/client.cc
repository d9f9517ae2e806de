#include "tensorbus/client/client.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "tensorbus/base/mutex.h"
#include "tensorbus/base/printable.h"
#include "worker_shim/tensorbus_shim.h"

namespace tensorbus::client {
namespace {

static_assert(TB_MAX_DIMS == kMaxDims);

/// What this thread's last failed call said, all of it.
Status LastError() {
  std::array<char, 20'000> text = {};
  tb_error error = {};
  error.struct_size = sizeof error;
  error.message = text.data();
  error.message_capacity = static_cast<std::uint32_t>(text.size());
  const tb_status code = tb_last_error(&error);
  if (code == TB_OK) return {};
  return {static_cast<Code>(code), text.data(), static_cast<Reason>(error.reason), error.native};
}

Status ToStatus(tb_status code) {
  return code == TB_OK ? Status() : LastError();
}

std::int64_t Count(Nanos duration) {
  return duration.count();
}

tb_tensor ToTensor(const TensorSpec& spec) {
  tb_tensor out = {};
  out.struct_size = sizeof out;
  out.dtype = static_cast<std::uint32_t>(spec.dtype);
  out.name = spec.name.c_str();
  out.rank = static_cast<std::uint32_t>(spec.shape.rank());
  std::copy(spec.shape.dims().begin(), spec.shape.dims().end(), out.shape);
  return out;
}

tb_piece ToPiece(const Piece& piece) {
  tb_piece out = {};
  out.struct_size = sizeof out;
  out.tensor = piece.tensor;
  out.segment = piece.segment;
  out.rank = static_cast<std::uint32_t>(piece.box.rank());
  for (int d = 0; d < piece.box.rank(); ++d) {
    out.lo[d] = piece.box[d].lo;
    out.hi[d] = piece.box[d].hi;
    out.strides[d] = piece.strides[static_cast<std::size_t>(d)];
  }
  out.offset = piece.offset;
  return out;
}

}  // namespace

// ---- Arena

struct Arena::Impl {
  explicit Impl(tb_arena* a) : arena(a) {}
  ~Impl() { tb_arena_destroy(arena); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  tb_arena* arena;
};

Arena::Arena(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<Arena> Arena::Create(std::uint64_t bytes) {
  tb_arena* arena = nullptr;
  TB_RETURN_IF_ERROR(ToStatus(tb_arena_create(bytes, &arena)));
  return Arena(std::make_shared<Impl>(arena));
}

Result<std::span<std::byte>> Arena::Allocate(std::uint64_t bytes, std::uint64_t alignment) {
  std::uint64_t offset = 0;
  TB_RETURN_IF_ERROR(ToStatus(tb_arena_allocate(impl_->arena, bytes, alignment, &offset)));
  return memory().subspan(offset, bytes);
}

std::span<std::byte> Arena::memory() const {
  return {static_cast<std::byte*>(tb_arena_data(impl_->arena)), tb_arena_size(impl_->arena)};
}

std::uint64_t Arena::used() const {
  return tb_arena_used(impl_->arena);
}

int Arena::fd() const {
  return tb_arena_fd(impl_->arena);
}

// ---- Request

Request::Request(Request&& other) noexcept
    : client_(std::exchange(other.client_, nullptr)), id_(std::exchange(other.id_, 0)) {}

Request& Request::operator=(Request&& other) noexcept {
  if (this != &other) {
    Request dying(client_, id_);
    client_ = std::exchange(other.client_, nullptr);
    id_ = std::exchange(other.id_, 0);
  }
  return *this;
}

Request::~Request() {
  if (client_ != nullptr) tb_forget(static_cast<tb_client*>(client_), id_);
}

Result<Outcome> Request::Wait(Nanos timeout) {
  if (client_ == nullptr) return Status(Code::kFailedPrecondition, "this request has ended");
  tb_outcome out = {};
  out.struct_size = sizeof out;
  const tb_status code = tb_wait(static_cast<tb_client*>(client_), id_, Count(timeout), &out);
  if (out.done != 0) client_ = nullptr;
  TB_RETURN_IF_ERROR(ToStatus(code));
  return Outcome{.version = Version{out.version},
                 .session = SessionId{out.session},
                 .bytes = out.bytes,
                 .seconds = out.seconds,
                 .copy_seconds = out.copy_seconds,
                 .digest = {out.digest_a, out.digest_b, out.bytes}};
}

void Request::Explain() {
  if (client_ != nullptr) tb_explain(static_cast<tb_client*>(client_), id_);
}

bool Request::done() const {
  return client_ == nullptr || tb_done(static_cast<tb_client*>(client_), id_) != 0;
}

// ---- Client

struct Client::Impl {
  explicit Impl(tb_client* c) : client(c) {}
  ~Impl() { tb_disconnect(client); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  static tb_status RunHook(void* context, const tb_hook_event* event) {
    auto* const self = static_cast<Impl*>(context);
    Hook hook;
    {
      MutexLock lock(self->mutex);
      hook = self->hook;
    }
    if (!hook) return TB_OK;
    const Status status = hook({.kind = static_cast<HookKind>(event->kind),
                                .session = SessionId{event->session},
                                .version = Version{event->version},
                                .timeout = Nanos(event->timeout_ns)});
    if (status.ok()) return TB_OK;
    const std::string text = Shortened(status.message(), event->message_capacity - 1);
    std::memcpy(event->message, text.c_str(), text.size() + 1);
    return static_cast<tb_status>(status.code());
  }

  Result<Request> Made(tb_status code, tb_request id) {
    TB_RETURN_IF_ERROR(ToStatus(code));
    return Request(client, id);
  }

  tb_client* client;
  Mutex mutex;
  Hook hook TB_GUARDED_BY(mutex);
  std::vector<Arena> arenas TB_GUARDED_BY(mutex);
};

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::Client(Client&& other) noexcept = default;
Client& Client::operator=(Client&& other) noexcept = default;
Client::~Client() = default;

Result<Client> Client::Connect(const ConnectOptions& options) {
  tb_connect_options in = {};
  in.struct_size = sizeof in;
  in.role = static_cast<std::uint32_t>(options.identity.role);
  in.channel = options.identity.channel.c_str();
  in.job = options.identity.job.c_str();
  in.replica = options.identity.replica;
  in.rank = options.identity.rank;
  in.rank_count = options.identity.rank_count;
  in.agent_socket = options.agent_socket.empty() ? nullptr : options.agent_socket.c_str();
  in.agent_uid = options.agent_uid.has_value() ? std::int64_t{*options.agent_uid} : -1;
  in.library = options.library.empty() ? nullptr : options.library.c_str();
  in.timeout_ns = Count(options.timeout);
  tb_client* client = nullptr;
  TB_RETURN_IF_ERROR(ToStatus(tb_connect(&in, &client)));
  return Client(std::make_unique<Impl>(client));
}

void Client::SetHook(Hook hook) {
  const bool any = static_cast<bool>(hook);
  {
    MutexLock lock(impl_->mutex);
    impl_->hook = std::move(hook);
  }
  tb_set_hook(impl_->client, any ? &Impl::RunHook : nullptr, impl_.get());
}

Result<std::uint32_t> Client::Attach(const Arena& arena) {
  TB_ASSIGN_OR_RETURN(const std::uint32_t segment, AttachShared(arena.memory(), arena.fd()));
  MutexLock lock(impl_->mutex);
  impl_->arenas.push_back(arena);
  return segment;
}

Result<std::uint32_t> Client::AttachShared(std::span<std::byte> memory, int fd) {
  std::uint32_t segment = 0;
  TB_RETURN_IF_ERROR(
      ToStatus(tb_attach(impl_->client, memory.data(), memory.size(), fd, &segment)));
  return segment;
}

Result<std::uint32_t> Client::AttachPrivate(std::span<std::byte> memory) {
  return AttachShared(memory, -1);
}

Status Client::DetachAll() {
  TB_RETURN_IF_ERROR(ToStatus(tb_detach_all(impl_->client)));
  MutexLock lock(impl_->mutex);
  impl_->arenas.clear();
  return {};
}

Result<Registered> Client::Register(const RegisterOptions& options) {
  std::vector<tb_tensor> tensors;
  tensors.reserve(options.tensors.size());
  for (const TensorSpec& spec : options.tensors) tensors.push_back(ToTensor(spec));
  std::vector<tb_piece> pieces;
  pieces.reserve(options.pieces.size());
  for (const Piece& piece : options.pieces) pieces.push_back(ToPiece(piece));
  std::vector<const char*> leave_out;
  for (const std::string& name : options.leave_out) leave_out.push_back(name.c_str());

  tb_register_options in = {};
  in.struct_size = sizeof in;
  in.tensors = tensors.data();
  in.tensor_count = static_cast<std::uint32_t>(tensors.size());
  in.pieces = pieces.data();
  in.piece_count = static_cast<std::uint32_t>(pieces.size());
  in.flip = static_cast<std::uint32_t>(options.flip);
  in.proof = static_cast<std::uint32_t>(options.proof);
  in.leave_out = leave_out.data();
  in.leave_out_count = static_cast<std::uint32_t>(leave_out.size());
  if (options.private_mode.has_value()) {
    in.private_mode = static_cast<std::uint32_t>(*options.private_mode);
  }
  in.timeout_ns = Count(options.timeout);
  tb_registered out = {};
  out.struct_size = sizeof out;
  TB_RETURN_IF_ERROR(ToStatus(tb_register(impl_->client, &in, &out)));
  return Registered{.mode = static_cast<MemoryMode>(out.mode),
                    .why = out.why,
                    .expected_gb_per_s = out.expected_gb_per_s,
                    .epoch = ChannelEpoch{out.epoch},
                    .latest_version = Version{out.latest_version},
                    .register_seconds = out.register_seconds,
                    .prefault_seconds = out.prefault_seconds};
}

Status Client::Reconnect(Nanos timeout, const std::function<bool()>& stop) {
  const auto ask = [](void* context) -> int {
    return (*static_cast<const std::function<bool()>*>(context))() ? 1 : 0;
  };
  return ToStatus(tb_reconnect_unless(impl_->client, Count(timeout), stop ? +ask : nullptr,
                                      const_cast<std::function<bool()>*>(&stop)));
}

Result<Request> Client::Publish(const PublishOptions& options) {
  tb_publish_options in = {};
  in.struct_size = sizeof in;
  in.policy = static_cast<std::uint32_t>(options.policy);
  in.version = options.version.value;
  in.min_replicas = options.min_replicas;
  in.receipts = options.receipts ? 1 : 0;
  in.keep_last = options.keep_last;
  tb_request id = 0;
  const tb_status code = tb_publish(impl_->client, &in, &id);
  return impl_->Made(code, id);
}

Result<Request> Client::RequestRelease(Version version, Nanos timeout) {
  tb_request id = 0;
  const tb_status code = tb_request_release(impl_->client, version.value, Count(timeout), &id);
  return impl_->Made(code, id);
}

Result<Nanos> Client::BeforeWrite(Nanos timeout) {
  double seconds = 0;
  TB_RETURN_IF_ERROR(ToStatus(tb_before_write(impl_->client, Count(timeout), &seconds)));
  return std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(seconds));
}

Version Client::released_version() const {
  return Version{tb_released_version(impl_->client)};
}

Result<Request> Client::Update(const UpdateOptions& options) {
  tb_update_options in = {};
  in.struct_size = sizeof in;
  in.selector = static_cast<std::uint32_t>(options.selector);
  in.version = options.version.value;
  in.timeout_ns = Count(options.timeout);
  tb_request id = 0;
  const tb_status code = tb_update(impl_->client, &in, &id);
  return impl_->Made(code, id);
}

Result<Request> Client::CancelUpdate() {
  tb_request id = 0;
  const tb_status code = tb_cancel_update(impl_->client, &id);
  return impl_->Made(code, id);
}

Result<Request> Client::Claim() {
  tb_request id = 0;
  const tb_status code = tb_claim(impl_->client, &id);
  return impl_->Made(code, id);
}

Version Client::live_version() const {
  return Version{tb_live_version(impl_->client)};
}

Status Client::Poll() {
  return ToStatus(tb_poll(impl_->client));
}

Result<int> Client::PollFd() {
  const int fd = tb_poll_fd(impl_->client);
  if (fd < 0) return LastError();
  return fd;
}

Status Client::StartService() {
  return ToStatus(tb_service_start(impl_->client));
}

Status Client::StopService() {
  return ToStatus(tb_service_stop(impl_->client));
}

Status Client::connection() const {
  return ToStatus(tb_connection(impl_->client));
}

std::string Client::agent_name() const {
  std::array<char, 1024> name = {};
  tb_agent_name(impl_->client, name.data(), static_cast<std::uint32_t>(name.size()));
  return name.data();
}

}  // namespace tensorbus::client
