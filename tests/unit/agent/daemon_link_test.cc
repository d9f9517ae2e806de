#include "agent/daemon_link.h"

#include <gmock/gmock.h>

#include "tensorbus/rpc/protocol.h"
#include "tensorbus/rpc/status_map.h"
#include "tests/testing/manual_executor.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::agent {
namespace {

using namespace std::chrono_literals;

/// A stream on which the daemon answers each Hello with what the test says.
class FakeLink final : public rpc::ControlLink {
 public:
  FakeLink(Executor& executor, OnMessage on_message, const proto::Welcome& welcome)
      : executor_(executor), on_message_(std::move(on_message)), welcome_(welcome) {}

  void Send(proto::AgentMessage message) override {
    if (!message.has_hello()) return;
    executor_.Post([on_message = on_message_, welcome = welcome_] {
      proto::DaemonMessage answer;
      *answer.mutable_welcome() = welcome;
      on_message(answer);
    });
  }
  void GetLayout(const Hash128& /*hash*/, Nanos /*timeout*/, OnLayout /*done*/) override {}

 private:
  Executor& executor_;
  const OnMessage on_message_;
  const proto::Welcome welcome_;
};

class DaemonLinkTest : public ::testing::Test {
 protected:
  void Start() {
    link_.emplace(
        DaemonLink::Options{}, executor_,
        [this](Executor& executor, rpc::ControlLink::OnMessage on_message,
               const rpc::ControlLink::OnLost& /*on_lost*/) {
          ++opened_;
          return std::make_unique<FakeLink>(executor, std::move(on_message), welcome_);
        },
        DaemonLink::Handler{.on_ready = [](const proto::Welcome&) {},
                            .on_message = [](const proto::DaemonMessage&) {},
                            .on_lost = [](const Status&) {}});
    link_->Start();
  }

  testing::ManualExecutor executor_;
  proto::Welcome welcome_;
  int opened_ = 0;
  std::optional<DaemonLink> link_;
};

TEST_F(DaemonLinkTest, TriesAgainAfterSecondsWhenTheDaemonRefuses) {
  welcome_.set_protocol(rpc::kControlProtocol);
  *welcome_.mutable_error() = rpc::ToProto(Status(Code::kAlreadyExists, "the name is taken"));
  ::testing::internal::CaptureStderr();
  Start();
  executor_.Advance(4s);
  EXPECT_EQ(opened_, 1);
  EXPECT_FALSE(link_->ready());
  executor_.Advance(12s);
  EXPECT_EQ(opened_, 4);
  welcome_.clear_error();  // whoever had the name is gone
  executor_.Advance(5s);
  EXPECT_TRUE(link_->ready());
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(log.find("event=daemon_refused"), log.rfind("event=daemon_refused")) << "said once";
  EXPECT_THAT(log, ::testing::HasSubstr("the name is taken"));
}

TEST_F(DaemonLinkTest, SaysAlsoThatItIsRefusedForAnotherReason) {
  welcome_.set_protocol(rpc::kControlProtocol);
  *welcome_.mutable_error() = rpc::ToProto(Status(Code::kAlreadyExists, "the name is taken"));
  ::testing::internal::CaptureStderr();
  Start();
  executor_.Advance(6s);
  *welcome_.mutable_error() = rpc::ToProto(
      Status(Code::kFailedPrecondition, "install the same release", Reason::kProtocolVersion));
  executor_.Advance(11s);
  EXPECT_EQ(opened_, 4);
  const std::string log = ::testing::internal::GetCapturedStderr();
  const auto second = log.find("install the same release");
  EXPECT_LT(log.find("the name is taken"), second);
  EXPECT_NE(second, std::string::npos);
  EXPECT_EQ(second, log.rfind("install the same release")) << "said once";
}

}  // namespace
}  // namespace tensorbus::agent
