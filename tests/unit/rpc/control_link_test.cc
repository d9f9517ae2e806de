#include "tensorbus/rpc/control_link.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <gtest/gtest.h>
#include <optional>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "tensorbus/base/mutex.h"
#include "tensorbus/base/unique_fd.h"
#include "tensorbus/rpc/admin_client.h"
#include "tensorbus/rpc/control_server.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_dir.h"

namespace tensorbus::rpc {
namespace {

using namespace std::chrono_literals;
using testing::IsStatus;

constexpr auto kPatience = 10s;

/// A value another thread sets; the test waits for it with a deadline.
template <typename T>
class Eventually {
 public:
  void Set(T value) {
    MutexLock lock(mutex_);
    value_ = std::move(value);
    set_.NotifyAll();
  }
  std::optional<T> value() {
    MutexLock lock(mutex_);
    return value_;
  }
  std::optional<T> Wait() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (!value_) {
      if (!set_.WaitUntil(mutex_, deadline)) return std::nullopt;
    }
    return value_;
  }

 private:
  Mutex mutex_;
  CondVar set_;
  std::optional<T> value_ TB_GUARDED_BY(mutex_);
};

/// Answers every Hello with a Welcome that repeats the name, and knows one layout.
class EchoDaemon : public ControlHandler, public AdminHandler {
 public:
  std::string layout = "layout bytes";
  std::shared_ptr<AgentPort> agent;  // the last one; on the executor
  Eventually<Status> detached;

  void OnAttach(PortId, std::shared_ptr<AgentPort> port, const std::string&) override {
    agent = std::move(port);
  }
  void OnMessage(PortId, const proto::AgentMessage& message) override {
    proto::DaemonMessage reply;
    reply.mutable_welcome()->set_daemon(message.hello().agent());
    agent->Send(std::move(reply));
  }
  void OnDetach(PortId, const Status& why) override {
    agent.reset();
    detached.Set(why);
  }
  void OnGetLayout(const Hash128& hash, OnLayout done) override {
    if (hash == HashOf(std::string_view(layout))) return done(layout);
    done(Status(Code::kNotFound, "no layout " + hash.ToHex()));
  }
  void GetStatus(const proto::StatusRequest&, Done<proto::StatusReply> done) override {
    proto::StatusReply reply;
    reply.set_daemon("echo");
    done(reply);
  }
  void GetVersions(const proto::VersionsRequest&, Done<proto::VersionsReply> done) override {
    held = std::move(done);  // never answers by itself
  }
  void Rollback(const proto::RollbackRequest&, Done<proto::RollbackReply> done) override {
    done(Status(Code::kNotFound, "version 3 is not kept", Reason::kStaleVersion));
  }
  void Explain(const proto::ExplainRequest&, Done<proto::ExplainReply> done) override {
    done(proto::ExplainReply());
  }
  void WhoIsMissing(const proto::WhoIsMissingRequest&,
                    Done<proto::WhoIsMissingReply> done) override {
    done(proto::WhoIsMissingReply());
  }
  void Verify(const proto::VerifyRequest&, Done<proto::VerifyReply> done) override {
    done(proto::VerifyReply());
  }
  void Trace(const proto::TraceRequest&, Done<proto::TraceReply> done) override {
    done(proto::TraceReply());
  }

  Done<proto::VersionsReply> held;
};

UniqueFd ListenSilently(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(fd.get(), 8), 0);
  return fd;
}

class ControlLinkTest : public ::testing::Test {
 protected:
  void Serve(const ServerOptions& options) {
    auto server = ControlServer::Start(options, executor_, daemon_, daemon_);
    ASSERT_OK(server);
    server_ = std::move(server).value();
  }
  void ServeUnix() { Serve({.listen = {"unix:" + dir_.Join("d.sock")}}); }
  std::string WriteToken(const std::string& name, const std::string& text) {
    const std::string path = dir_.Join(name);
    std::ofstream(path) << text;
    EXPECT_EQ(::chmod(path.c_str(), 0600), 0);
    return path;
  }
  std::unique_ptr<ControlLink> Open(const DaemonAddress& address, Nanos timeout = kPatience) {
    return OpenControlLink(
        address, agent_executor_, timeout,
        [this](const proto::DaemonMessage& message) {
          ++received_;
          if (received_ == wanted_) last_.Set(message.welcome().daemon());
        },
        [this](Status why) { lost_.Set(std::move(why)); });
  }
  static proto::AgentMessage Hello(const std::string& name) {
    proto::AgentMessage message;
    message.mutable_hello()->set_agent(name);
    return message;
  }
  DaemonAddress Address() { return {.target = server_->addresses().at(0)}; }

