// What agents say, in any order, against the whole of the daemon's core in virtual time. Input:
// records of a byte (which of two agents, or what else happens), a 16-bit length and a serialized
// AgentMessage.

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "tensorbus/base/byte_io.h"
#include "tensorbus/base/log.h"
#include "tensorbus/base/metrics.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/rpc/convert.h"
#include "tests/testing/inline_side_work.h"
#include "tests/testing/manual_executor.h"

namespace tensorbus::daemon {
namespace {

using namespace std::chrono_literals;

class DeafAgent final : public rpc::AgentPort {
 public:
  void Send(proto::DaemonMessage message) override { static_cast<void>(message.ByteSizeLong()); }
  void Close(Status) override {}
};

struct Bench {
  testing::ManualExecutor executor;
  testing::InlineSideWork side_work{executor};
  Metrics registry;
  DaemonMetrics metrics{registry};
  Core core{CoreOptions{}, executor, side_work, metrics};
  std::uint64_t ports = 0;
  rpc::PortId port[2];

  void Attach(int agent) {
    port[agent] = rpc::PortId{++ports};
    core.OnAttach(port[agent], std::make_shared<DeafAgent>(), "fd:1");
  }
};

void Run(std::span<const std::byte> input) {
  Bench bench;
  bench.Attach(0);
  bench.Attach(1);
  ByteReader reader(input);
  while (reader.remaining() >= 3) {
    const auto what = reader.Get<std::uint8_t>();
    const auto bytes = reader.GetBytes(reader.Get<std::uint16_t>());
    const int agent = what & 1;
    switch (what >> 1 & 7) {
      case 1:
        bench.executor.Advance(1s);
        break;
      case 2:
        bench.core.OnDetach(bench.port[agent], {});
        bench.Attach(agent);
        break;
      case 3:
        bench.core.GetStatus({}, [](const Result<proto::StatusReply>&) {});
        bench.core.WhoIsMissing({}, [](const Result<proto::WhoIsMissingReply>&) {});
        bench.core.Verify({}, [](const Result<proto::VerifyReply>&) {});
        break;
      default: {
        proto::AgentMessage message;
        if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) break;
        bench.core.OnMessage(bench.port[agent], message);
      }
    }
    bench.executor.RunReady();
  }
  // Whatever was said: every wait ends.
  bench.executor.Advance(48h);
  if (bench.core.counts().sessions != 0 || bench.core.counts().queries != 0) std::abort();
}

}  // namespace
}  // namespace tensorbus::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool quiet = [] {
    tensorbus::InitLog("fuzz", tensorbus::LogLevel::kError);
    google::protobuf::SetLogHandler(nullptr);
    return true;
  }();
  static_cast<void>(quiet);
  tensorbus::daemon::Run(std::as_bytes(std::span(data, size)));
  return 0;
}
