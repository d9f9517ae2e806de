#include "tensorbus/cli/admin_run.h"

#include <chrono>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <iostream>
#include <thread>
#include <unistd.h>

#include "tensorbus/base/printable.h"
#include "tensorbus/cli/admin_json.h"
#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/output_file.h"
#include "tensorbus/cli/plan_report.h"
#include "tensorbus/cli/table.h"
#include "tensorbus/rpc/admin_client.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::cli {

namespace {

/// Left to the daemon to answer before our own patience ends.
constexpr double kAnswerShare = 0.9;

Nanos TimeoutOf(const AdminOptions& options) {
  return std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(options.timeout_seconds));
}

int Fail(const AdminOptions& options, const Status& status, std::ostream& out, std::ostream& err) {
  if (options.json) out << Dump(ErrorJson(status)) << '\n';
  err << Paint("error: ", Colour::kRed, Colourful(err)) << Printable(status.message()) << '\n';
  return status.code() == Code::kInvalidArgument ? kExitUsage : kExitFailed;
}

/// The answer for whoever asked for JSON; whether that was so.
template <typename Reply>
bool PrintJson(const AdminOptions& options, const Reply& reply, std::ostream& out) {
  if (options.json) out << Dump(ToJson(reply)) << '\n';
  return options.json;
}

/// One call to the daemon and what to do with the answer.
template <typename Request, typename Reply, typename Show>
int Ask(const AdminOptions& options, Result<Reply> (rpc::AdminClient::*method)(const Request&),
        const Request& request, std::ostream& out, std::ostream& err, Show show) {
  auto client = rpc::AdminClient::Create(options.daemon, TimeoutOf(options));
  if (!client.ok()) return Fail(options, client.status(), out, err);
  const Result<Reply> reply = ((**client).*method)(request);
  if (!reply.ok()) return Fail(options, reply.status(), out, err);
  return show(*reply);
}

Colour ColourOf(const std::string& state) {
  if (state == "dirty" || state == "failed" || state == "incomplete") return Colour::kRed;
  if (state == "idle" || state == "done" || state == "readable") return Colour::kGreen;
  return Colour::kYellow;
}

std::string BoxText(const proto::BoxMessage& box) {
  std::string out;
  for (int d = 0; d < box.lo_size() && d < box.hi_size(); ++d) {
    out += fmt::format("{}{}:{}", d == 0 ? "" : ", ", box.lo(d), box.hi(d));
  }
  return "[" + out + "]";
}

template <typename Repeated>
std::uint64_t CountOf(const Repeated& items) {
  return static_cast<std::uint64_t>(items.size());
}

std::string VersionText(std::uint64_t version) {
  return version == 0 ? "-" : std::to_string(version);
}

/// How a replica's layout compares with the producer's.
Cell LayoutCell(const std::string& fit) {
  if (fit == "does_not_fit") return {"does not fit", Colour::kRed};
  if (fit == "not_compared") return {"not compared", Colour::kYellow};
  return {fit, Colour::kGreen};
}

void PrintChannel(const proto::ChannelStatus& channel, bool colours, std::ostream& err) {
  err << fmt::format("{}  latest version {}, epoch {}, {}, {}\n",
                     Paint("channel " + channel.channel(), Colour::kBold, colours),
                     VersionText(channel.latest_version()), channel.epoch(),
                     Count(channel.tensor_count(), "tensor"), HumanBytes(channel.bytes()));
  Table table({"JOB", "ROLE", "RANKS", "STATE", "LAYOUT", "VERSION", "FLIP", "PROOF", "WAITING"});
  if (!channel.producer_job().empty()) {
    const bool complete =
        static_cast<std::uint32_t>(channel.producer_ranks_size()) == channel.producer_rank_count();
    const std::string state = complete                             ? "registered"
                              : channel.producer_ranks_size() == 0 ? "left"
                                                                   : "incomplete";
    table.Add({channel.producer_job(), "producer",
               fmt::format("{}/{}", channel.producer_ranks_size(), channel.producer_rank_count()),
               Cell(state, complete ? Colour::kGreen : Colour::kRed), "",
               VersionText(channel.latest_version()), "", "", ""});
  }
  for (const auto& replica : channel.replicas()) {
    std::uint64_t waiting = 0;
    for (const auto& rank : replica.ranks()) waiting += rank.waiting() ? 1 : 0;
    table.Add({fmt::format("{} replica {}", replica.job(), replica.replica()), "consumer",
               fmt::format("{}/{}", replica.ranks_size(), replica.rank_count()),
               Cell(replica.state(), ColourOf(replica.state())), LayoutCell(replica.layout()),
               VersionText(replica.live_version()), replica.flip(), replica.proof(),
               waiting == 0 ? "" : Count(waiting, "rank")});
  }
  table.Print(err, "  ");
  for (const auto& replica : channel.replicas()) {
    if (!replica.has_error()) continue;
    err << fmt::format("  {} replica {}: {}\n", Printable(replica.job()), replica.replica(),
                       Printable(replica.error().message()));
  }
}