  testing::TempDir dir_;
  EchoDaemon daemon_;
  ThreadExecutor executor_{"daemon"};
  ThreadExecutor agent_executor_{"agent"};
  std::unique_ptr<ControlServer> server_;
  int received_ = 0;
  int wanted_ = 1;
  Eventually<std::string> last_;
  Eventually<Status> lost_;
};

TEST_F(ControlLinkTest, BringsMessagesBothWaysInOrder) {
  ServeUnix();
  wanted_ = 1000;
  const auto link = Open(Address());
  for (int i = 1; i <= wanted_; ++i) link->Send(Hello(std::to_string(i)));
  EXPECT_EQ(last_.Wait(), "1000");
}

TEST_F(ControlLinkTest, CarriesRegistrationsOfManyMegabytes) {
  ServeUnix();
  const auto link = Open(Address());
  proto::AgentMessage message = Hello(std::string(1, 'x'));
  message.mutable_hello()->set_host(std::string(40 << 20, 'h'));
  link->Send(message);
  EXPECT_EQ(last_.Wait(), "x");
}

TEST_F(ControlLinkTest, FetchesLayoutsLargerThanTheDefaultLimit) {
  daemon_.layout = std::string(20 << 20, 'L');
  ServeUnix();
  const auto link = Open(Address());
  Eventually<std::size_t> size;
  link->GetLayout(
      HashOf(std::string_view(daemon_.layout)), kPatience,
      [&](Result<std::vector<std::byte>> layout) { size.Set(layout.ok() ? layout->size() : 0); });
  EXPECT_EQ(size.Wait(), daemon_.layout.size());
  Eventually<Status> missing;
  link->GetLayout(Hash128{}, kPatience,
                  [&](Result<std::vector<std::byte>> layout) { missing.Set(layout.status()); });
  EXPECT_THAT(missing.Wait().value(), IsStatus(Code::kNotFound, Reason::kNone));
}

TEST_F(ControlLinkTest, SaysThatNoDaemonRuns) {
  const auto link = Open({.target = "unix:" + dir_.Join("none.sock")});
  const auto why = lost_.Wait();
  ASSERT_TRUE(why);
  EXPECT_THAT(*why, IsStatus(Code::kUnavailable, Reason::kNotRunning));
  EXPECT_THAT(why->message(), ::testing::HasSubstr("no such socket"));
}

TEST_F(ControlLinkTest, GivesUpOnADaemonThatIsSilent) {
  // A listening socket that nobody accepts from: the connection stands, but nothing answers.
  const UniqueFd listener = ListenSilently(dir_.Join("silent.sock"));
  const auto link = Open({.target = "unix:" + dir_.Join("silent.sock")}, 200ms);
  const auto why = lost_.Wait();
  ASSERT_TRUE(why);
  EXPECT_THAT(*why, IsStatus(Code::kUnavailable, Reason::kNotRunning));
}

TEST_F(ControlLinkTest, ReportsTheLossOfTheDaemonOnce) {
  ServeUnix();
  const auto link = Open(Address());
  link->Send(Hello("a"));
  ASSERT_EQ(last_.Wait(), "a");
  server_->Stop(1s);
  const auto why = lost_.Wait();
  ASSERT_TRUE(why);
  EXPECT_THAT(*why, IsStatus(Code::kUnavailable, Reason::kPeerLost));
}

TEST_F(ControlLinkTest, TellsTheDaemonWhenItGoes) {
  ServeUnix();
  auto link = Open(Address());
  link->Send(Hello("a"));
  ASSERT_EQ(last_.Wait(), "a");
  link.reset();
  EXPECT_TRUE(daemon_.detached.Wait());
}

TEST_F(ControlLinkTest, MayBeDestroyedInsideItsOwnCallback) {
  ServeUnix();
  Eventually<bool> destroyed;
  std::unique_ptr<ControlLink> link;
  std::promise<void> opened;
  agent_executor_.Post([&] {
    link = OpenControlLink(
        Address(), agent_executor_, kPatience,
        [&](const proto::DaemonMessage&) {
          link.reset();
          destroyed.Set(true);
        },
        [](Status) { FAIL() << "called back after destruction"; });
    link->Send(Hello("a"));
    opened.set_value();
  });
  opened.get_future().wait();
  EXPECT_TRUE(destroyed.Wait());
  EXPECT_TRUE(daemon_.detached.Wait());
}

