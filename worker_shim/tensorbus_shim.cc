#include "worker_shim/tensorbus_shim.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <new>
#include <string>

#include "worker_shim/arena.h"
#include "worker_shim/client.h"

// Only translation here: structs of any age to values, failures to numbers and a text.

using tensorbus::Box;
using tensorbus::Code;
using tensorbus::Nanos;
using tensorbus::Range;
using tensorbus::Result;
using tensorbus::Shape;
using tensorbus::Status;
using tensorbus::Version;
using tensorbus::worker_shim::Arena;
using tensorbus::worker_shim::Client;
using tensorbus::worker_shim::RequestId;
namespace wire = tensorbus::wire;

struct tb_client {
  std::unique_ptr<Client> client;
};

struct tb_arena {
  Arena arena;
};

namespace {

thread_local Status last_error;

tb_status Return(Status status) {
  const auto code = static_cast<tb_status>(status.code());
  if (!status.ok()) last_error = std::move(status);
  return code;
}

tb_status Invalid(std::string message) {
  return Return(Status(Code::kInvalidArgument, std::move(message)));
}

/// Nothing of ours throws; memory may run out below us.
template <typename Body>
tb_status Guarded(Body body) {
  try {
    return Return(body());
  } catch (const std::bad_alloc&) {
    return Return(
        Status(Code::kResourceExhausted, "out of memory", tensorbus::Reason::kOutOfMemory));
  } catch (const std::exception& e) {
    return Return(Status(Code::kInternal, e.what()));
  }
}

/// The caller's struct, older or newer than ours: what it does not have is zero, what we do not
/// know is left alone.
template <typename Struct>
bool ReadStruct(const Struct* in, Struct& out) {
  std::memset(&out, 0, sizeof out);
  if (in == nullptr || in->struct_size < sizeof(std::uint32_t)) return false;
  std::memcpy(&out, in, std::min<std::size_t>(in->struct_size, sizeof out));
  return true;
}

template <typename Struct>
void WriteStruct(const Struct& in, Struct* out) {
  if (out == nullptr || out->struct_size < sizeof(std::uint32_t)) return;
  const std::size_t size = std::min<std::size_t>(out->struct_size, sizeof in);
  const std::uint32_t struct_size = out->struct_size;
  std::memcpy(out, &in, size);
  out->struct_size = struct_size;
}

void WriteText(std::string_view text, char* out, std::uint32_t capacity) {
  if (out == nullptr || capacity == 0) return;
  const std::size_t size = std::min<std::size_t>(text.size(), capacity - 1);
  std::memcpy(out, text.data(), size);
  out[size] = '\0';
}

std::string Text(const char* text) {
  return text == nullptr ? std::string() : std::string(text);
}

/// Element `index` of an array whose elements are as long as the caller's structs.
template <typename Struct>
const Struct* Element(const Struct* first, std::uint32_t index) {
  return reinterpret_cast<const Struct*>(reinterpret_cast<const std::byte*>(first) +
                                         std::size_t{index} * first->struct_size);
}

Result<tensorbus::TensorSpec> TensorOf(const tb_tensor& in) {
  if (in.rank > TB_MAX_DIMS)
    return Status(Code::kInvalidArgument, "a tensor of too many dimensions");
  if (in.dtype > 255) return Status(Code::kInvalidArgument, "no such dtype");
  tensorbus::TensorSpec spec;
  spec.name = Text(in.name);
  TB_ASSIGN_OR_RETURN(spec.dtype, tensorbus::DTypeFromCode(static_cast<std::uint8_t>(in.dtype)));
  TB_ASSIGN_OR_RETURN(spec.shape, Shape::Create({in.shape, in.rank}));
  return spec;
}

Result<tensorbus::Piece> PieceOf(const tb_piece& in) {
  if (in.rank > TB_MAX_DIMS)
    return Status(Code::kInvalidArgument, "a piece of too many dimensions");
  tensorbus::Piece piece;
  piece.tensor = in.tensor;
  piece.segment = in.segment;
  piece.offset = in.offset;
  std::array<Range, TB_MAX_DIMS> ranges = {};
  for (std::size_t d = 0; d < in.rank; ++d) {
    ranges[d] = {in.lo[d], in.hi[d]};
    piece.strides[d] = in.strides[d];
  }
  piece.box = Box({ranges.data(), in.rank});
  return piece;
}

Result<wire::Register> RegisterOf(const tb_register_options& in) {
  wire::Register out;
  if ((in.tensor_count > 0 && in.tensors == nullptr) ||
      (in.piece_count > 0 && in.pieces == nullptr) ||
      (in.leave_out_count > 0 && in.leave_out == nullptr)) {
    return Status(Code::kInvalidArgument, "a count without its array");
  }
  out.registration.tensors.reserve(in.tensor_count);
  for (std::uint32_t i = 0; i < in.tensor_count; ++i) {
    tb_tensor tensor;
    if (!ReadStruct(Element(in.tensors, i), tensor)) {
      return Status(Code::kInvalidArgument, "a tensor without struct_size");
    }
    TB_ASSIGN_OR_RETURN(auto spec, TensorOf(tensor));
    out.registration.tensors.push_back(std::move(spec));
  }
  out.registration.pieces.reserve(in.piece_count);
  for (std::uint32_t i = 0; i < in.piece_count; ++i) {
    tb_piece piece;
    if (!ReadStruct(Element(in.pieces, i), piece)) {
      return Status(Code::kInvalidArgument, "a piece without struct_size");
    }
    TB_ASSIGN_OR_RETURN(auto converted, PieceOf(piece));
    out.registration.pieces.push_back(converted);
  }
  for (std::uint32_t i = 0; i < in.leave_out_count; ++i) {
    out.leave_out.push_back(Text(in.leave_out[i]));
  }
  if (in.flip > TB_FLIP_SHADOW || in.proof > TB_PROOF_MEMORY ||
      in.private_mode > TB_MEMORY_BUCKET) {
    return Status(Code::kInvalidArgument, "no such flip mode, proof or memory mode");
  }
  if (in.flip != 0) out.flip = static_cast<tensorbus::FlipMode>(in.flip);
  if (in.proof != 0) out.proof = static_cast<tensorbus::Proof>(in.proof);
  out.private_mode = static_cast<std::uint8_t>(in.private_mode);
  return out;
}

/// Hands out the number of a request that was made.
Status Give(const Result<RequestId>& request, tb_request* out) {
  if (!request.ok()) return request.status();
  *out = request->value;
  return {};
}

constexpr std::size_t kHookMessageBytes = 4096;

tensorbus::worker_shim::Hook WrapHook(tb_hook hook, void* context) {
  return [hook, context](tensorbus::worker_shim::HookKind kind, const wire::HookEvent& event) {
    std::array<char, kHookMessageBytes> message = {};
    tb_hook_event out = {};
    out.struct_size = sizeof out;
    out.kind = static_cast<std::uint32_t>(kind);
    out.session = event.session.value;
    out.version = event.version.value;
    out.timeout_ns = static_cast<std::int64_t>(
                         std::min<std::uint64_t>(event.timeout_ms, std::uint64_t{1} << 40)) *
                     1'000'000;
    out.message = message.data();
    out.message_capacity = static_cast<std::uint32_t>(message.size());
    const tb_status code = hook(context, &out);
    if (code == TB_OK) return Status();
    message.back() = '\0';
    const bool known = code > TB_OK && code <= TB_UNAUTHENTICATED;
    return Status(known ? static_cast<Code>(code) : Code::kUnknown,
                  message[0] == '\0' ? std::string("the worker's hook failed") : message.data());
  };
}

}  // namespace

