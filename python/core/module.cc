// tensorbus._core: the C++ client, and who holds what, for Python. Translation only; the package
// around it has the logic. Every call that may wait or take a lock of ours lets go of the GIL: a
// hook in another thread needs it.

#include <map>
#include <memory>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "tensorbus/client/client.h"

#include "python/core/hooks.h"
#include "python/core/placements.h"
#include "python/core/raise.h"

namespace py = pybind11;

namespace tensorbus::python {
namespace {

using client::Arena;
using client::Client;
using client::Outcome;
using client::Request;

/// Runs `body` without the GIL; its failure is raised with it.
template <typename Body>
auto Unlocked(Body body) {
  auto result = [&] {
    const py::gil_scoped_release release;
    return body();
  }();
  return Check(std::move(result));
}

Nanos FromSeconds(double seconds) {
  constexpr double kMax = 365.0 * 24 * 3600;
  if (!(seconds > 0)) return Nanos::zero();
  return std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(std::min(seconds, kMax)));
}

/// A client and what was asked of it: requests end before their client, whoever still has a handle
/// of them. The end does not hold the GIL: the service thread may be waiting for it.
///
/// Threads: called with the GIL, which guards the requests.
class PyClient {
 public:
  explicit PyClient(Client client) : client_(std::make_unique<Client>(std::move(client))) {}
  ~PyClient() { Close(); }
  PyClient(const PyClient&) = delete;
  PyClient& operator=(const PyClient&) = delete;

  void Close() {
    std::map<std::uint64_t, Request> requests;
    requests.swap(requests_);
    const py::gil_scoped_release release;
    requests.clear();
    client_.reset();
  }
  bool closed() const { return client_ == nullptr; }
  Client& get() const {
    if (client_ == nullptr) {
      Raise(Status(Code::kFailedPrecondition, "this connection was closed"));
    }
    return *client_;
  }

  /// Keeps a request until Drop() or Close(). Gives its key.
  std::uint64_t Keep(Request request) {
    requests_.emplace(++last_key_, std::move(request));
    return last_key_;
  }
  Request& request(std::uint64_t key) {
    get();
    return requests_.at(key);
  }
  void Drop(std::uint64_t key) {
    auto request = requests_.extract(key);
    const py::gil_scoped_release release;
    request = {};
  }

 private:
  std::unique_ptr<Client> client_;
  std::map<std::uint64_t, Request> requests_;  // after their client: die before it
  std::uint64_t last_key_ = 0;
};

/// A handle of a request that its client keeps.
class PyRequest {
 public:
  PyRequest(std::shared_ptr<PyClient> client, Request request)
      : client_(std::move(client)), id_(request.id()), key_(client_->Keep(std::move(request))) {}
  ~PyRequest() { client_->Drop(key_); }
  PyRequest(const PyRequest&) = delete;
  PyRequest& operator=(const PyRequest&) = delete;

  Request& get() { return client_->request(key_); }
  std::uint64_t id() const { return id_; }