TEST_F(ControlLinkTest, SeesTheStatusTheDaemonClosesWith) {
  ServeUnix();
  const auto link = Open(Address());
  link->Send(Hello("a"));
  ASSERT_EQ(last_.Wait(), "a");
  executor_.Post([this] {
    daemon_.agent->Close(
        Status(Code::kFailedPrecondition, "other protocol", Reason::kProtocolVersion));
  });
  EXPECT_THAT(lost_.Wait().value(), IsStatus(Code::kFailedPrecondition, Reason::kProtocolVersion));
}

TEST_F(ControlLinkTest, AsksForTheTokenOverTcp) {
  const std::string token = WriteToken("token", "0123456789abcdef0123");
  const std::string other = WriteToken("other", "0123456789abcdef0124");
  Serve({.listen = {"127.0.0.1:0"}, .token_file = token});
  DaemonAddress address = Address();
  {
    const auto link = Open(address);
    link->Send(Hello("a"));
    EXPECT_THAT(lost_.Wait().value(), IsStatus(Code::kUnauthenticated, Reason::kNone));
  }
  address.token_file = other;
  ASSERT_OK_AND_ASSIGN(const auto wrong, AdminClient::Create(address, kPatience));
  EXPECT_THAT(wrong->GetStatus({}), IsStatus(Code::kUnauthenticated, Reason::kNone));
  address.token_file = token;
  const auto link = Open(address);
  link->Send(Hello("a"));
  EXPECT_EQ(last_.Wait(), "a");
  ASSERT_OK_AND_ASSIGN(const auto client, AdminClient::Create(address, kPatience));
  EXPECT_OK(client->GetStatus({}));
}

TEST_F(ControlLinkTest, RefusesTcpWithoutAnyProof) {
  EXPECT_THAT(ControlServer::Start({.listen = {"127.0.0.1:0"}}, executor_, daemon_, daemon_),
              IsStatus(Code::kInvalidArgument, Reason::kNone));
  EXPECT_THAT(ControlServer::Start({.listen = {"127.0.0.1:0"}, .ca_file = "x"}, executor_, daemon_,
                                   daemon_),
              IsStatus(Code::kInvalidArgument, Reason::kNone));
}

/// A CA, and certificates of it, made by the openssl program. False without one.
bool MakeCertificates(const std::string& dir) {
  std::ofstream(dir + "/san") << "subjectAltName=IP:127.0.0.1,DNS:localhost\n";
  const std::string in = "cd " + dir + " && ";
  const std::string quiet = " >/dev/null 2>&1";
  const auto run = [&](const std::string& line) {
    return std::system((in + line + quiet).c_str()) == 0;  // NOLINT(concurrency-mt-unsafe)
  };
  const std::string key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes ";
  bool fine = true;
  for (const std::string ca : {"ca", "other"}) {
    fine = fine && run("openssl req -x509 -days 2 " + key + "-subj /CN=" + ca + " -keyout " + ca +
                       ".key -out " + ca + ".pem");
  }
  const auto sign = [&](const std::string& name, const std::string& ca) {
    return run("openssl req -new " + key + "-subj /CN=" + name + " -keyout " + name + ".key -out " +
               name + ".csr") &&
           run("openssl x509 -req -days 2 -in " + name + ".csr -CA " + ca + ".pem -CAkey " + ca +
               ".key -CAcreateserial -extfile san -out " + name + ".pem");
  };
  return fine && sign("server", "ca") && sign("client", "ca") && sign("stranger", "other");
}