void PrintStatus(const proto::StatusReply& reply, std::ostream& err) {
  const bool colours = Colourful(err);
  err << fmt::format("{}  up {}, {}, {}\n", Paint(reply.daemon(), Colour::kBold, colours),
                     HumanSeconds(reply.uptime_seconds()), Count(CountOf(reply.agents()), "agent"),
                     Count(CountOf(reply.channels()), "channel"));
  if (reply.agents_size() > 0) {
    Table agents({"AGENT", "HOST", "PID", "RANKS", "ENDPOINTS"});
    for (const auto& agent : reply.agents()) {
      agents.Add({agent.agent(), agent.host(), std::to_string(agent.pid()),
                  std::to_string(agent.rank_count()),
                  fmt::format("{}", fmt::join(agent.endpoints(), " "))});
    }
    agents.Print(err, "  ");
  }
  for (const auto& channel : reply.channels()) PrintChannel(channel, colours, err);
  if (reply.sessions_size() == 0) return;
  constexpr int kShown = 10;
  Table sessions({"SESSION", "REPLICA", "VERSION", "STATE", "SECONDS", "BYTES", "ERROR"});
  const int first = std::max(0, reply.sessions_size() - kShown);
  for (int i = first; i < reply.sessions_size(); ++i) {
    const auto& session = reply.sessions(i);
    sessions.Add({std::to_string(session.session()),
                  fmt::format("{}/{} replica {}", session.channel(), session.target_job(),
                              session.replica()),
                  std::to_string(session.version()),
                  Cell(session.state(), ColourOf(session.state())),
                  fmt::format("{:.3f}", session.seconds()), HumanBytes(session.bytes()),
                  session.error().message()});
  }
  err << Paint("sessions", Colour::kBold, colours) << '\n';
  sessions.Print(err, "  ");
}

}  // namespace

int RunStatus(const AdminOptions& options, const WatchOptions& watch, std::ostream& out,
              std::ostream& err) {
  const auto show = [&](const proto::StatusReply& reply) {
    if (!PrintJson(options, reply, out)) PrintStatus(reply, err);
    return kExitFine;
  };
  if (!watch.watch) {
    return Ask(options, &rpc::AdminClient::GetStatus, proto::StatusRequest(), out, err, show);
  }
  const auto interval = std::chrono::duration<double>(watch.interval_seconds);
  const bool screen = &err == &std::cerr && ::isatty(STDERR_FILENO) != 0;
  for (std::uint64_t done = 0; watch.updates == 0 || done < watch.updates; ++done) {
    if (done > 0) std::this_thread::sleep_for(interval);
    if (screen) err << "\x1b[H\x1b[2J";
    const int code =
        Ask(options, &rpc::AdminClient::GetStatus, proto::StatusRequest(), out, err, show);
    if (code == kExitUsage || (code != kExitFine && watch.updates != 0)) return code;
    err.flush();
    if (!out.flush()) break;  // nobody reads on; main() says so
  }
  return kExitFine;
}

int RunVersions(const AdminOptions& options, const std::string& channel, std::ostream& out,
                std::ostream& err) {
  proto::VersionsRequest request;
  request.set_channel(channel);
  return Ask(options, &rpc::AdminClient::GetVersions, request, out, err,
             [&](const proto::VersionsReply& reply) {
               if (PrintJson(options, reply, out)) return kExitFine;
               Table table({"CHANNEL", "VERSION", "STATE", "KEPT AS", "RANKS", "AGE", "LIVE AT"});
               for (const auto& version : reply.versions()) {
                 const bool gone = version.state() == "released";
                 table.Add({version.channel(), std::to_string(version.version()),
                            Cell(version.state(), ColourOf(version.state())),
                            gone                 ? ""
                            : version.snapshot() ? "snapshot"
                                                 : "memory",
                            fmt::format("{}/{}", version.published_ranks(), version.rank_count()),
                            HumanSeconds(version.age_seconds()),
                            fmt::format("{}", fmt::join(version.live_at(), ", "))});
               }
               if (table.empty()) {
                 err << "nothing has been published yet\n";
               } else {
                 table.Print(err);
               }
               return kExitFine;
             });
}

int RunRollback(const AdminOptions& options, const std::string& channel, std::uint64_t version,
                std::ostream& out, std::ostream& err) {
  proto::RollbackRequest request;
  request.set_channel(channel);
  request.set_version(version);
  return Ask(options, &rpc::AdminClient::Rollback, request, out, err,
             [&](const proto::RollbackReply& reply) {
               if (options.json) {
                 out << Dump(OrderedJson{{"version", version}, {"replicas", reply.replica_count()}})
                     << '\n';
               }
               err << fmt::format(
                   "version {} is what replicas get now; {} will have it after the next request\n",
                   version, Count(reply.replica_count(), "replica"));
               return kExitFine;
             });
}