 private:
  const std::shared_ptr<PyClient> client_;
  const std::uint64_t id_;
  const std::uint64_t key_;
};

using Tensor = std::tuple<std::string, int, std::vector<std::uint64_t>>;
using PieceTuple =
    std::tuple<std::uint32_t, std::uint32_t, std::vector<std::uint64_t>, std::vector<std::uint64_t>,
               std::uint64_t, std::vector<std::uint64_t>>;

Result<TensorSpec> ToSpec(const Tensor& in) {
  const auto& [name, dtype, shape] = in;
  TensorSpec spec;
  spec.name = name;
  TB_ASSIGN_OR_RETURN(spec.dtype, DTypeFromCode(static_cast<std::uint8_t>(dtype)));
  auto made = Shape::Create(shape);
  if (!made.ok()) return made.status().Annotate("tensor '" + name + "'");
  spec.shape = *made;
  return spec;
}

Result<Piece> ToPiece(const PieceTuple& in) {
  const auto& [tensor, segment, lo, hi, offset, strides] = in;
  if (lo.size() > kMaxDims || hi.size() != lo.size() || strides.size() != lo.size()) {
    return Status(Code::kInvalidArgument, "a piece with unequal or too many dimensions");
  }
  Piece piece;
  piece.tensor = tensor;
  piece.segment = segment;
  piece.offset = offset;
  std::array<Range, kMaxDims> ranges = {};
  for (std::size_t d = 0; d < lo.size(); ++d) {
    ranges[d] = {lo[d], hi[d]};
    piece.strides[d] = strides[d];
  }
  piece.box = Box({ranges.data(), lo.size()});
  return piece;
}

py::dict ToDict(const client::Registered& r) {
  py::dict out;
  out["mode"] = static_cast<int>(r.mode);
  out["why"] = r.why;
  out["expected_gb_per_s"] = r.expected_gb_per_s;
  out["epoch"] = r.epoch.value;
  out["latest_version"] = r.latest_version.value;
  out["register_seconds"] = r.register_seconds;
  out["prefault_seconds"] = r.prefault_seconds;
  return out;
}

py::dict ToDict(const Outcome& o) {
  py::dict out;
  out["version"] = o.version.value;
  out["session"] = o.session.value;
  out["bytes"] = o.bytes;
  out["seconds"] = o.seconds;
  out["copy_seconds"] = o.copy_seconds;
  out["digest_a"] = o.digest.a;
  out["digest_b"] = o.digest.b;
  return out;
}

using ClientPtr = std::shared_ptr<PyClient>;

template <typename Body>
std::unique_ptr<PyRequest> Ask(const ClientPtr& self, Body body) {
  Client& client = self->get();
  return std::make_unique<PyRequest>(self, Unlocked([&] { return body(client); }));
}

ClientPtr Connect(const std::string& channel, const std::string& job, int role,
                  std::uint32_t replica, std::uint32_t rank, std::uint32_t rank_count,
                  const std::string& agent_socket, std::int64_t agent_uid,
                  const std::string& library, double timeout_s) {
  client::ConnectOptions options;
  options.identity = {.channel = channel,
                      .job = job,
                      .role = static_cast<Role>(role),
                      .replica = replica,
                      .rank = rank,
                      .rank_count = rank_count};
  options.agent_socket = agent_socket;
  if (agent_uid >= 0) options.agent_uid = static_cast<uid_t>(agent_uid);
  options.library = library;
  options.timeout = FromSeconds(timeout_s);
  return std::make_shared<PyClient>(Unlocked([&] { return Client::Connect(options); }));
}

py::dict Register(const ClientPtr& self, const std::vector<Tensor>& tensors,
                  const std::vector<PieceTuple>& pieces, int flip, int proof, int private_mode,
                  const std::vector<std::string>& leave_out, double timeout_s) {
  client::RegisterOptions options;
  options.tensors.reserve(tensors.size());
  for (const Tensor& tensor : tensors) options.tensors.push_back(Check(ToSpec(tensor)));
  options.pieces.reserve(pieces.size());
  for (const PieceTuple& piece : pieces) options.pieces.push_back(Check(ToPiece(piece)));
  options.flip = static_cast<FlipMode>(flip);
  options.proof = static_cast<Proof>(proof);
  if (private_mode != 0) options.private_mode = static_cast<MemoryMode>(private_mode);
  options.leave_out = leave_out;
  options.timeout = FromSeconds(timeout_s);
  Client& client = self->get();
  return ToDict(Unlocked([&] { return client.Register(options); }));
}

void DefineArena(py::module_& m) {
  py::class_<Arena>(m, "Arena", py::buffer_protocol())
      .def(py::init([](std::uint64_t bytes) { return Check(Arena::Create(bytes)); }),
           py::arg("bytes"))
      .def(
          "allocate",
          [](Arena& self, std::uint64_t bytes, std::uint64_t alignment) {
            const auto memory = Check(self.Allocate(bytes, alignment));
            return static_cast<std::uint64_t>(memory.data() - self.memory().data());
          },
          py::arg("bytes"), py::arg("alignment") = 64)
      .def_property_readonly(
          "address",
          [](const Arena& self) { return reinterpret_cast<std::uintptr_t>(self.memory().data()); })
      .def_property_readonly("size", [](const Arena& self) { return self.memory().size(); })
      .def_property_readonly("used", &Arena::used)
      .def_property_readonly("fd", &Arena::fd)
      .def_buffer([](Arena& self) {
        return py::buffer_info(self.memory().data(), 1, "B", 1, {self.memory().size()},
                               {std::size_t{1}});
      });
}

void DefineRequest(py::module_& m) {
  py::class_<PyRequest>(m, "Request")
      .def(
          "wait",
          [](PyRequest& self, double timeout_s) {
            Request& request = self.get();
            return ToDict(Unlocked([&] { return request.Wait(FromSeconds(timeout_s)); }));
          },
          py::arg("timeout_s"))
      .def("explain",
           [](PyRequest& self) {
             Request& request = self.get();
             const py::gil_scoped_release release;
             request.Explain();
           })
      .def("done",
           [](PyRequest& self) {
             Request& request = self.get();
             const py::gil_scoped_release release;
             return request.done();
           })
      .def_property_readonly("taken", [](PyRequest& self) { return self.get().taken(); })
      .def_property_readonly("id", [](PyRequest& self) { return self.id(); });
}

void DefineClient(py::module_& m) {
  py::class_<PyClient, ClientPtr>(m, "Client")
      .def_static("connect", &Connect, py::kw_only(), py::arg("channel"), py::arg("job"),
                  py::arg("role"), py::arg("replica"), py::arg("rank"), py::arg("rank_count"),
                  py::arg("agent_socket"), py::arg("agent_uid"), py::arg("library"),
                  py::arg("timeout_s"))
      .def("close", &PyClient::Close)
      .def_property_readonly("closed", &PyClient::closed)
      .def("set_hook",
           [](const ClientPtr& self, py::object function) {
             client::Hook hook = MakeHook(std::move(function));
             Client& client = self->get();
             const py::gil_scoped_release release;
             client.SetHook(std::move(hook));
           })
      .def("attach_arena",
           [](const ClientPtr& self, const Arena& arena) {
             Client& client = self->get();
             return Unlocked([&] { return client.Attach(arena); });
           })
      .def(
          "attach",
          [](const ClientPtr& self, std::uint64_t address, std::uint64_t bytes, int fd) {
            Client& client = self->get();
            const std::span memory(reinterpret_cast<std::byte*>(address), bytes);
            return Unlocked([&] { return client.AttachShared(memory, fd); });
          },
          py::arg("address"), py::arg("bytes"), py::arg("fd") = -1)
      .def("detach_all",
           [](const ClientPtr& self) {
             Client& client = self->get();
             const Status status = [&] {
               const py::gil_scoped_release release;
               return client.DetachAll();
             }();
             Check(status);
           })
      .def("register", &Register, py::kw_only(), py::arg("tensors"), py::arg("pieces"),
           py::arg("flip"), py::arg("proof"), py::arg("private_mode"), py::arg("leave_out"),
           py::arg("timeout_s"))
      .def(
          "reconnect",
          [](const ClientPtr& self, double timeout_s) {
            Client& client = self->get();
            bool interrupted = false;
            const auto look_for_signals = [&interrupted] {
              const py::gil_scoped_acquire gil;
              interrupted = PyErr_CheckSignals() != 0;
              return interrupted;
            };
            const Status status = [&] {
              const py::gil_scoped_release release;
              return client.Reconnect(FromSeconds(timeout_s), look_for_signals);
            }();
            if (interrupted) throw py::error_already_set();
            Check(status);
          },
          py::arg("timeout_s"))
      .def(
          "publish",
          [](const ClientPtr& self, std::uint64_t version, int policy, std::uint32_t min_replicas,
             bool receipts, std::uint32_t keep_last) {
            return Ask(self, [&](Client& client) {
              return client.Publish({.version = Version{version},
                                     .policy = static_cast<client::SlowConsumer>(policy),
                                     .min_replicas = min_replicas,
                                     .receipts = receipts,
                                     .keep_last = keep_last});
            });
          },
          py::kw_only(), py::arg("version"), py::arg("policy"), py::arg("min_replicas"),
          py::arg("receipts"), py::arg("keep_last"))
      .def(
          "request_release",
          [](const ClientPtr& self, std::uint64_t version, double timeout_s) {
            return Ask(self, [&](Client& client) {
              return client.RequestRelease(Version{version}, FromSeconds(timeout_s));
            });
          },
          py::kw_only(), py::arg("version"), py::arg("timeout_s"))
      .def(
          "before_write",
          [](const ClientPtr& self, double timeout_s) {
            Client& client = self->get();
            return Seconds(Unlocked([&] { return client.BeforeWrite(FromSeconds(timeout_s)); }));
          },
          py::arg("timeout_s"))
      .def(
          "update",
          [](const ClientPtr& self, int selector, std::uint64_t version, double timeout_s) {
            return Ask(self, [&](Client& client) {
              return client.Update({.selector = static_cast<client::Selector>(selector),
                                    .version = Version{version},
                                    .timeout = FromSeconds(timeout_s)});
            });
          },
          py::kw_only(), py::arg("selector"), py::arg("version"), py::arg("timeout_s"))
      .def("cancel_update",
           [](const ClientPtr& self) {
             return Ask(self, [](Client& client) { return client.CancelUpdate(); });
           })
      .def("claim",
           [](const ClientPtr& self) {
             return Ask(self, [](Client& client) { return client.Claim(); });
           })
      .def("poll",
           [](const ClientPtr& self) {
             Client& client = self->get();
             const Status status = [&] {
               const py::gil_scoped_release release;
               return client.Poll();
             }();
             Check(status);
           })
      .def("poll_fd",
           [](const ClientPtr& self) {
             Client& client = self->get();
             return Unlocked([&] { return client.PollFd(); });
           })
      .def("start_service",
           [](const ClientPtr& self) {
             Client& client = self->get();
             const Status status = [&] {
               const py::gil_scoped_release release;
               return client.StartService();
             }();
             Check(status);
           })
      .def("stop_service",
           [](const ClientPtr& self) {
             Client& client = self->get();
             const Status status = [&] {
               const py::gil_scoped_release release;
               return client.StopService();
             }();
             Check(status);
           })
      .def("connection",
           [](const ClientPtr& self) {
             Client& client = self->get();
             const Status status = [&] {
               const py::gil_scoped_release release;
               return client.connection();
             }();
             Check(status);
           })
      .def_property_readonly("agent_name",
                             [](const ClientPtr& self) { return self->get().agent_name(); })
      .def_property_readonly(
          "released_version",
          [](const ClientPtr& self) { return self->get().released_version().value; })
      .def_property_readonly(
          "live_version", [](const ClientPtr& self) { return self->get().live_version().value; });
}

}  // namespace
}  // namespace tensorbus::python

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ side of Tensorbus. Use the package around it.";
  m.attr("__version__") = TENSORBUS_VERSION;
  tensorbus::python::DefineArena(m);
  tensorbus::python::DefineRequest(m);
  tensorbus::python::DefineClient(m);
  tensorbus::python::DefinePlacements(m);
}
