/* The C interface of the worker library: what a trainer or engine rank of any language loads.
 *
 * Names begin with tb_. Calls return TB_OK or a gRPC status code; tb_last_error() has the rest, for
 * the calling thread's last failed call. Handles are opaque and thread-safe. Every struct starts
 * with `struct_size`, which the caller sets to sizeof of the struct it was compiled with; fields
 * are only ever appended. Memory is borrowed unless it says otherwise. Durations are nanoseconds.
 *
 * Nothing happens behind the caller's back: frames are read, hooks run and buckets packed only
 * inside tb_wait(), tb_poll() and other calls that wait, or in the thread of tb_service_start().
 *
 * After fork() the child must not use a handle; each call there fails with TB_FAILED_PRECONDITION.
 * Arenas stay shared with the parent.
 */
#ifndef TENSORBUS_SHIM_H_
#define TENSORBUS_SHIM_H_

#include <stdint.h>

#if defined(__GNUC__)
#define TB_API __attribute__((visibility("default")))
#else
#define TB_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Grows with every addition to this file. tb_abi_version() says what the library has. */
#define TB_ABI_VERSION 2
TB_API uint32_t tb_abi_version(void);
/* "0.1.0"; static. */
TB_API const char* tb_version(void);

typedef int32_t tb_status; /* gRPC's codes */
enum {
  TB_OK = 0,
  TB_CANCELLED = 1,
  TB_UNKNOWN = 2,
  TB_INVALID_ARGUMENT = 3,
  TB_DEADLINE_EXCEEDED = 4,
  TB_NOT_FOUND = 5,
  TB_ALREADY_EXISTS = 6,
  TB_PERMISSION_DENIED = 7,
  TB_RESOURCE_EXHAUSTED = 8,
  TB_FAILED_PRECONDITION = 9,
  TB_ABORTED = 10,
  TB_OUT_OF_RANGE = 11,
  TB_UNIMPLEMENTED = 12,
  TB_INTERNAL = 13,
  TB_UNAVAILABLE = 14,
  TB_DATA_LOSS = 15,
  TB_UNAUTHENTICATED = 16
};

typedef struct tb_client tb_client; /* one rank's connection to its agent */
typedef struct tb_arena tb_arena;   /* shared memory that tensors live in */

/* A failure: code, Reason of tensorbus/base/status.h (0: none), errno or the like, and a text. */
typedef struct tb_error {
  uint32_t struct_size;
  tb_status code;
  int32_t reason;
  int64_t native;
  /* Filled with the zero-ended text, cut to `message_capacity` bytes; may be null with capacity 0.
   */
  char* message;
  uint32_t message_capacity;
  uint32_t message_size; /* out: bytes of the whole text without its zero */
} tb_error;

/* What the calling thread's last failed call says. Its code is returned, TB_OK if there was none.
 */
TB_API tb_status tb_last_error(tb_error* out);

/* ---- connection */

enum { TB_PRODUCER = 1, TB_CONSUMER = 2 };

typedef struct tb_connect_options {
  uint32_t struct_size;
  uint32_t role;       /* TB_PRODUCER, TB_CONSUMER */
  const char* channel; /* "policy" */
  const char* job;     /* "trainer" */
  uint32_t replica;    /* 0 for a producer */
  uint32_t rank;
  uint32_t rank_count;
  uint32_t reserved;
  const char* agent_socket; /* null: $TENSORBUS_AGENT_SOCKET, else the user's runtime folder */
  int64_t agent_uid;        /* whose agent it may be; -1: this user's or root's */
  const char* library;      /* for people: "myengine 1.2"; null is fine */
  int64_t timeout_ns;
} tb_connect_options;

/* TB_UNAVAILABLE with reason not_running when no agent listens there; TB_PERMISSION_DENIED;
 * TB_FAILED_PRECONDITION with reason protocol_version; whatever the agent refuses the rank with. */
TB_API tb_status tb_connect(const tb_connect_options* options, tb_client** out);
/* Says goodbye; null is fine. No other thread may be in a call. */
TB_API void tb_disconnect(tb_client* client);
/* After the agent went away: the same rank, memory and registration with the one that listens now.
 * While nobody listens it waits for one (TB_UNAVAILABLE with reason not_running when none came);
 * the memory may be written meanwhile. A producer offers what it published last anew, unless it was
 * released or written since; snapshots went with the agent. After a failure the connection is lost,
 * and it may be tried again. */
TB_API tb_status tb_reconnect(tb_client* client, int64_t timeout_ns);

/* The same; `stop` is asked now and then while no agent listens, in this thread, and anything but 0
 * ends the wait with TB_CANCELLED. */
TB_API tb_status tb_reconnect_unless(tb_client* client, int64_t timeout_ns,
                                     int (*stop)(void* context), void* context);
