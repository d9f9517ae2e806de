#include <algorithm>
#include <fmt/format.h>

#include "tensorbus/base/log.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

namespace {

/// Boxes of one question: an answer stays below a few MiB.
constexpr std::size_t kBoxesPerQuery = 8192;

}  // namespace

/// Questions to one rank, a bounded number of boxes at a time.
struct Core::DigestJob {
  RankIdentity identity;
  std::string agent;
  std::vector<std::pair<std::string, Box>> boxes;
  TimePoint deadline;
  std::function<void(Result<std::vector<DigestSum>>)> done;
  std::vector<DigestSum> sums;
};

struct Core::VerifyRun {
  std::string channel;
  Version version;
  std::vector<DigestHolder> holders;
  DigestAtoms atoms;
  std::vector<std::vector<DigestSum>> digests;
  std::size_t open = 0;
  Status fault;
  Done<proto::VerifyReply> done;
};

struct Core::ClaimRun {
  RankIdentity identity;
  std::string agent;
  std::uint64_t request = 0;
  JobLayout claimed;            ///< one rank, with what it holds
  std::vector<DigestSum> sums;  ///< by tensor of `claimed`
  struct Candidate {
    Version version;
    std::vector<DigestHolder> holders;  ///< all ranks of one job or replica, in order
  };
  std::vector<Candidate> candidates;  ///< tried from the back
  std::size_t open = 0;
  std::vector<DigestSum> theirs;
  bool failed = false;
};

void Core::AskDigests(std::shared_ptr<DigestJob> job) {
  if (job->sums.size() == job->boxes.size()) {
    executor_.Post([job] { job->done(std::move(job->sums)); });
    return;
  }
  const std::size_t first = job->sums.size();
  const std::size_t count = std::min(kBoxesPerQuery, job->boxes.size() - first);
  proto::Query query;
  *query.mutable_digest()->mutable_rank() = rpc::ToProto(job->identity);
  for (std::size_t i = first; i < first + count; ++i) {
    proto::TensorDigest& want = *query.mutable_digest()->add_boxes();
    want.set_tensor(job->boxes[i].first);
    *want.mutable_box() = rpc::ToProto(job->boxes[i].second);
  }
  const Nanos left = std::max<Nanos>(job->deadline - executor_.Now(), std::chrono::milliseconds(1));
  Ask(job->agent, std::move(query), left, [this, job, count](Result<proto::Answer> answer) {
    if (!answer.ok()) {
      return job->done(answer.status().Annotate(job->identity.ToString()));
    }
    if (static_cast<std::size_t>(answer->digests_size()) != count) {
      return job->done(Status(Code::kInternal,
                              fmt::format("{} answered {} digests for {} boxes",
                                          job->identity.ToString(), answer->digests_size(), count),
                              Reason::kMalformed));
    }
    for (const proto::TensorDigest& digest : answer->digests()) {
      job->sums.push_back(rpc::FromProto(digest.digest()));
    }
    AskDigests(job);
  });
}

// ---- explain ------------------------------------------------------------------------------------

void Core::AddRoutes(const Channel& channel, const Replica& replica, const TensorSpec& tensor,
                     proto::ExplainReply& reply) const {
  const Result<planner::Plan> plan =
      planner::BuildPlan(channel.producer.layout->layout, replica.layout->layout,
                         TopologyOf(ParticipantsOf(channel, replica)));
  if (!plan.ok()) {
    *reply.mutable_error() = rpc::ToProto(plan.status());
    return;
  }
  const auto& tensors = replica.layout->layout.tensors;
  for (const planner::Route& route : plan->routes) {
    for (const CopyOp& op : planner::OpsOf(*plan, route)) {
      if (tensors[op.tensor].spec.name != tensor.name) continue;
      proto::RouteStatus& out = *reply.add_routes();
      out.set_source_rank(op.source);
      out.set_target_rank(op.target);
      *out.mutable_box() = rpc::ToProto(op.box);
      out.set_bytes(op.box.volume() * ItemBytes(tensor.dtype));
      out.set_target_job(replica.job);
      out.set_replica(replica.replica);
    }
  }
}

// ---- verify -------------------------------------------------------------------------------------

Result<std::vector<DigestHolder>> Core::HoldersToVerify(const Channel& channel,
                                                        Version version) const {
  std::vector<DigestHolder> holders;
  const auto kept = channel.versions.find(version);
  // A snapshot's rank may have written its memory since.
  if (kept != channel.versions.end() && kept->second.readable && !kept->second.snapshot()) {
    for (const auto& [number, rank] : channel.producer.ranks) {
      holders.push_back({rank.identity, rank.agent, version, channel.producer.layout});
    }
  }
  for (const auto& [key, replica] : channel.replicas) {
    if (!replica.complete() || replica.dirty() || replica.session.value != 0 ||
        replica.live() != version) {
      continue;
    }
    for (const auto& [number, rank] : replica.ranks) {
      holders.push_back({rank.identity, rank.agent, version, replica.layout});
    }
  }
  if (!holders.empty()) return holders;
  return Status(Code::kNotFound,
                fmt::format("nobody holds version {} of channel {} right now: its producer has "
                            "written on, and no clean replica serves it",
                            version.value, channel.name));
}

