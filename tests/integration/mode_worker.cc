#include <array>
#include <cstdio>
#include <cstring>
#include <poll.h>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tensorbus/client/client.h"

// One rank with private memory, driven from its command line: a trainer that publishes versions or
// an engine that receives them and compares every element. Each step is a line on standard output.
namespace tensorbus {
namespace {

constexpr std::uint64_t kRows = 1024;
constexpr std::uint64_t kColumns = 768;

struct Flags {
  std::string socket;
  std::string channel = "policy";
  bool engine = false;
  std::uint32_t rank = 0;
  std::uint32_t rank_count = 2;
  std::string mode = "any";
  bool shadow = false;
  std::uint32_t versions = 3;
  bool write_during = false;  ///< a trainer that ignores the fence after its last publish
  bool never_serve = false;   ///< a trainer that publishes once and then does nothing
  bool service = false;       ///< a trainer whose service thread serves while it does nothing
};

float ValueAt(std::uint64_t row, std::uint64_t column, std::uint64_t version) {
  return static_cast<float>((row * kColumns + column) % 65521 + version * 65536);
}

void Say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

int Fail(const Status& status) {
  Say("failed: " + status.ToString());
  return 1;
}

/// Sleeps until standard input ends: the test decides how long.
void AwaitEnd() {
  std::array<char, 64> bytes;
  while (::fread(bytes.data(), 1, bytes.size(), stdin) != 0) {
  }
}

/// A trainer holds rows, an engine columns; an engine's columns lie transposed in its memory.
class Worker {
 public:
  explicit Worker(const Flags& flags) : flags_(flags) {
    const std::uint64_t extent = flags.engine ? kColumns : kRows;
    const std::uint64_t share = extent / flags.rank_count;
    const Range own = {flags.rank * share,
                       flags.rank + 1 == flags.rank_count ? extent : (flags.rank + 1) * share};
    rows_ = flags.engine ? Range{0, kRows} : own;
    columns_ = flags.engine ? own : Range{0, kColumns};
    memory_.resize(rows_.size() * columns_.size());
  }

  int Run() {
    client::ConnectOptions connect;
    connect.identity = {.channel = flags_.channel,
                        .job = flags_.engine ? "engine" : "trainer",
                        .role = flags_.engine ? Role::kConsumer : Role::kProducer,
                        .replica = 0,
                        .rank = flags_.rank,
                        .rank_count = flags_.rank_count};
    connect.agent_socket = flags_.socket;
    connect.timeout = std::chrono::seconds(20);
    Result<client::Client> client = client::Client::Connect(connect);
    if (!client.ok()) return Fail(client.status());
    const auto bytes = std::as_writable_bytes(std::span(memory_));
    if (const auto attached = client->AttachPrivate(bytes); !attached.ok()) {
      return Fail(attached.status());
    }
    const Result<client::Registered> registered = client->Register(Registration());
    if (!registered.ok()) return Fail(registered.status());
    Say("mode " + std::to_string(static_cast<int>(registered->mode)) + " " + registered->why);
    if (flags_.service) {
      if (const Status started = client->StartService(); !started.ok()) return Fail(started);
    }
    const Status done = flags_.engine ? Receive(*client) : Train(*client);
    if (!done.ok()) return Fail(done);
    Say("done");
    return 0;
  }

 private:
  client::RegisterOptions Registration() const {
    client::RegisterOptions options;
    const std::array<std::uint64_t, 2> shape = {kRows, kColumns};
    options.tensors = {{"w", DType::kF32, *Shape::Create(shape)}};
    Piece piece;
    const std::array<Range, 2> box = {rows_, columns_};
    piece.box = Box(box);
    piece.strides = {RowStride() * 4, ColumnStride() * 4};
    options.pieces = {piece};
    options.flip = flags_.shadow ? FlipMode::kShadow : FlipMode::kInPlace;
    if (flags_.mode == "cma") options.private_mode = MemoryMode::kCma;
    if (flags_.mode == "bucket") options.private_mode = MemoryMode::kBucket;
    options.timeout = std::chrono::seconds(30);
    return options;
  }
  // Rank 1 of the engine holds its part transposed: runs of one element.
  bool transposed() const { return flags_.engine && flags_.rank == 1; }
  std::uint64_t RowStride() const { return transposed() ? 1 : columns_.size(); }
  std::uint64_t ColumnStride() const { return transposed() ? rows_.size() : 1; }
  float& At(std::uint64_t row, std::uint64_t column) {
    return memory_[(row - rows_.lo) * RowStride() + (column - columns_.lo) * ColumnStride()];
  }

  Status Train(client::Client& client) {
    for (std::uint32_t version = 1; version <= flags_.versions; ++version) {
      TB_RETURN_IF_ERROR(client.BeforeWrite(std::chrono::seconds(60)).status());
      for (std::uint64_t row = rows_.lo; row < rows_.hi; ++row) {
        for (std::uint64_t column = 0; column < kColumns; ++column) {
          At(row, column) = ValueAt(row, column, version);
        }
      }
      client::PublishOptions publish;
      publish.version = Version{version};
      publish.receipts = flags_.write_during;
      TB_ASSIGN_OR_RETURN(client::Request request, client.Publish(publish));
      TB_RETURN_IF_ERROR(request.Wait(std::chrono::seconds(60)).status());
      Say("published " + std::to_string(version));
    }
    if (flags_.write_during) {
      At(rows_.lo + 3, 5) += 1;
      Say("wrote");
    }
    if (flags_.never_serve || flags_.service) {
      AwaitEnd();
    } else {
      TB_ASSIGN_OR_RETURN(const int readable, client.PollFd());
      for (;;) {
        std::array<pollfd, 2> items = {pollfd{0, POLLIN, 0}, pollfd{readable, POLLIN, 0}};
        ::poll(items.data(), items.size(), 60000);
        TB_RETURN_IF_ERROR(client.Poll());
        if (items[0].revents != 0) break;
      }
    }
    return {};
  }

  Status Receive(client::Client& client) {
    for (;;) {
      TB_ASSIGN_OR_RETURN(client::Request request,
                          client.Update({.selector = client::Selector::kNext,
                                         .timeout = std::chrono::seconds(60)}));
      TB_ASSIGN_OR_RETURN(const client::Outcome outcome, request.Wait(std::chrono::seconds(90)));
      std::uint64_t wrong = 0;
      for (std::uint64_t row = rows_.lo; row < rows_.hi; ++row) {
        for (std::uint64_t column = columns_.lo; column < columns_.hi; ++column) {
          if (At(row, column) != ValueAt(row, column, outcome.version.value)) ++wrong;
        }
      }
      Say("version " + std::to_string(outcome.version.value) + " wrong " + std::to_string(wrong));
      if (outcome.version.value == flags_.versions) return {};
    }
  }

  const Flags flags_;
  Range rows_;
  Range columns_;
  std::vector<float> memory_;
};

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("A rank with private memory, for tests.", "mode-worker");
  app.add_option("--socket", flags.socket)->required();
  app.add_option("--channel", flags.channel);
  app.add_flag("--engine", flags.engine);
  app.add_option("--rank", flags.rank);
  app.add_option("--rank-count", flags.rank_count);
  app.add_option("--mode", flags.mode);
  app.add_flag("--shadow", flags.shadow);
  app.add_option("--versions", flags.versions);
  app.add_flag("--write-during", flags.write_during);
  app.add_flag("--never-serve", flags.never_serve);
  app.add_flag("--service", flags.service);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return Worker(flags).Run();
}

}  // namespace
}  // namespace tensorbus

int main(int argc, char** argv) {
  return tensorbus::Main(argc, argv);
}
