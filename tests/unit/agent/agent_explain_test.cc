#include <gtest/gtest.h>

#include "tests/testing/status_matchers.h"
#include "tests/unit/agent/agent_fixture.h"

// What an agent says to a worker that is about to give up waiting.
namespace tensorbus::agent {
namespace {

using testing::AgentFixture;
using ::testing::HasSubstr;
using wire::MessageType;

class AgentExplain : public AgentFixture {
 protected:
  /// What the first target's request of that number waits for.
  std::string Told(std::uint64_t request) {
    const Result<wire::Frame> frame = targets[0]->Explain(request);
    EXPECT_OK(frame);
    if (!frame.ok()) return "";
    EXPECT_EQ(static_cast<int>(frame->type), static_cast<int>(MessageType::kExplained));
    const auto reply = wire::Decode<wire::Reply>(frame->body);
    EXPECT_OK(reply);
    return reply.ok() ? reply->status.message() : "";
  }
  static std::vector<std::byte> OneMinute() {
    wire::Update update;
    update.timeout_ms = 60'000;
    return wire::Encode(update);
  }
  void Ask(MessageType type, std::uint64_t request, std::vector<std::byte> body = {}) {
    ASSERT_OK(targets[0]->Send(type, request, std::move(body)));
  }
};

TEST_F(AgentExplain, PassesOnWhatTheDaemonSaysOfAnUpdate) {
  StartPair(FlipMode::kInPlace);
  Ask(MessageType::kUpdate, 501, OneMinute());
  EXPECT_EQ(Told(501), "the fake daemon knows");
  const auto asked = daemon.Received(proto::AgentMessage::kExplainWait);
  ASSERT_EQ(asked.size(), 1U);
  EXPECT_EQ(asked[0].explain_wait().rank().job(), "engine");
  EXPECT_EQ(asked[0].explain_wait().version(), 0U);
}

TEST_F(AgentExplain, SaysThatThereIsNoDaemon) {
  StartPair(FlipMode::kInPlace);
  daemon.Crash(/*accept_again=*/false);
  ASSERT_OK(targets[0]->Ask(MessageType::kClaim, {}));  // answered once the daemon is missed
  Ask(MessageType::kUpdate, 502, OneMinute());
  EXPECT_THAT(Told(502), HasSubstr("fake-target"));
  EXPECT_TRUE(daemon.Received(proto::AgentMessage::kExplainWait).empty());
}

TEST_F(AgentExplain, SaysWhatItIsBusyWithItself) {
  daemon.set_answer_claims(false);
  StartPair(FlipMode::kInPlace);
  Ask(MessageType::kClaim, 503);
  EXPECT_THAT(Told(503), HasSubstr("is being digested and compared"));
  EXPECT_THAT(Told(504), HasSubstr("waits for nothing under number 504"));
}

}  // namespace
}  // namespace tensorbus::agent