bool Core::StillHeld(const std::string& name, const std::vector<DigestHolder>& holders) const {
  const auto found = channels_.find(name);
  if (found == channels_.end()) return false;
  const Result<std::vector<DigestHolder>> now =
      HoldersToVerify(found->second, holders.front().version);
  if (!now.ok()) return false;
  return std::all_of(holders.begin(), holders.end(), [&](const DigestHolder& holder) {
    return std::any_of(now->begin(), now->end(), [&](const DigestHolder& other) {
      return other.identity == holder.identity && other.agent == holder.agent;
    });
  });
}

void Core::Verify(const proto::VerifyRequest& request, Done<proto::VerifyReply> done) {
  const Result<Channel*> found = FindChannel(request.channel());
  if (!found.ok()) return done(found.status());
  const Channel& channel = **found;
  Version version{request.version()};
  if (version.value == 0) {
    for (const auto& [key, replica] : channel.replicas) {
      if (replica.complete() && !replica.dirty()) version = std::max(version, replica.live());
    }
    if (version.value == 0) version = channel.newest;
  }
  Result<std::vector<DigestHolder>> holders = HoldersToVerify(channel, version);
  if (!holders.ok()) return done(holders.status());
  Result<DigestAtoms> atoms = MakeAtoms(*holders);
  if (!atoms.ok()) return done(atoms.status());
  auto run = std::make_shared<VerifyRun>();
  run->channel = channel.name;
  run->version = version;
  run->holders = std::move(holders).value();
  run->atoms = std::move(atoms).value();
  run->digests.resize(run->holders.size());
  run->open = run->holders.size();
  run->done = std::move(done);
  const TimePoint deadline =
      executor_.Now() + TimeoutOf(request.timeout_ms(), options_.query_timeout);
  for (std::size_t h = 0; h < run->holders.size(); ++h) {
    auto job = std::make_shared<DigestJob>();
    job->identity = run->holders[h].identity;
    job->agent = run->holders[h].agent;
    job->deadline = deadline;
    for (const std::uint32_t atom : run->atoms.of_holder[h]) {
      const DigestBox& box = run->atoms.atoms[atom];
      job->boxes.emplace_back(run->atoms.specs[box.tensor].name, box.box);
    }
    job->done = [this, run, h](Result<std::vector<DigestSum>> sums) {
      if (sums.ok()) {
        run->digests[h] = std::move(sums).value();
      } else if (run->fault.ok()) {
        run->fault = sums.status();
      }
      if (--run->open == 0) FinishVerify(*run);
    };
    AskDigests(std::move(job));
  }
}

void Core::FinishVerify(VerifyRun& run) {
  if (!run.fault.ok()) return run.done(run.fault);
  if (!StillHeld(run.channel, run.holders)) {
    return run.done(Status(Code::kAborted,
                           fmt::format("version {} was replaced while it was being verified; try "
                                       "again",
                                       run.version.value)));
  }
  proto::VerifyReply reply;
  CompareDigests(run.holders, run.atoms, run.digests, &reply);
  reply.set_version(run.version.value);
  Log(reply.equal() ? LogLevel::kInfo : LogLevel::kError, "verified",
      {{"channel", run.channel}, {"version", run.version.value}, {"equal", reply.equal()}});
  run.done(std::move(reply));
}

// ---- claim --------------------------------------------------------------------------------------

void Core::OnClaim(Agent& agent, const proto::ClaimVersion& message) {
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  Status status = identity.status();
  if (status.ok() && (identity->role != Role::kConsumer || FindOwn(agent, *identity) == nullptr)) {
    status = Status(Code::kFailedPrecondition,
                    identity->ToString() + " is not registered as a consumer; register it first");
  }
  if (status.ok()) {
    Result<std::shared_ptr<ClaimRun>> run = StartClaim(*identity, message);
    if (run.ok()) {
      (*run)->agent = agent.name;
      return NextCandidate(*run);
    }
    status = run.status();
  }
  proto::ClaimAnswered reply;
  reply.set_request(message.request());
  *reply.mutable_error() = rpc::ToProto(status);
  SendTo(agent.name, Wrap(&proto::DaemonMessage::mutable_claim_answered, std::move(reply)));
}