/* TB_OK while the agent is there, else why not. */
TB_API tb_status tb_connection(tb_client* client);
/* The agent's name, cut to `capacity` with its zero. */
TB_API tb_status tb_agent_name(tb_client* client, char* out, uint32_t capacity);

/* ---- memory */

/* Zeroed shared memory of `bytes`; 2 MiB aligned from 64 MiB on. Lives until tb_arena_destroy(),
 * which must come after everything that points into it. */
TB_API tb_status tb_arena_create(uint64_t bytes, tb_arena** out);
TB_API void tb_arena_destroy(tb_arena* arena);
TB_API void* tb_arena_data(const tb_arena* arena);
TB_API uint64_t tb_arena_size(const tb_arena* arena);
TB_API uint64_t tb_arena_used(const tb_arena* arena);
/* Borrowed; for tb_attach() and for passing on. */
TB_API int tb_arena_fd(const tb_arena* arena);
/* `alignment`: a power of two up to 2 MiB. Never given back. */
TB_API tb_status tb_arena_allocate(tb_arena* arena, uint64_t bytes, uint64_t alignment,
                                   uint64_t* offset);

/* Names memory that pieces lie in; sent with the next tb_register(). `fd` is the shared memory that
 * `address` maps from its first byte on (a duplicate is kept), or -1 for private memory. */
TB_API tb_status tb_attach(tb_client* client, void* address, uint64_t bytes, int fd,
                           uint32_t* segment);
/* Forgets all segments, before others are attached for another layout. */
TB_API tb_status tb_detach_all(tb_client* client);

/* ---- registration */

#define TB_MAX_DIMS 8

typedef struct tb_tensor {
  uint32_t struct_size;
  uint32_t dtype; /* f64 1, f32 2, f16 3, bf16 4, f8e4m3 5, f8e5m2 6, i64 7, i32 8, i16 9, i8 10, u8
                     11, bool 12, f4e2m1x2 13 */
  const char* name;
  uint32_t rank;
  uint32_t reserved;
  uint64_t shape[TB_MAX_DIMS]; /* of the whole logical tensor */
} tb_tensor;

/* Element (i0, i1, ...) of the box, counted from its corner, is at byte
 * offset + i0 * strides[0] + i1 * strides[1] + ... of the segment. */
typedef struct tb_piece {
  uint32_t struct_size;
  uint32_t tensor; /* index into the tensors */
  uint32_t segment;
  uint32_t rank;
  uint64_t lo[TB_MAX_DIMS];
  uint64_t hi[TB_MAX_DIMS];
  uint64_t offset;
  uint64_t strides[TB_MAX_DIMS];
} tb_piece;

enum { TB_FLIP_IN_PLACE = 1, TB_FLIP_SHADOW = 2 };
enum { TB_PROOF_OFF = 1, TB_PROOF_STREAM = 2, TB_PROOF_READBACK = 3, TB_PROOF_MEMORY = 4 };
enum { TB_MEMORY_MAPPED = 1, TB_MEMORY_CMA = 2, TB_MEMORY_BUCKET = 3 };

typedef struct tb_register_options {
  uint32_t struct_size;
  uint32_t tensor_count;
  const tb_tensor* tensors; /* an array; each element as long as the first one's struct_size says */
  const tb_piece* pieces;   /* likewise */
  uint32_t piece_count;
  uint32_t flip;         /* consumer; 0: in_place */
  uint32_t proof;        /* consumer; 0: readback */
  uint32_t private_mode; /* TB_MEMORY_* that private segments must use; 0: the best that works */
  const char* const* leave_out; /* consumer: tensors of the channel it deliberately does not take */
  uint32_t leave_out_count;
  uint32_t reserved;
  int64_t timeout_ns;
} tb_register_options;

typedef struct tb_registered {
  uint32_t struct_size;
  uint32_t mode; /* TB_MEMORY_*: how the agent reaches this rank's memory */
  double expected_gb_per_s;
  uint64_t epoch; /* channel epoch */
  double register_seconds;
  double prefault_seconds;
  char why[512]; /* why this mode; zero-ended */
  /* The newest version of the channel, 0: none; of a job that began anew the newest before it did,
   * the same for all its ranks. The next to publish is above it. */
  uint64_t latest_version;
} tb_registered;

/* `out` may be null. When a registration that was to replace another fails after the agent heard of
 * it, the connection is lost. */
TB_API tb_status tb_register(tb_client* client, const tb_register_options* options,
                             tb_registered* out);

/* ---- requests */

typedef uint64_t tb_request; /* never 0 */

