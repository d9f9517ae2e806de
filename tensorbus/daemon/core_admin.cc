#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/host_topology.h"
#include "tensorbus/base/log.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/daemon/coverage.h"
#include "tensorbus/daemon/version_policy.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

namespace {

proto::RankStatus StatusOf(const RankState& rank) {
  proto::RankStatus out;
  out.set_rank(rank.identity.rank);
  out.set_agent(rank.agent);
  out.set_pid(rank.pid);
  out.set_memory_mode(std::string(MemoryModeName(rank.mode)));
  out.set_bytes(rank.bytes);
  out.set_waiting(rank.request.has_value());
  out.set_dirty(rank.dirty);
  return out;
}

std::string_view StateOf(const Replica& replica) {
  if (replica.session.value != 0) return "syncing";
  if (replica.dirty()) return "dirty";
  if (!replica.complete()) return "incomplete";
  const bool all = std::all_of(replica.ranks.begin(), replica.ranks.end(),
                               [](const auto& entry) { return entry.second.request.has_value(); });
  return all ? "waiting" : "idle";
}

/// How its layout compares with the producer's.
std::string_view FitOf(const Channel& channel, const Replica& replica) {
  if (!replica.fault.ok()) return "does_not_fit";
  const bool compared = channel.producer.complete() && replica.complete() && replica.assembly == 0;
  return compared ? "fits" : "not_compared";
}

proto::ReplicaStatus StatusOf(const Channel& channel, const Replica& replica) {
  proto::ReplicaStatus out;
  out.set_job(replica.job);
  out.set_replica(replica.replica);
  out.set_rank_count(replica.rank_count);
  for (const auto& [number, rank] : replica.ranks) *out.add_ranks() = StatusOf(rank);
  out.set_live_version(replica.live().value);
  out.set_state(std::string(StateOf(replica)));
  out.set_layout(std::string(FitOf(channel, replica)));
  if (!replica.fault.ok()) *out.mutable_error() = rpc::ToProto(replica.fault);
  if (!replica.ranks.empty()) {
    out.set_flip(std::string(FlipName(replica.ranks.begin()->second.flip)));
    out.set_proof(std::string(ProofName(replica.ranks.begin()->second.proof)));
  }
  return out;
}

proto::ChannelStatus StatusOf(const Channel& channel) {
  proto::ChannelStatus out;
  out.set_channel(channel.name);
  out.set_epoch(channel.epoch.value);
  out.set_producer_job(channel.producer.job);
  out.set_producer_rank_count(channel.producer.rank_count);
  for (const auto& [number, rank] : channel.producer.ranks) {
    *out.add_producer_ranks() = StatusOf(rank);
  }
  out.set_latest_version(channel.newest.value);
  if (channel.producer.complete()) {
    out.set_tensor_count(channel.producer.layout->layout.tensors.size());
    out.set_bytes(channel.producer.layout->bytes);
  }
  for (const auto& [key, replica] : channel.replicas) {
    *out.add_replicas() = StatusOf(channel, replica);
  }
  return out;
}

std::string_view StateOf(const Channel& channel, const VersionState& version) {
  if (!version.readable) return "publishing";
  const bool newest =
      std::none_of(channel.versions.upper_bound(version.version), channel.versions.end(),
                   [](const auto& entry) { return entry.second.readable; });
  return newest && !version.closing ? "readable" : "retained";
}

/// What Explain() looks at: values that nobody changes.
struct Explanation {
  std::string channel;
  std::string tensor;
  std::string producer_job;
  std::shared_ptr<const LayoutEntry> source;  ///< null while there is no complete producer
  std::string why_no_source;
  struct Target {
    std::string job;
    std::uint32_t replica = 0;
    std::shared_ptr<const LayoutEntry> layout;
    planner::Topology topology;
  };
  std::vector<Target> targets;
};

void AddHolders(const LayoutEntry& layout, const std::string& tensor, const std::string& job,
                std::uint32_t replica, proto::ExplainReply& reply) {
  const JobLayout::Tensor* const held = layout.index.Find(tensor);
  if (held == nullptr) return;
  for (const RankBoxes& rank : layout.layout.HoldingOf(*held).ranks) {
    proto::HolderStatus& out = *reply.add_holders();
    out.set_job(job);
    out.set_replica(replica);
    out.set_rank(rank.rank);
    for (const Box& box : rank.boxes) *out.add_boxes() = rpc::ToProto(box);
  }
}

void AddRoutes(const LayoutEntry& source, const Explanation::Target& target,
               const TensorSpec& tensor, proto::ExplainReply& reply) {
  const Result<planner::Plan> plan =
      planner::BuildPlan(source.layout, target.layout->layout, target.topology);
  if (!plan.ok()) {
    // The others' routes are no less true.
    reply.set_why_no_routes(fmt::format("{}{}to {} replica {}: {}", reply.why_no_routes(),
                                        reply.why_no_routes().empty() ? "" : "; ", target.job,
                                        target.replica, plan.status().message()));
    return;
  }
  const auto& tensors = target.layout->layout.tensors;
  for (const planner::Route& route : plan->routes) {
    for (const CopyOp& op : planner::OpsOf(*plan, route)) {
      if (tensors[op.tensor].spec.name != tensor.name) continue;
      proto::RouteStatus& out = *reply.add_routes();
      out.set_source_rank(op.source);
      out.set_target_rank(op.target);
      *out.mutable_box() = rpc::ToProto(op.box);
      out.set_bytes(op.box.volume() * ItemBytes(tensor.dtype));
      out.set_target_job(target.job);
      out.set_replica(target.replica);
    }
  }
}

Status UnknownTensor(const Explanation& asked) {
  const LayoutEntry& known = asked.source ? *asked.source : *asked.targets.front().layout;
  const auto near = NearestNames(known.layout, asked.tensor, 5);
  return {Code::kNotFound,
          fmt::format("channel {} has no tensor \"{}\"{}{}{}", asked.channel, asked.tensor,
                      asked.source
                          ? ""
                          : fmt::format(", as far as its replicas show ({})", asked.why_no_source),
                      near.empty() ? "" : "; nearest names: ", fmt::join(near, ", ")),
          Reason::kUnknownTensor};
}

/// Needs a source or a target.
Result<proto::ExplainReply> ExplainTensor(const Explanation& asked) {
  const JobLayout::Tensor* tensor = asked.source ? asked.source->index.Find(asked.tensor) : nullptr;
  for (const Explanation::Target& target : asked.targets) {
    if (asked.source || tensor != nullptr) break;
    tensor = target.layout->index.Find(asked.tensor);
  }
  if (tensor == nullptr) return UnknownTensor(asked);
  proto::ExplainReply reply;
  reply.set_channel(asked.channel);
  reply.set_why_no_routes(asked.why_no_source);
  reply.set_dtype(std::string(DTypeName(tensor->spec.dtype)));
  for (const std::uint64_t size : tensor->spec.shape.dims()) reply.add_shape(size);
  if (asked.source) AddHolders(*asked.source, asked.tensor, asked.producer_job, 0, reply);
  for (const Explanation::Target& target : asked.targets) {
    AddHolders(*target.layout, asked.tensor, target.job, target.replica, reply);
    if (asked.source) AddRoutes(*asked.source, target, tensor->spec, reply);
  }
  return reply;
}

}  // namespace

