#include "tensorbus/cli/bench_crew.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>

#include "tensorbus/cli/programs.h"
#include "tests/testing/deadline.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::cli {
namespace {

using testing::In;
using testing::IsStatus;
using namespace std::chrono_literals;

CrewSpec Shell(const std::string& script, bool speaks = false) {
  return {.name = "shell", .argv = {"/bin/sh", "-c", script}, .speaks = speaks};
}

TEST(BenchCrew, NamesAProcessThatEnds) {
  ASSERT_OK_AND_ASSIGN(Crew crew, Crew::Create());
  ASSERT_OK(crew.Start(Shell("exit 7")).status());
  const Status status = crew.Await([] { return false; }, In(20s), "nothing");
  EXPECT_THAT(status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_EQ(status.message(), "shell ended with status 7");
}

TEST(BenchCrew, NamesWhoDoesNotAnswer) {
  ASSERT_OK_AND_ASSIGN(Crew crew, Crew::Create());
  // The trailing words --fd N are the script's arguments.
  ASSERT_OK_AND_ASSIGN(const Crew::Member member, crew.Start(Shell("exec sleep 100", true)));
  const auto replies =
      crew.Ask(std::span(&member, 1), {.command = BenchCommand::kHello}, In(50ms), "setting up");
  EXPECT_THAT(replies.status(), IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  EXPECT_EQ(replies.status().message(), "no answer in time from shell (setting up)");
}

TEST(BenchCrew, NamesWhoLivesOnWithoutItsChannel) {
  ASSERT_OK_AND_ASSIGN(Crew crew, Crew::Create());
  // A plain sh closes descriptors below 10 only.
  const CrewSpec deaf = {.name = "deaf",
                         .argv = {"/bin/bash", "-c", "eval \"exec $1>&-\"; exec sleep 100"},
                         .speaks = true};
  ASSERT_OK_AND_ASSIGN(const Crew::Member member, crew.Start(deaf));
  const auto replies = crew.Collect(std::span(&member, 1), In(200ms), "setting up");
  EXPECT_THAT(replies.status(), IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  EXPECT_EQ(replies.status().message(), "no answer in time from deaf (setting up)");
}

TEST(BenchCrew, EndsItsProcessesAndRemovesItsFolder) {
  std::string folder;
  pid_t pid = 0;
  {
    ASSERT_OK_AND_ASSIGN(Crew crew, Crew::Create());
    folder = crew.folder();
    // Deaf to SIGTERM would take seconds; this one hears it.
    ASSERT_OK_AND_ASSIGN(const Crew::Member member, crew.Start(Shell("exec sleep 100")));
    pid = crew.pid(member);
    EXPECT_TRUE(std::filesystem::exists(folder));
  }
  EXPECT_FALSE(std::filesystem::exists(folder));
  EXPECT_EQ(::kill(pid, 0), -1);
}

TEST(BenchCrew, SignalsComeBackAsCancelled) {
  ASSERT_OK_AND_ASSIGN(Crew crew, Crew::Create());
  ASSERT_OK(crew.Start(Shell("exec sleep 100")).status());
  ::raise(SIGINT);
  EXPECT_THAT(crew.Await([] { return false; }, In(20s), "nothing"),
              IsStatus(Code::kCancelled, Reason::kCancelled));
}

TEST(BenchCrew, RunsAProgramToItsEnd) {
  ASSERT_OK_AND_ASSIGN(Crew crew, Crew::Create());
  ASSERT_OK_AND_ASSIGN(const int fine, crew.RunToEnd(Shell("exit 0"), 20s));
  EXPECT_EQ(fine, 0);
  ASSERT_OK_AND_ASSIGN(const int failed, crew.RunToEnd(Shell("exit 7"), 20s));
  EXPECT_EQ(failed, 7);
  ASSERT_OK_AND_ASSIGN(const int killed, crew.RunToEnd(Shell("kill -9 $$"), 20s));
  EXPECT_EQ(killed, 128 + SIGKILL);
  EXPECT_OK(crew.Await([] { return true; }, In(20s), "nothing")) << "its end is no loss";
  EXPECT_THAT(crew.RunToEnd(Shell("exec sleep 100"), 50ms).status(),
              IsStatus(Code::kDeadlineExceeded, Reason::kNone));
}

TEST(BenchCrew, ASignalEndsTheProgramThatRunsToItsEnd) {
  ASSERT_OK_AND_ASSIGN(Crew crew, Crew::Create());
  const std::string note = crew.folder() + "/pid";
  const CrewSpec spec = Shell("echo $$ > " + note + "; kill -TERM $PPID; exec sleep 100");
  const TimePoint begin = Clock::Real().Now();
  const Status status = crew.RunToEnd(spec, 60s).status();
  EXPECT_THAT(status, IsStatus(Code::kCancelled, Reason::kCancelled));
  EXPECT_EQ(status.native(), SIGTERM);
  EXPECT_LT(Clock::Real().Now() - begin, 30s);
  pid_t pid = 0;
  std::ifstream(note) >> pid;
  ASSERT_GT(pid, 0);
  EXPECT_EQ(::kill(pid, 0), -1);
}

TEST(BenchCrew, KeepsTheLastWords) {
  ASSERT_OK_AND_ASSIGN(Crew crew, Crew::Create());
  ASSERT_OK(crew.Start(Shell("echo farewell >&2; exit 1")).status());
  EXPECT_FALSE(crew.Await([] { return false; }, In(20s), "nothing").ok());
  EXPECT_EQ(crew.LogTails(), "  [shell] farewell\n");
}

TEST(BenchCrew, ProgramsThatAreNotThereAreNamed) {
  EXPECT_THAT(FindProgram("tensorbus-no-such-program").status(),
              IsStatus(Code::kNotFound, Reason::kNone));
}

}  // namespace
}  // namespace tensorbus::cli