int RunExplain(const AdminOptions& options, const std::string& channel, const std::string& tensor,
               std::ostream& out, std::ostream& err) {
  proto::ExplainRequest request;
  request.set_channel(channel);
  request.set_tensor(tensor);
  return Ask(options, &rpc::AdminClient::Explain, request, out, err,
             [&](const proto::ExplainReply& reply) {
               const Status fault = rpc::FromProto(reply.error());
               if (!fault.ok()) return Fail(options, fault, out, err);
               if (PrintJson(options, reply, out)) return kExitFine;
               err << fmt::format("{}  {} [{}]\n", Printable(tensor), Printable(reply.dtype()),
                                  fmt::join(reply.shape(), ", "));
               Table holders({"HELD BY", "BOXES"});
               for (const auto& holder : reply.holders()) {
                 std::string boxes;
                 for (const auto& box : holder.boxes()) boxes += BoxText(box) + " ";
                 holders.Add({fmt::format("{} replica {} rank {}", holder.job(), holder.replica(),
                                          holder.rank()),
                              boxes});
               }
               holders.Print(err, "  ");
               Table routes({"FROM RANK", "TO", "BOX", "BYTES"}, {3});
               for (const auto& route : reply.routes()) {
                 routes.Add({std::to_string(route.source_rank()),
                             fmt::format("{} replica {} rank {}", route.target_job(),
                                         route.replica(), route.target_rank()),
                             BoxText(route.box()), HumanBytes(route.bytes())});
               }
               if (!routes.empty()) routes.Print(err, "  ");
               if (!reply.why_no_routes().empty()) {
                 err << fmt::format("  no routes: {}\n", Printable(reply.why_no_routes()));
               }
               return kExitFine;
             });
}

int RunWhoIsMissing(const AdminOptions& options, std::ostream& out, std::ostream& err) {
  return Ask(
      options, &rpc::AdminClient::WhoIsMissing, proto::WhoIsMissingRequest(), out, err,
      [&](const proto::WhoIsMissingReply& reply) {
        if (PrintJson(options, reply, out)) return kExitFine;
        Table table({"WAITS", "FOR", "SINCE", "REMEDY"});
        for (const auto& item : reply.missing()) {
          table.Add({item.what(), item.who(), HumanSeconds(item.waiting_seconds()), item.remedy()});
        }
        if (table.empty()) {
          err << "nobody waits for anybody\n";
        } else {
          table.Print(err);
        }
        return kExitFine;
      });
}

int RunVerify(const AdminOptions& options, const std::string& channel, std::uint64_t version,
              std::ostream& out, std::ostream& err) {
  proto::VerifyRequest request;
  request.set_channel(channel);
  request.set_version(version);
  request.set_timeout_ms(static_cast<std::uint64_t>(options.timeout_seconds * 1000 * kAnswerShare));
  return Ask(options, &rpc::AdminClient::Verify, request, out, err,
             [&](const proto::VerifyReply& reply) {
               PrintJson(options, reply, out);
               const bool colours = Colourful(err);
               err << fmt::format("{}: version {} of channel {} at {}, {}, {} digested\n",
                                  reply.equal() ? Paint("equal", Colour::kGreen, colours)
                                                : Paint("DIFFERENT", Colour::kRed, colours),
                                  reply.version(), Printable(reply.channel()),
                                  Count(reply.holder_count(), "rank"),
                                  Count(reply.tensor_count(), "tensor"), HumanBytes(reply.bytes()));
               for (const auto& fault : reply.faults()) {
                 err << "  " << Printable(fault.message()) << '\n';
               }
               return reply.equal() ? kExitFine : kExitFailed;
             });
}

int RunTrace(const AdminOptions& options, const std::string& path, std::ostream& out,
             std::ostream& err) {
  return Ask(options, &rpc::AdminClient::Trace, proto::TraceRequest(), out, err,
             [&](const proto::TraceReply& reply) {
               const Status written = WriteFile(Dump(ToTraceJson(reply)) + "\n", path);
               if (!written.ok())
                 return Fail(options, written.Annotate("writing the trace"), out, err);
               const Status fault = rpc::FromProto(reply.error());
               if (!fault.ok()) return Fail(options, fault, out, err);
               if (options.json) {
                 out << Dump({{"file", path}, {"events", reply.events_size()}}) << '\n';
               }
               err << fmt::format("{} in {}; open it at ui.perfetto.dev\n",
                                  Count(CountOf(reply.events()), "event"), Printable(path));
               return kExitFine;
             });
}

}  // namespace tensorbus::cli