// A channel of which only numbers are remembered is nobody's choice while another is in use.
Channel* Core::OnlyChannel() {
  if (channels_.size() == 1) return &channels_.begin()->second;
  Channel* used = nullptr;
  for (auto& [name, channel] : channels_) {
    if (channel.empty()) continue;
    if (used != nullptr) return nullptr;
    used = &channel;
  }
  return used;
}

Result<Channel*> Core::FindChannel(const std::string& name) {
  if (!name.empty()) {
    const auto found = channels_.find(name);
    if (found != channels_.end()) return &found->second;
  } else if (Channel* const only = OnlyChannel(); only != nullptr) {
    return only;
  }
  std::vector<std::string_view> names;
  for (const auto& [known, channel] : channels_) names.emplace_back(known);
  if (names.empty()) {
    return Status(Code::kNotFound, "there is no channel: no job is registered");
  }
  if (name.empty()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("there are several channels; choose one with --channel: {}",
                              fmt::join(names, ", ")));
  }
  return Status(Code::kNotFound,
                fmt::format("there is no channel {}; there are: {}", name, fmt::join(names, ", ")));
}

void Core::GetStatus(const proto::StatusRequest&, Done<proto::StatusReply> done) {
  proto::StatusReply reply;
  const TimePoint now = executor_.Now();
  reply.set_daemon(options_.name);
  reply.set_uptime_seconds(Seconds(now - started_));
  for (const auto& [name, agent] : agents_) {
    proto::AgentStatus& out = *reply.add_agents();
    out.set_agent(name);
    out.set_host(agent.host);
    out.set_pid(agent.pid);
    for (const std::string& endpoint : agent.endpoints) out.add_endpoints(endpoint);
    out.set_rank_count(static_cast<std::uint32_t>(agent.ranks.size()));
  }
  for (const auto& [name, channel] : channels_) *reply.add_channels() = StatusOf(channel);
  for (const auto& [id, running] : sessions_) {
    const Session::Config& config = running.session.config();
    proto::SessionStatus& out = *reply.add_sessions();
    out.set_session(id.value);
    out.set_channel(config.channel);
    out.set_target_job(config.target_job);
    out.set_replica(config.replica);
    out.set_version(config.version.value);
    out.set_state(std::string(StateName(running.session.state())));
    out.set_seconds(Seconds(now - config.started));
    out.set_bytes(running.session.bytes());
  }
  for (const proto::SessionStatus& ended : ended_) *reply.add_sessions() = ended;
  done(std::move(reply));
}