typedef struct tb_outcome {
  uint32_t struct_size;
  uint32_t done;    /* 0: the wait ended, the request goes on */
  uint64_t version; /* live (update), held (claim), released (release) */
  uint64_t session;
  uint64_t bytes; /* of update: what arrived at this rank */
  double seconds;
  double copy_seconds;
  uint64_t digest_a; /* of all that arrived at this rank */
  uint64_t digest_b;
} tb_outcome;

/* Waits for the request and forgets it once it is done; returns how it ended. TB_DEADLINE_EXCEEDED
 * with done == 0 when `timeout_ns` passed first: wait again, or tb_forget(). What the request waits
 * for is asked shortly before that and said by tb_last_error(); a wait of less than 200 ms asks
 * nothing by itself. */
TB_API tb_status tb_wait(tb_client* client, tb_request request, int64_t timeout_ns,
                         tb_outcome* out);
/* 1 when tb_wait() would return at once. */
TB_API int tb_done(tb_client* client, tb_request request);
TB_API void tb_forget(tb_client* client, tb_request request);
/* For callers that wait in slices: asks what the request waits for, which the next tb_wait() that
 * ends before the request then says. Returns at once. */
TB_API void tb_explain(tb_client* client, tb_request request);
/* Handles what is there and returns; no-op while another thread waits. Fails when the agent is
 * gone. */
TB_API tb_status tb_poll(tb_client* client);
/* A descriptor for event loops: readable whenever tb_poll() has something to do or a request has
 * ended. -1 on failure. Owned by the client. */
TB_API int tb_poll_fd(tb_client* client);

/* ---- producer */

enum { TB_SLOW_WAIT = 1, TB_SLOW_SKIP = 2, TB_SLOW_SNAPSHOT = 3 };

typedef struct tb_publish_options {
  uint32_t struct_size;
  uint32_t policy; /* what a slow consumer may cost; 0: wait */
  uint64_t version;
  uint32_t min_replicas; /* with wait: hold the memory until this many replicas have the version */
  uint32_t receipts;     /* 1: digest the memory at publish */
  uint32_t keep_last;    /* with snapshot: how many stay for a rollback */
  uint32_t reserved;
} tb_publish_options;

/* From here on the memory must not change until tb_before_write() returned. */
TB_API tb_status tb_publish(tb_client* client, const tb_publish_options* options, tb_request* out);
TB_API tb_status tb_request_release(tb_client* client, uint64_t version, int64_t timeout_ns,
                                    tb_request* out);
/* Call before the first write after a publish. Waits until the memory is free, then counts the
 * write. TB_DEADLINE_EXCEEDED: it is not free and nothing was counted. `waited_seconds` may be
 * null. */
TB_API tb_status tb_before_write(tb_client* client, int64_t timeout_ns, double* waited_seconds);
TB_API uint64_t tb_released_version(const tb_client* client);

/* ---- consumer */

enum { TB_LATEST = 1, TB_NEXT = 2, TB_PINNED = 3 };

typedef struct tb_update_options {
  uint32_t struct_size;
  uint32_t selector; /* 0: latest */
  uint64_t version;  /* with TB_PINNED */
  int64_t timeout_ns;
} tb_update_options;

/* An agent that goes away while it may be writing the memory leaves it dirty: the update fails with
 * reason dirty, tb_reconnect() registers it as that, and the next update repairs it. */
TB_API tb_status tb_update(tb_client* client, const tb_update_options* options, tb_request* out);
TB_API tb_status tb_cancel_update(tb_client* client, tb_request* out);
/* "Which version do I hold?", proven by digest. */
TB_API tb_status tb_claim(tb_client* client, tb_request* out);
/* What this rank's memory is, whole; 0 when it is nothing yet or a mixture. */
TB_API uint64_t tb_live_version(const tb_client* client);

enum { TB_HOOK_FENCE = 0, TB_HOOK_FLIP_BEGIN = 1, TB_HOOK_LIVE = 2 };

typedef struct tb_hook_event {
  uint32_t struct_size;
  uint32_t kind; /* TB_HOOK_* */
  uint64_t session;
  uint64_t version;
  int64_t timeout_ns;
  char* message; /* may be filled with a zero-ended text that says why the hook fails */
  uint32_t message_capacity;
  uint32_t reserved;
} tb_hook_event;

/* Anything but TB_OK refuses the step. Must not wait on the same client. */
typedef tb_status (*tb_hook)(void* context, const tb_hook_event* event);
/* null takes it away. Runs in the thread that waits or polls, or in the service thread. */
TB_API tb_status tb_set_hook(tb_client* client, tb_hook hook, void* context);

/* A thread that answers the agent while nobody waits. Idempotent. */
TB_API tb_status tb_service_start(tb_client* client);
TB_API tb_status tb_service_stop(tb_client* client);

#ifdef __cplusplus
}
#endif
#endif /* TENSORBUS_SHIM_H_ */
