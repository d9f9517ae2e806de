#include "agent/local_socket.h"

#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_dir.h"

namespace tensorbus::agent {
namespace {

using testing::IsStatus;
using testing::TempDir;

mode_t ModeOf(const std::string& path) {
  struct stat info = {};
  EXPECT_EQ(::stat(path.c_str(), &info), 0);
  return info.st_mode & 0777;
}

TEST(LocalListener, MakesAPrivateFolderAndSocket) {
  const TempDir dir;
  const std::string path = dir.Join("run/agent.sock");
  {
    ASSERT_OK_AND_ASSIGN(const LocalListener listener, LocalListener::Create(path, false));
    EXPECT_EQ(ModeOf(dir.Join("run")), 0700U);
    EXPECT_EQ(ModeOf(path), 0600U);
  }
  EXPECT_NE(::access(path.c_str(), F_OK), 0) << "removed with the listener";
}

TEST(LocalListener, RefusesAFolderThatOthersMayChange) {
  const TempDir dir;
  const std::string folder = dir.Join("run");
  ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(folder.c_str(), 0777), 0);
  const auto open = LocalListener::Create(folder + "/agent.sock", false);
  EXPECT_THAT(open, IsStatus(Code::kPermissionDenied, Reason::kNone));
  EXPECT_NE(open.status().message().find("chmod 700"), std::string::npos) << open.status();
  ASSERT_EQ(::chmod(folder.c_str(), 01777), 0);  // like /tmp: nobody may take another's file away
  EXPECT_OK(LocalListener::Create(folder + "/agent.sock", false));
}

TEST(LocalListener, RefusesAFolderOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make one";
  const TempDir dir;
  const std::string folder = dir.Join("run");
  ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
  ASSERT_EQ(::chown(folder.c_str(), 12345, 12345), 0);
  const auto theirs = LocalListener::Create(folder + "/agent.sock", false);
  EXPECT_THAT(theirs, IsStatus(Code::kPermissionDenied, Reason::kNone));
  EXPECT_NE(theirs.status().message().find("belongs to user 12345"), std::string::npos);
}

TEST(LocalListener, OpensTheSocketToOthersOnRequestOnly) {
  const TempDir dir;
  ASSERT_OK_AND_ASSIGN(const LocalListener listener,
                       LocalListener::Create(dir.Join("agent.sock"), true));
  EXPECT_EQ(ModeOf(dir.Join("agent.sock")), 0666U);
}

TEST(LocalListener, RefusesASocketSomebodyListensOn) {
  const TempDir dir;
  ASSERT_OK_AND_ASSIGN(const LocalListener first, LocalListener::Create(dir.Join("s"), false));
  const auto second = LocalListener::Create(dir.Join("s"), false);
  EXPECT_THAT(second, IsStatus(Code::kAlreadyExists, Reason::kNone));
  EXPECT_NE(second.status().message().find("another agent listens"), std::string::npos);
}

TEST(LocalListener, ReplacesWhatADeadAgentLeftBehind) {
  const TempDir dir;
  const std::string path = dir.Join("s");
  {
    const UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    ASSERT_EQ(::bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  EXPECT_OK(LocalListener::Create(path, false));
}

TEST(LocalListener, NeverRemovesAFileThatIsNoSocket) {
  const TempDir dir;
  std::ofstream(dir.Join("s")) << "precious";
  EXPECT_THAT(LocalListener::Create(dir.Join("s"), false),
              IsStatus(Code::kAlreadyExists, Reason::kNone));
  EXPECT_EQ(::access(dir.Join("s").c_str(), F_OK), 0);
}

TEST(LocalListener, NamesAPathThatDoesNotFitOrMayNotBeWritten) {
  EXPECT_THAT(LocalListener::Create("/tmp/" + std::string(200, 'x'), false),
              IsStatus(Code::kInvalidArgument, Reason::kNone));
  const auto refused = LocalListener::Create("/proc/nowhere/agent.sock", false);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("/proc/nowhere"), std::string::npos);
}

TEST(CheckPeer, LetsOwnUserRootAndTheAllowedInAndNamesTheRemedy) {
  EXPECT_OK(CheckPeer({.pid = 1, .uid = 1000}, 1000, {}));
  EXPECT_OK(CheckPeer({.pid = 1, .uid = 0}, 1000, {}));
  EXPECT_OK(CheckPeer({.pid = 1, .uid = 1001}, 1000, {1001}));
  const Status refused = CheckPeer({.pid = 77, .uid = 1001}, 1000, {1002});
  EXPECT_THAT(refused, IsStatus(Code::kPermissionDenied, Reason::kNone));
  EXPECT_NE(refused.message().find("--allow-uid 1001"), std::string::npos);
  EXPECT_NE(refused.message().find("process 77"), std::string::npos);
}

TEST(PeerOf, SeesThisProcess) {
  int ends[2] = {-1, -1};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd a(ends[0]);
  const UniqueFd b(ends[1]);
  ASSERT_OK_AND_ASSIGN(const PeerProcess peer, PeerOf(a.get()));
  EXPECT_EQ(peer.pid, ::getpid());
  EXPECT_EQ(peer.uid, ::getuid());
}

}  // namespace
}  // namespace tensorbus::agent
