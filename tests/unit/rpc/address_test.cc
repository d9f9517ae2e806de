#include "tensorbus/rpc/address.h"

#include <cstring>
#include <fstream>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "tensorbus/base/unique_fd.h"
#include "tensorbus/rpc/unix_listener.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_dir.h"

namespace tensorbus::rpc {
namespace {

using testing::IsStatus;

void Write(const std::string& path, const std::string& text, mode_t mode) {
  std::ofstream(path) << text;
  ASSERT_EQ(::chmod(path.c_str(), mode), 0);
}

/// A socket file at `path`; nobody listens there as long as listen() was not called, or after the
/// end.
UniqueFd BoundSocket(const std::string& path) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  return fd;
}

TEST(Address, FindsThePathOfUnixTargetsOnly) {
  EXPECT_EQ(UnixPathOf("unix:/run/x/daemon.sock"), "/run/x/daemon.sock");
  EXPECT_EQ(UnixPathOf("unix:///run/x/daemon.sock"), "/run/x/daemon.sock");
  EXPECT_EQ(UnixPathOf("localhost:50051"), "");
}

TEST(Address, RefusesTargetsThatCannotBe) {
  for (const char* good :
       {"unix:/run/d.sock", "unix:///run/d.sock", "10.0.0.1:0", "host:65535", "[::1]:80"}) {
    EXPECT_OK(CheckTarget(good));
  }
  for (const std::string& bad :
       {std::string("unix:"), "unix:/" + std::string(107, 'x'), std::string("nonsense"),
        std::string(""), std::string(":80"), std::string("host:"), std::string("host:65536"),
        std::string("host:99999"), std::string("host:-1"), std::string("host:8o")}) {
    EXPECT_THAT(CheckTarget(bad), IsStatus(Code::kInvalidArgument, Reason::kNone)) << bad;
  }
}

TEST(Address, TellsWhyASocketDoesNotAnswer) {
  const testing::TempDir dir;
  const Status missing = DiagnoseUnreachable("unix:" + dir.Join("none.sock"), "silence");
  EXPECT_THAT(missing, IsStatus(Code::kUnavailable, Reason::kNotRunning));
  EXPECT_THAT(missing.message(), ::testing::HasSubstr("tensorbusctl up"));
  EXPECT_THAT(DiagnoseUnreachable("unix:/" + std::string(200, 'x'), "silence"),
              IsStatus(Code::kInvalidArgument, Reason::kNone));
  EXPECT_THAT(DiagnoseUnreachable("10.0.0.1:1", "connection refused"),
              IsStatus(Code::kUnavailable, Reason::kNotRunning));
}

TEST(Address, TakesTokensOnlyFromPrivateFiles) {
  const testing::TempDir dir;
  const std::string path = dir.Join("token");
  Write(path, "  0123456789abcdef0123456789abcdef\n", 0600);
  ASSERT_OK_AND_ASSIGN(const std::string token, ReadTokenFile(path));
  EXPECT_EQ(token, "0123456789abcdef0123456789abcdef");
  Write(path, "0123456789abcdef0123456789abcdef", 0644);
  EXPECT_THAT(ReadTokenFile(path), IsStatus(Code::kInvalidArgument, Reason::kNone));
  Write(path, "short", 0600);
  EXPECT_THAT(ReadTokenFile(path), IsStatus(Code::kInvalidArgument, Reason::kNone));
  EXPECT_EQ(ReadTokenFile(dir.Join("absent")).status().code(), Code::kNotFound);
}

TEST(Address, ComparesSecretsWhole) {
  EXPECT_TRUE(EqualSecrets("abc", "abc"));
  EXPECT_TRUE(EqualSecrets("", ""));
  EXPECT_FALSE(EqualSecrets("abc", "abd"));
  EXPECT_FALSE(EqualSecrets("abc", "abcabc"));
  EXPECT_FALSE(EqualSecrets("abcabc", "abc"));
  EXPECT_FALSE(EqualSecrets("abc", ""));
  EXPECT_FALSE(EqualSecrets("", "abc"));
}

TEST(Address, RefusesFoldersOthersCanWriteTo) {
  const testing::TempDir dir;
  const std::string inner = dir.Join("run");
  ASSERT_OK(EnsurePrivateDir(inner));
  ASSERT_OK(EnsurePrivateDir(inner));
  struct stat info = {};
  ASSERT_EQ(::stat(inner.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700U);
  ASSERT_EQ(::chmod(inner.c_str(), 0777), 0);
  EXPECT_THAT(EnsurePrivateDir(inner), IsStatus(Code::kPermissionDenied, Reason::kNone));
}

TEST(UnixListener, LetsOnlyOneDaemonListen) {
  const testing::TempDir dir;
  const std::string path = dir.Join("d.sock");
  ASSERT_OK_AND_ASSIGN(auto first, UnixListener::Start(path, {}, [](UniqueFd) {}));
  EXPECT_THAT(UnixListener::Start(path, {}, [](UniqueFd) {}),
              IsStatus(Code::kAlreadyExists, Reason::kNone));
  first.reset();
  EXPECT_OK(UnixListener::Start(path, {}, [](UniqueFd) {}));
}

TEST(UnixListener, ReplacesASocketLeftBehind) {
  const testing::TempDir dir;
  const std::string path = dir.Join("d.sock");
  BoundSocket(path);
  EXPECT_OK(UnixListener::Start(path, {}, [](UniqueFd) {}));
}

TEST(UnixListener, LeavesWhatIsNotItsOwn) {
  const testing::TempDir dir;
  const std::string file = dir.Join("weights");
  std::ofstream(file) << "precious";
  EXPECT_THAT(UnixListener::Start(file, {}, [](UniqueFd) {}),
              IsStatus(Code::kAlreadyExists, Reason::kNone));
  ASSERT_OK_AND_ASSIGN(const std::string kept, ReadSmallFile(file));
  EXPECT_EQ(kept, "precious");

  const std::string path = dir.Join("other.sock");
  const UniqueFd other = BoundSocket(path);
  ASSERT_EQ(::listen(other.get(), 1), 0);
  EXPECT_THAT(UnixListener::Start(path, {}, [](UniqueFd) {}),
              IsStatus(Code::kAlreadyExists, Reason::kNone));
  EXPECT_OK(ProbeSocket(path));
}

}  // namespace
}  // namespace tensorbus::rpc
