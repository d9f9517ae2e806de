#include "agent/trace_dump.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <sys/resource.h>
#include <thread>

#include "tests/testing/deadline.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/agent/agent_fixture.h"

namespace tensorbus::agent {
namespace {

using testing::AgentFixture;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::TempDir;

std::size_t FileCount(const std::string& folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

std::string TextOf(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(TraceDump, KeepsABoundedNumberOfFilesTheNewest) {
  const TempDir dir;
  std::string last;
  for (std::uint64_t session = 1; session <= kTraceFilesMax + 5; ++session) {
    last = TracePath(dir.path(), SessionId{session});
    ASSERT_OK(WriteTrace(last, SessionId{session}, Status(Code::kAborted, "no luck"), {}));
  }
  EXPECT_EQ(FileCount(dir.path()), kTraceFilesMax);
  EXPECT_THAT(TextOf(last), HasSubstr("session=21 error=\"ABORTED: no luck\""));
  EXPECT_EQ(std::filesystem::status(last).permissions(), std::filesystem::perms(0600));
}

TEST(TraceDump, LeavesNoHalfAFileOnAFullDisk) {
  const TempDir dir;
  const std::string path = TracePath(dir.path(), SessionId{1});
  const rlimit small = {.rlim_cur = 16, .rlim_max = RLIM_INFINITY};
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status written = WriteTrace(path, SessionId{1}, Status(Code::kAborted, "no luck"), {});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_FALSE(written.ok());
  EXPECT_EQ(FileCount(dir.path()), 0U);
}

TEST_F(AgentFixture, TheErrorOfAFailedSessionNamesAFileWithItsTrace) {
  StartPair(FlipMode::kShadow);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  PublishAll(2);
  sources[0]->BumpWriteCount();
  const std::string message = UpdateAll()[0].status.message();
  const std::size_t at = message.find(folder_ + "/traces/session-");
  ASSERT_NE(at, std::string::npos) << message;
  const std::string path = message.substr(at, message.find(".trace", at) + 6 - at);
  // Written while the error is on its way.
  const TimePoint deadline = testing::In(std::chrono::seconds(20));
  std::string text;
  while (text.find("bytes=") == std::string::npos && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
    text = TextOf(path);
  }
  EXPECT_THAT(text, HasSubstr("error="));
  EXPECT_THAT(text, HasSubstr("name=copy track=policy/engine/0/0"));
  EXPECT_THAT(text, HasSubstr("name=\"failed while preparing\""));
}

}  // namespace
}  // namespace tensorbus::agent