extern "C" {

uint32_t tb_abi_version(void) {
  return TB_ABI_VERSION;
}

const char* tb_version(void) {
  return TENSORBUS_VERSION;
}

tb_status tb_last_error(tb_error* out) {
  tb_error error;
  if (ReadStruct(out, error)) {
    error.code = static_cast<tb_status>(last_error.code());
    error.reason = static_cast<int32_t>(last_error.reason());
    error.native = last_error.native();
    WriteText(last_error.message(), error.message, error.message_capacity);
    error.message_size = static_cast<uint32_t>(last_error.message().size());
    WriteStruct(error, out);
  }
  return static_cast<tb_status>(last_error.code());
}

// ---- connection

tb_status tb_connect(const tb_connect_options* options, tb_client** out) {
  tb_connect_options in;
  if (out == nullptr || !ReadStruct(options, in)) return Invalid("options or out are missing");
  if (in.role != TB_PRODUCER && in.role != TB_CONSUMER) return Invalid("role");
  return Guarded([&]() -> Status {
    tensorbus::worker_shim::ConnectOptions connect;
    connect.identity.channel = Text(in.channel);
    connect.identity.job = Text(in.job);
    connect.identity.role = static_cast<tensorbus::Role>(in.role);
    connect.identity.replica = in.replica;
    connect.identity.rank = in.rank;
    connect.identity.rank_count = in.rank_count;
    connect.agent_socket = Text(in.agent_socket);
    if (in.agent_uid >= 0) connect.agent_uid = static_cast<uid_t>(in.agent_uid);
    connect.library = in.library == nullptr ? "tensorbus " TENSORBUS_VERSION : in.library;
    connect.timeout = Nanos(in.timeout_ns);
    TB_ASSIGN_OR_RETURN(auto client, Client::Connect(std::move(connect)));
    *out = new tb_client{std::move(client)};
    return {};
  });
}

void tb_disconnect(tb_client* client) {
  delete client;
}

tb_status tb_reconnect(tb_client* client, int64_t timeout_ns) {
  return Guarded([&] { return client->client->Reconnect(Nanos(timeout_ns)).status(); });
}

tb_status tb_reconnect_unless(tb_client* client, int64_t timeout_ns, int (*stop)(void* context),
                              void* context) {
  return Guarded([&] {
    std::function<bool()> asked;
    if (stop != nullptr) asked = [=] { return stop(context) != 0; };
    return client->client->Reconnect(Nanos(timeout_ns), asked).status();
  });
}

tb_status tb_connection(tb_client* client) {
  return Guarded([&] { return client->client->connection(); });
}

tb_status tb_agent_name(tb_client* client, char* out, uint32_t capacity) {
  return Guarded([&] {
    WriteText(client->client->agent_name(), out, capacity);
    return Status();
  });
}

// ---- memory

tb_status tb_arena_create(uint64_t bytes, tb_arena** out) {
  if (out == nullptr) return Invalid("out is missing");
  return Guarded([&]() -> Status {
    TB_ASSIGN_OR_RETURN(Arena arena, Arena::Create(bytes));
    *out = new tb_arena{std::move(arena)};
    return {};
  });
}

void tb_arena_destroy(tb_arena* arena) {
  delete arena;
}

void* tb_arena_data(const tb_arena* arena) {
  return arena->arena.data();
}

uint64_t tb_arena_size(const tb_arena* arena) {
  return arena->arena.size();
}

uint64_t tb_arena_used(const tb_arena* arena) {
  return arena->arena.used();
}

int tb_arena_fd(const tb_arena* arena) {
  return arena->arena.fd();
}

tb_status tb_arena_allocate(tb_arena* arena, uint64_t bytes, uint64_t alignment, uint64_t* offset) {
  if (offset == nullptr) return Invalid("offset is missing");
  return Guarded([&]() -> Status {
    TB_ASSIGN_OR_RETURN(*offset, arena->arena.Allocate(bytes, alignment));
    return {};
  });
}

tb_status tb_attach(tb_client* client, void* address, uint64_t bytes, int fd, uint32_t* segment) {
  if (segment == nullptr) return Invalid("segment is missing");
  return Guarded([&]() -> Status {
    TB_ASSIGN_OR_RETURN(*segment,
                        client->client->Attach({static_cast<std::byte*>(address), bytes, fd}));
    return {};
  });
}

tb_status tb_detach_all(tb_client* client) {
  return Guarded([&] {
    client->client->DetachAll();
    return Status();
  });
}

// ---- registration

tb_status tb_register(tb_client* client, const tb_register_options* options, tb_registered* out) {
  tb_register_options in;
  if (!ReadStruct(options, in)) return Invalid("options are missing");
  return Guarded([&]() -> Status {
    TB_ASSIGN_OR_RETURN(wire::Register message, RegisterOf(in));
    TB_ASSIGN_OR_RETURN(const wire::Registered registered,
                        client->client->Register(std::move(message), Nanos(in.timeout_ns)));
    tb_registered result = {};
    result.mode = static_cast<uint32_t>(registered.mode);
    result.expected_gb_per_s = registered.expected_gb_per_s;
    result.epoch = registered.epoch.value;
    result.latest_version = registered.latest_version.value;
    result.register_seconds = registered.register_seconds;
    result.prefault_seconds = registered.prefault_seconds;
    WriteText(registered.why, result.why, sizeof result.why);
    WriteStruct(result, out);
    return {};
  });
}

// ---- requests

tb_status tb_wait(tb_client* client, tb_request request, int64_t timeout_ns, tb_outcome* out) {
  return Guarded([&]() -> Status {
    tb_outcome result = {};
    const auto outcome = client->client->Wait(RequestId{request}, Nanos(timeout_ns));
    if (!outcome.ok()) {
      WriteStruct(result, out);
      return outcome.status();
    }
    result.done = 1;
    result.version = outcome->version.value;
    result.session = outcome->session.value;
    result.bytes = outcome->bytes;
    result.seconds = outcome->seconds;
    result.copy_seconds = outcome->copy_seconds;
    result.digest_a = outcome->digest.a;
    result.digest_b = outcome->digest.b;
    WriteStruct(result, out);
    return outcome->status;
  });
}

void tb_explain(tb_client* client, tb_request request) {
  client->client->Explain(RequestId{request});
}

int tb_done(tb_client* client, tb_request request) {
  return client->client->Done(RequestId{request}) ? 1 : 0;
}

void tb_forget(tb_client* client, tb_request request) {
  client->client->Forget(RequestId{request});
}

tb_status tb_poll(tb_client* client) {
  return Guarded([&] { return client->client->Poll(); });
}

int tb_poll_fd(tb_client* client) {
  const auto fd = client->client->PollFd();
  if (fd.ok()) return *fd;
  Return(fd.status());
  return -1;
}

// ---- producer

tb_status tb_publish(tb_client* client, const tb_publish_options* options, tb_request* out) {
  tb_publish_options in;
  if (out == nullptr || !ReadStruct(options, in)) return Invalid("options or out are missing");
  if (in.policy > TB_SLOW_SNAPSHOT) return Invalid("no such policy for slow consumers");
  return Guarded([&] {
    wire::Publish message;
    message.version = Version{in.version};
    if (in.policy != 0) message.policy = static_cast<wire::SlowConsumer>(in.policy);
    message.min_replicas = in.min_replicas;
    message.receipts = in.receipts != 0;
    message.keep_last = in.keep_last;
    return Give(client->client->Publish(message), out);
  });
}

tb_status tb_request_release(tb_client* client, uint64_t version, int64_t timeout_ns,
                             tb_request* out) {
  if (out == nullptr) return Invalid("out is missing");
  return Guarded([&] {
    return Give(client->client->RequestRelease(Version{version}, Nanos(timeout_ns)), out);
  });
}

tb_status tb_before_write(tb_client* client, int64_t timeout_ns, double* waited_seconds) {
  return Guarded([&]() -> Status {
    TB_ASSIGN_OR_RETURN(const Nanos waited, client->client->BeforeWrite(Nanos(timeout_ns)));
    if (waited_seconds != nullptr) *waited_seconds = tensorbus::Seconds(waited);
    return {};
  });
}

uint64_t tb_released_version(const tb_client* client) {
  return client->client->released_version().value;
}

// ---- consumer

tb_status tb_update(tb_client* client, const tb_update_options* options, tb_request* out) {
  tb_update_options in;
  if (out == nullptr || !ReadStruct(options, in)) return Invalid("options or out are missing");
  if (in.selector > TB_PINNED) return Invalid("no such selector");
  return Guarded([&] {
    wire::Update message;
    if (in.selector != 0) message.selector = static_cast<wire::Selector>(in.selector);
    message.version = Version{in.version};
    // At least 1: on the wire 0 is no deadline at all.
    const auto timeout = std::chrono::ceil<std::chrono::milliseconds>(Nanos(in.timeout_ns));
    message.timeout_ms = static_cast<std::uint64_t>(std::max<std::int64_t>(1, timeout.count()));
    return Give(client->client->Update(message), out);
  });
}

tb_status tb_cancel_update(tb_client* client, tb_request* out) {
  if (out == nullptr) return Invalid("out is missing");
  return Guarded([&] { return Give(client->client->CancelUpdate(), out); });
}

tb_status tb_claim(tb_client* client, tb_request* out) {
  if (out == nullptr) return Invalid("out is missing");
  return Guarded([&] { return Give(client->client->Claim(), out); });
}

uint64_t tb_live_version(const tb_client* client) {
  return client->client->live_version().value;
}

tb_status tb_set_hook(tb_client* client, tb_hook hook, void* context) {
  return Guarded([&] {
    client->client->SetHook(hook == nullptr ? tensorbus::worker_shim::Hook()
                                            : WrapHook(hook, context));
    return Status();
  });
}

tb_status tb_service_start(tb_client* client) {
  return Guarded([&] { return client->client->StartService(); });
}

tb_status tb_service_stop(tb_client* client) {
  return Guarded([&] {
    client->client->StopService();
    return Status();
  });
}

}  // extern "C"
