#include "tensorbus/rpc/address.h"

#include <fstream>
#include <gtest/gtest.h>
#include <sys/stat.h>

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

TEST(Address, FindsThePathOfUnixTargetsOnly) {
  EXPECT_EQ(UnixPathOf("unix:/run/x/daemon.sock"), "/run/x/daemon.sock");
  EXPECT_EQ(UnixPathOf("unix:///run/x/daemon.sock"), "/run/x/daemon.sock");
  EXPECT_EQ(UnixPathOf("localhost:50051"), "");
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
  std::ofstream(path) << "";
  EXPECT_OK(UnixListener::Start(path, {}, [](UniqueFd) {}));
}

}  // namespace
}  // namespace tensorbus::rpc
