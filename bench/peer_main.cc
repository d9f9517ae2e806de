#include <cstdio>
#include <fmt/format.h>
#include <optional>

#include <CLI/CLI.hpp>

#include "bench/ceilings.h"
#include "bench/hand_peer.h"

// tensorbus-bench-peer: one process of what `tensorbusctl bench` measures beside the bus. Started
// by it, not by people.
namespace tensorbus::bench {
namespace {

using cli::BenchCommand;
using cli::BenchMessage;
using cli::BenchReply;

struct Flags {
  std::string kind;
  std::string role = "target";
  HandOptions hand;
  std::uint64_t source_bytes = 0;
  std::uint64_t target_bytes = 0;
  int fd = -1;
};

/// Whatever this process is; one of the three.
class Peer {
 public:
  explicit Peer(const Flags& flags) : flags_(flags) {}

  Status Do(const BenchMessage& message, BenchReply* reply) {
    if (message.command == BenchCommand::kHello) return SetUp(reply);
    if (source_.has_value() && message.command == BenchCommand::kWrite) {
      source_->Write(message.version);
      return {};
    }
    if (target_.has_value()) return DoTarget(message, reply);
    if (ceilings_.has_value()) return DoCeiling(message, reply);
    return {Code::kUnimplemented, "not a command for this process"};
  }

 private:
  Status SetUp(BenchReply* reply) {
    if (flags_.kind == "ceiling") {
      TB_ASSIGN_OR_RETURN(ceilings_, Ceilings::Create(flags_.source_bytes, flags_.target_bytes));
    } else if (flags_.role == "source") {
      TB_ASSIGN_OR_RETURN(source_, HandSource::Create(flags_.hand));
      reply->address = reinterpret_cast<std::uint64_t>(source_->data());
    } else {
      TB_ASSIGN_OR_RETURN(target_, HandTarget::Create(flags_.hand));
    }
    return {};
  }

  Status DoTarget(const BenchMessage& message, BenchReply* reply) {
    switch (message.command) {
      case BenchCommand::kPeer:
        return target_->SetPeer(message.count, message.a, static_cast<pid_t>(message.b));
      case BenchCommand::kRun:
        return target_->Move(message.count, reply);
      case BenchCommand::kVerify:
        return target_->Verify(message.version);
      default:
        return {Code::kUnimplemented, "not a command for a target"};
    }
  }

  Status DoCeiling(const BenchMessage& message, BenchReply* reply) {
    switch (message.command) {
      case BenchCommand::kWrite:
        ceilings_->Write(message.version);
        return {};
      case BenchCommand::kRun:
        return ceilings_->Run(static_cast<cli::BenchCeiling>(message.a), reply);
      case BenchCommand::kVerify:
        return ceilings_->Verify();
      default:
        return {Code::kUnimplemented, "not a command for a ceiling"};
    }
  }

  const Flags& flags_;
  std::optional<HandSource> source_;
  std::optional<HandTarget> target_;
  std::optional<Ceilings> ceilings_;
};

int Serve(const Flags& flags) {
  Peer peer(flags);
  while (true) {
    const auto message = cli::ReceiveCommand(flags.fd);
    if (!message.ok()) return 1;
    if (message->command == BenchCommand::kQuit) return 0;
    BenchReply reply = cli::ReplyTo(message->command, {});
    const std::uint64_t cpu = cli::ProcessCpuNs();
    const Status status = peer.Do(*message, &reply);
    if (!status.ok()) reply = cli::ReplyTo(message->command, status);
    reply.cpu_ns = cli::ProcessCpuNs() - cpu;
    if (!cli::SendBench(flags.fd, reply).ok()) return 1;
  }
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("One process of what `tensorbusctl bench` measures beside the bus; it starts them.",
               "tensorbus-bench-peer");
  app.add_option("kind", flags.kind, "hand-shm, hand-cma or ceiling")
      ->required()
      ->check(CLI::IsMember({"hand-shm", "hand-cma", "ceiling"}));
  app.add_option("--role", flags.role, "source or target")
      ->check(CLI::IsMember({"source", "target"}));
  app.add_option("--source", flags.hand.source, "Layout of the source job");
  app.add_option("--target", flags.hand.target, "Layout of the target job");
  app.add_option("--rank", flags.hand.rank, "Rank inside its job");
  app.add_option("--go", flags.hand.go, "Descriptor of the go page");
  app.add_option("--slot", flags.hand.slot, "Slot of the go page");
  app.add_option("--arena", flags.hand.arenas, "Descriptors of the source arenas, rank 0 first");
  app.add_option("--source-bytes", flags.source_bytes, "Size of a ceiling's source");
  app.add_option("--target-bytes", flags.target_bytes, "Size of a ceiling's target");
  app.add_option("--fd", flags.fd, "Descriptor to be told what to do on")->required();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  flags.hand.cma = flags.kind == "hand-cma";
  return Serve(flags);
}

}  // namespace
}  // namespace tensorbus::bench

int main(int argc, char** argv) {
  return tensorbus::bench::Main(argc, argv);
}