TEST_F(ControlLinkTest, AsksForACertificateOfItsCa) {
  if (!MakeCertificates(dir_.path())) GTEST_SKIP() << "no openssl program";
  Serve({.listen = {"127.0.0.1:0"},
         .token_file = "",
         .ca_file = dir_.Join("ca.pem"),
         .cert_file = dir_.Join("server.pem"),
         .key_file = dir_.Join("server.key")});
  DaemonAddress address = Address();
  address.ca_file = dir_.Join("ca.pem");
  address.cert_file = dir_.Join("client.pem");
  address.key_file = dir_.Join("client.key");
  const auto link = Open(address);
  link->Send(Hello("a"));
  EXPECT_EQ(last_.Wait(), "a");
  ASSERT_OK_AND_ASSIGN(const auto client, AdminClient::Create(address, kPatience));
  EXPECT_OK(client->GetStatus({}));
  address.cert_file = dir_.Join("stranger.pem");
  address.key_file = dir_.Join("stranger.key");
  ASSERT_OK_AND_ASSIGN(const auto stranger, AdminClient::Create(address, kPatience));
  EXPECT_EQ(stranger->GetStatus({}).status().code(), Code::kUnavailable);
  ASSERT_OK_AND_ASSIGN(const auto plain,
                       AdminClient::Create({.target = address.target}, kPatience));
  EXPECT_EQ(plain->GetStatus({}).status().code(), Code::kUnavailable);
  address.key_file = "";
  EXPECT_THAT(AdminClient::Create(address, kPatience),
              IsStatus(Code::kInvalidArgument, Reason::kNone));
}

TEST_F(ControlLinkTest, TakesReplacedCertificatesWithoutARestart) {
  if (!MakeCertificates(dir_.path())) GTEST_SKIP() << "no openssl program";
  namespace fs = std::filesystem;
  const auto replace = [&](const std::string& from, const std::string& to) {
    fs::copy_file(dir_.Join(from), dir_.Join("new"), fs::copy_options::overwrite_existing);
    fs::rename(dir_.Join("new"), dir_.Join(to));
  };
  for (const char* end : {".pem", ".key"})
    replace(std::string("server") + end, std::string("live") + end);
  replace("ca.pem", "live-ca.pem");
  Serve({.listen = {"127.0.0.1:0"},
         .token_file = "",
         .ca_file = dir_.Join("live-ca.pem"),
         .cert_file = dir_.Join("live.pem"),
         .key_file = dir_.Join("live.key")});
  // What each caller sees: trusts `ca`, shows the certificate `name`.
  const auto ask = [&](const std::string& ca, const std::string& name) {
    DaemonAddress address = Address();
    address.ca_file = dir_.Join(ca + ".pem");
    address.cert_file = dir_.Join(name + ".pem");
    address.key_file = dir_.Join(name + ".key");
    const auto client = AdminClient::Create(address, kPatience);
    return client.ok() ? (*client)->GetStatus({}).status() : client.status();
  };
  ASSERT_OK(ask("ca", "client"));
  EXPECT_EQ(ask("other", "stranger").code(), Code::kUnavailable);
  const auto link = Open({.target = Address().target,
                          .token_file = "",
                          .ca_file = dir_.Join("ca.pem"),
                          .cert_file = dir_.Join("client.pem"),
                          .key_file = dir_.Join("client.key")});
  link->Send(Hello("a"));
  ASSERT_EQ(last_.Wait(), "a");
  // The other CA and a certificate of it take their place.
  for (const char* end : {".pem", ".key"})
    replace(std::string("stranger") + end, std::string("live") + end);
  replace("other.pem", "live-ca.pem");
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  Status now = ask("other", "stranger");
  while (!now.ok() && std::chrono::steady_clock::now() < deadline) now = ask("other", "stranger");
  EXPECT_OK(now);
  EXPECT_EQ(ask("ca", "client").code(), Code::kUnavailable) << "the old ones are over";
  EXPECT_FALSE(lost_.value().has_value()) << "what is connected stays so";
}

TEST_F(ControlLinkTest, GivesTypedErrorsToTensorbusctl) {
  ServeUnix();
  ASSERT_OK_AND_ASSIGN(const auto client, AdminClient::Create(Address(), 200ms));
  ASSERT_OK_AND_ASSIGN(const proto::StatusReply status, client->GetStatus({}));
  EXPECT_EQ(status.daemon(), "echo");
  EXPECT_THAT(client->Rollback({}), IsStatus(Code::kNotFound, Reason::kStaleVersion));
  const auto late = client->GetVersions({});
  EXPECT_THAT(late, IsStatus(Code::kDeadlineExceeded, Reason::kPeerLost));
  EXPECT_THAT(late.status().message(), ::testing::HasSubstr("d.sock"));
  executor_.Post(
      [this] { daemon_.held(proto::VersionsReply()); });  // or shutdown would wait for it
}

}  // namespace
}  // namespace tensorbus::rpc