Result<std::shared_ptr<Core::ClaimRun>> Core::StartClaim(const RankIdentity& identity,
                                                         const proto::ClaimVersion& message) {
  const Channel& channel = channels_.at(identity.channel);
  auto run = std::make_shared<ClaimRun>();
  run->identity = identity;
  run->request = message.request();
  run->claimed.rank_count = 1;
  TB_ASSIGN_OR_RETURN(const auto own, LayoutOf(*FindRank(KeyOf(identity))));
  std::map<std::string_view, std::pair<std::vector<Box>, DigestSum>> by_name;
  for (const proto::TensorDigest& part : message.tensors()) {
    TB_ASSIGN_OR_RETURN(const Box box, rpc::FromProto(part.box()));
    auto& [boxes, sum] = by_name[part.tensor()];
    if (std::find(boxes.begin(), boxes.end(), box) != boxes.end()) continue;  // an alias
    boxes.push_back(box);
    sum += rpc::FromProto(part.digest());
  }
  for (const RankLayout::Tensor& tensor : own->tensors) {
    const auto found = by_name.find(tensor.spec.name);
    if (found == by_name.end()) continue;
    const auto number = static_cast<std::uint32_t>(run->claimed.holdings.size());
    run->claimed.tensors.push_back({.spec = tensor.spec, .holding = number});
    run->claimed.holdings.push_back({.ranks = {{.rank = 0, .boxes = found->second.first}}});
    run->sums.push_back(found->second.second);
  }
  TB_RETURN_IF_ERROR(Validate(run->claimed));
  if (run->claimed.tensors.empty()) {
    return Status(Code::kInvalidArgument, identity.ToString() + " claims nothing",
                  Reason::kMalformed);
  }
  const auto add = [&](Version version, const std::map<std::uint32_t, RankState>& ranks,
                       const std::shared_ptr<const LayoutEntry>& layout) {
    ClaimRun::Candidate candidate{.version = version, .holders = {}};
    for (const auto& [number, rank] : ranks) {
      candidate.holders.push_back({rank.identity, rank.agent, version, layout});
    }
    run->candidates.push_back(std::move(candidate));
  };
  for (const auto& [key, replica] : channel.replicas) {
    const bool self = replica.job == identity.job && replica.replica == identity.replica;
    if (self || !replica.complete() || replica.dirty() || replica.live().value == 0 ||
        replica.session.value != 0) {
      continue;
    }
    add(replica.live(), replica.ranks, replica.layout);
  }
  for (const auto& [number, version] : channel.versions) {
    if (version.readable && !version.snapshot() && !version.closing) {
      add(number, channel.producer.ranks, channel.producer.layout);
    }
  }
  return run;
}

void Core::NextCandidate(const std::shared_ptr<ClaimRun>& run) {
  if (run->candidates.empty()) return EndClaim(*run, {});
  const ClaimRun::Candidate candidate = std::move(run->candidates.back());
  run->candidates.pop_back();
  const Result<planner::Plan> plan =
      planner::BuildPlan(candidate.holders.front().layout->layout, run->claimed, {});
  if (!plan.ok()) {  // this one does not hold all of it
    executor_.Post([this, run] { NextCandidate(run); });
    return;
  }
  run->theirs.assign(run->claimed.tensors.size(), {});
  run->failed = false;
  struct Share {
    std::shared_ptr<DigestJob> job;
    std::vector<std::uint32_t> tensors;
  };
  std::map<std::uint32_t, Share> shares;
  for (const planner::Route& route : plan->routes) {
    Share& share = shares[route.source];
    if (share.job == nullptr) share.job = std::make_shared<DigestJob>();
    for (const CopyOp& op : planner::OpsOf(*plan, route)) {
      share.job->boxes.emplace_back(run->claimed.tensors[op.tensor].spec.name, op.box);
      share.tensors.push_back(op.tensor);
    }
  }
  run->open = shares.size();
  for (auto& [source, share] : shares) {
    share.job->identity = candidate.holders[source].identity;
    share.job->agent = candidate.holders[source].agent;
    share.job->deadline = executor_.Now() + options_.query_timeout;
    share.job->done = [this, run, candidate,
                       tensors = std::move(share.tensors)](Result<std::vector<DigestSum>> sums) {
      run->failed = run->failed || !sums.ok();
      for (std::size_t i = 0; sums.ok() && i < sums->size(); ++i) {
        run->theirs[tensors[i]] += (*sums)[i];
      }
      if (--run->open > 0) return;
      const bool equal = !run->failed && run->theirs == run->sums &&
                         StillHeld(run->identity.channel, candidate.holders);
      if (equal) return EndClaim(*run, candidate.version);
      NextCandidate(run);
    };
    AskDigests(share.job);
  }
}

void Core::EndClaim(const ClaimRun& run, Version version) {
  proto::ClaimAnswered reply;
  reply.set_request(run.request);
  RankState* rank = FindRank(KeyOf(run.identity));
  if (version.value != 0 && rank != nullptr && rank->agent == run.agent) {
    rank->live = version;
    rank->dirty = false;
    reply.set_version(version.value);
    Log(LogLevel::kInfo, "version_claimed",
        {{"rank", run.identity.ToString()}, {"version", version.value}});
    ReconcileLater(run.identity.channel);
  } else {
    *reply.mutable_error() = rpc::ToProto(
        Status(Code::kNotFound,
               fmt::format("what {} holds equals no version that anybody holds now; ask for a "
                           "version to be brought",
                           run.identity.ToString())));
  }
  SendTo(run.agent, Wrap(&proto::DaemonMessage::mutable_claim_answered, std::move(reply)));
}

}  // namespace tensorbus::daemon