void Core::GetVersions(const proto::VersionsRequest& request, Done<proto::VersionsReply> done) {
  proto::VersionsReply reply;
  const TimePoint now = executor_.Now();
  if (!request.channel().empty() && !channels_.contains(request.channel())) {
    return done(FindChannel(request.channel()).status());
  }
  for (const auto& entry : channels_) {
    const Channel& channel = entry.second;
    const std::string& name = channel.name;
    if (!request.channel().empty() && request.channel() != name) continue;
    const auto add = [&](Version version, std::string_view state, bool snapshot,
                         std::size_t published, TimePoint since) {
      proto::VersionStatus& out = *reply.add_versions();
      out.set_channel(name);
      out.set_version(version.value);
      out.set_state(std::string(state));
      out.set_snapshot(snapshot);
      out.set_published_ranks(static_cast<std::uint32_t>(published));
      out.set_rank_count(channel.producer.rank_count);
      out.set_age_seconds(Seconds(now - since));
      for (const auto& [key, replica] : channel.replicas) {
        if (replica.live() == version && !replica.dirty()) {
          out.add_live_at(fmt::format("{} replica {}", replica.job, replica.replica));
        }
      }
    };
    for (const ReleasedVersion& version : channel.released) {
      if (channel.versions.contains(version.version)) continue;
      add(version.version, "released", version.snapshot, version.published_ranks, version.since);
    }
    for (const auto& [number, version] : channel.versions) {
      add(number, StateOf(channel, version), version.snapshot(), version.published.size(),
          version.since);
    }
  }
  done(std::move(reply));
}

void Core::Rollback(const proto::RollbackRequest& request, Done<proto::RollbackReply> done) {
  const Result<Channel*> found = FindChannel(request.channel());
  if (!found.ok()) return done(found.status());
  Channel& channel = **found;
  const Version to{request.version()};
  const auto version = channel.versions.find(to);
  if (version == channel.versions.end() || !version->second.readable || version->second.closing) {
    return done(
        Status(Code::kNotFound,
               fmt::format("version {} of channel {} is not kept; kept: {} (publish with the "
                           "policy snapshot and keep_last to keep more)",
                           to.value, channel.name, KeptVersions(channel))));
  }
  channel.rollback = to;
  Log(LogLevel::kInfo, "rollback", {{"channel", channel.name}, {"version", to.value}});
  ReconcileLater(channel.name);
  proto::RollbackReply reply;
  std::uint32_t count = 0;
  for (const auto& [key, replica] : channel.replicas) {
    count += replica.complete() && (replica.live() != to || replica.dirty()) ? 1 : 0;
  }
  reply.set_replica_count(count);
  done(std::move(reply));
}

void Core::Explain(const proto::ExplainRequest& request, Done<proto::ExplainReply> done) {
  const Result<Channel*> found = FindChannel(request.channel());
  if (!found.ok()) return done(found.status());
  const Channel& channel = **found;
  auto asked = std::make_shared<Explanation>();
  asked->channel = channel.name;
  asked->tensor = request.tensor();
  asked->producer_job = channel.producer.job;
  asked->source = channel.producer.layout;
  if (!asked->source) asked->why_no_source = WhyIncomplete(channel);
  for (const auto& [key, replica] : channel.replicas) {
    if (!replica.complete()) continue;
    asked->targets.push_back(
        {.job = replica.job,
         .replica = replica.replica,
         .layout = replica.layout,
         .topology = planner::TopologyByHost(ParticipantsOf(channel, replica))});
  }
  if (!asked->source && asked->targets.empty()) {
    return done(Status(Code::kFailedPrecondition,
                       fmt::format("nobody knows the tensors of channel {} now: {}; no complete "
                                   "replica is there either",
                                   channel.name, asked->why_no_source),
                       Reason::kMissingRank));
  }
  side_work_.Start<proto::ExplainReply>(
      SideWork::Lane::kQuestions, "explaining " + asked->tensor,
      executor_.Now() + options_.work_timeout, [asked] { return ExplainTensor(*asked); },
      std::move(done));
}

void Core::Trace(const proto::TraceRequest&, Done<proto::TraceReply> done) {
  struct Gather {
    proto::TraceReply reply;
    Status first_fault;
    std::size_t open = 0;
    Done<proto::TraceReply> done;
  };
  auto gather = std::make_shared<Gather>();
  gather->done = std::move(done);
  for (const proto::TraceEvent& event : trace_) *gather->reply.add_events() = event;
  gather->open = agents_.size();
  if (gather->open == 0) return gather->done(std::move(gather->reply));
  for (const auto& [name, agent] : agents_) {
    proto::Query query;
    query.mutable_trace();
    Ask(name, std::move(query), options_.query_timeout, [gather](Result<proto::Answer> answer) {
      if (answer.ok()) {
        for (const proto::TraceEvent& event : answer->events()) {
          *gather->reply.add_events() = event;
        }
      } else if (gather->first_fault.ok()) {
        gather->first_fault = answer.status();
      }
      if (--gather->open > 0) return;
      if (!gather->first_fault.ok()) {
        *gather->reply.mutable_error() = rpc::ToProto(gather->first_fault);
      }
      gather->done(std::move(gather->reply));
    });
  }
}

}  // namespace tensorbus::daemon
