#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/plan.h"
#include "tensorbus/base/log.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/daemon/version_policy.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

namespace {

/// Boxes of one question: an answer stays below a few MiB.
constexpr std::size_t kBoxesPerQuery = 8192;

}  // namespace

/// Questions to one rank, a bounded number of boxes at a time.
struct Core::DigestJob {
  DigestHolder holder;
  std::size_t box_count = 0;
  /// Tensor and box number `i`.
  std::function<std::pair<const std::string&, const Box&>(std::size_t i)> box_at;
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
  TimePoint deadline;
  std::size_t open = 0;
  Status fault;
  Done<proto::VerifyReply> done;
};

/// What a rank says its memory digests to, of tensors it has registered.
struct Claimed {
  JobLayout layout;             ///< one rank, with what it holds
  std::vector<DigestSum> sums;  ///< by tensor of `layout`
};

/// The questions to one rank that holds a part of what is claimed.
struct ClaimShare {
  std::vector<std::pair<std::uint32_t, Box>> boxes;  ///< tensor of Claimed::layout, box
};

struct Core::ClaimRun {
  RankIdentity identity;
  std::string agent;
  std::uint64_t request = 0;
  /// What the rank had registered; another one since then is another claim.
  std::shared_ptr<const std::string> registered;
  /// Sessions its replica had seen; one more since then may have written what is claimed.
  std::uint64_t session_count = 0;
  std::shared_ptr<const Claimed> claimed;
  struct Candidate {
    Version version;
    std::vector<DigestHolder> holders;  ///< all ranks of one job or replica, in order
  };
  std::vector<Candidate> candidates;  ///< tried from the back
  Candidate current;
  TimePoint deadline;                          ///< of the whole claim
  std::map<std::uint32_t, ClaimShare> shares;  ///< of `current`, by rank
  std::size_t open = 0;
  bool differed = false;  ///< from a version that somebody holds
  std::vector<DigestSum> theirs;
  bool failed = false;
};

namespace {

/// Errors: kInvalidArgument when the claim is malformed or names nothing that the rank holds;
/// kNotFound/kChecksumMismatch when two places of one box differ, which is no version at all.
Result<std::shared_ptr<const Claimed>> ReadClaim(const RankPart& part,
                                                 const proto::ClaimVersion& message) {
  TB_ASSIGN_OR_RETURN(const RankLayout own, ParseRankLayout(rpc::BytesOf(*part.blob), part.rank));
  std::map<std::string_view, std::vector<std::pair<Box, DigestSum>>> by_name;
  for (const proto::TensorDigest& digest : message.tensors()) {
    TB_ASSIGN_OR_RETURN(const Box box, rpc::FromProto(digest.box()));
    const DigestSum sum = rpc::FromProto(digest.digest());
    auto& held = by_name[digest.tensor()];
    const auto same = std::find_if(held.begin(), held.end(),
                                   [&](const auto& entry) { return entry.first == box; });
    if (same == held.end()) {
      held.emplace_back(box, sum);
    } else if (same->second != sum) {
      return Status(Code::kNotFound,
                    fmt::format("{} holds {}{} in two places that differ; ask for a version to be "
                                "brought",
                                part.claim.who, digest.tensor(), box.ToString()),
                    Reason::kChecksumMismatch);
    }
  }
  auto claimed = std::make_shared<Claimed>();
  claimed->layout.rank_count = 1;
  for (const RankLayout::Tensor& tensor : own.tensors) {
    const auto found = by_name.find(tensor.spec.name);
    if (found == by_name.end()) continue;
    const auto number = static_cast<std::uint32_t>(claimed->layout.holdings.size());
    claimed->layout.tensors.push_back({.spec = tensor.spec, .holding = number});
    std::vector<Box> boxes;
    DigestSum& total = claimed->sums.emplace_back();
    for (const auto& [box, sum] : found->second) {
      boxes.push_back(box);
      total += sum;
    }
    claimed->layout.holdings.push_back({.ranks = {{.rank = 0, .boxes = std::move(boxes)}}});
  }
  TB_RETURN_IF_ERROR(Validate(claimed->layout));
  if (claimed->layout.tensors.empty()) {
    return Status(Code::kInvalidArgument, part.claim.who + " claims nothing", Reason::kMalformed);
  }
  return std::shared_ptr<const Claimed>(std::move(claimed));
}

Status WrittenMeanwhile(const RankIdentity& identity) {
  return {Code::kAborted,
          identity.ToString() + " was brought a version while its claim was compared; claim again",
          Reason::kBusy};
}

/// Who of the holders of a layout is asked for what. Errors: planner's, when they do not hold all.
Result<std::map<std::uint32_t, ClaimShare>> ShareOut(const LayoutEntry& held,
                                                     const Claimed& claimed) {
  TB_ASSIGN_OR_RETURN(const planner::Plan plan,
                      planner::BuildPlan(held.layout, claimed.layout, {}));
  std::map<std::uint32_t, ClaimShare> shares;
  for (const planner::Route& route : plan.routes) {
    ClaimShare& share = shares[route.source];
    for (const CopyOp& op : planner::OpsOf(plan, route)) {
      share.boxes.emplace_back(op.tensor, op.box);
    }
  }
  return shares;
}

}  // namespace

void Core::AskDigests(std::shared_ptr<DigestJob> job) {
  if (job->sums.size() == job->box_count) {
    executor_.Post([job] { job->done(std::move(job->sums)); });
    return;
  }
  const std::size_t first = job->sums.size();
  const std::size_t count = std::min(kBoxesPerQuery, job->box_count - first);
  proto::Query query;
  proto::DigestQuery& asked = *query.mutable_digest();
  *asked.mutable_rank() = rpc::ToProto(job->holder.identity);
  if (job->holder.snapshot) asked.set_snapshot_version(job->holder.version.value);
  for (std::size_t i = first; i < first + count; ++i) {
    proto::TensorDigest& want = *asked.add_boxes();
    const auto wanted = job->box_at(i);
    want.set_tensor(wanted.first);
    *want.mutable_box() = rpc::ToProto(wanted.second);
  }
  const Nanos left = std::max<Nanos>(job->deadline - executor_.Now(), std::chrono::milliseconds(1));
  Ask(job->holder.agent, std::move(query), left, [this, job, count](Result<proto::Answer> answer) {
    const std::string who = job->holder.identity.ToString();
    if (!answer.ok()) return job->done(answer.status().Annotate(who));
    if (static_cast<std::size_t>(answer->digests_size()) != count) {
      return job->done(Status(
          Code::kInternal,
          fmt::format("{} answered {} digests for {} boxes", who, answer->digests_size(), count),
          Reason::kMalformed));
    }
    for (const proto::TensorDigest& digest : answer->digests()) {
      job->sums.push_back(rpc::FromProto(digest.digest()));
    }
    AskDigests(job);
  });
}

// ---- verify -------------------------------------------------------------------------------------

std::vector<DigestHolder> Core::ProducerHolders(const Channel& channel,
                                                const VersionState& version) const {
  std::vector<DigestHolder> holders;
  // A rank may have written its live memory since it made a snapshot; the snapshot stays as it is.
  for (const auto& [number, rank] : channel.producer.ranks) {
    holders.push_back({.identity = rank.identity,
                       .agent = rank.agent,
                       .version = version.version,
                       .layout = channel.producer.layout,
                       .snapshot = version.snapshot()});
  }
  return holders;
}

Result<std::vector<DigestHolder>> Core::HoldersToVerify(const Channel& channel,
                                                        Version version) const {
  std::vector<DigestHolder> holders;
  const auto kept = channel.versions.find(version);
  if (kept != channel.versions.end() && kept->second.readable) {
    holders = ProducerHolders(channel, kept->second);
  }
  for (const auto& [key, replica] : channel.replicas) {
    // Before the first version replicas serve 0, each what it likes.
    if (!replica.complete() || replica.dirty() || replica.session.value != 0 ||
        version.value == 0 || replica.live() != version) {
      continue;
    }
    for (const auto& [number, rank] : replica.ranks) {
      holders.push_back({.identity = rank.identity,
                         .agent = rank.agent,
                         .version = version,
                         .layout = replica.layout});
    }
  }
  if (!holders.empty()) return holders;
  return Status(Code::kNotFound, WhyNobodyHolds(channel, version));
}

std::string Core::WhyNobodyHolds(const Channel& channel, Version version) const {
  const Producer& producer = channel.producer;
  if (channel.newest.value == 0) {
    return fmt::format("nothing has been published on channel {} yet{}", channel.name,
                       producer.complete() ? "" : ": " + WhyIncomplete(channel));
  }
  if (version > channel.newest) {
    return fmt::format("version {} of channel {} has not been published; the newest is {}",
                       version.value, channel.name, channel.newest.value);
  }
  const auto kept = channel.versions.find(version);
  const bool behind =
      std::all_of(producer.ranks.begin(), producer.ranks.end(),
                  [&](const auto& entry) { return entry.second.published < version; });
  const std::string source =
      !producer.complete() ? WhyIncomplete(channel)
      : kept != channel.versions.end()
          ? fmt::format("{}", fmt::join(HoldersOf(channel, kept->second), ", "))
      : behind ? fmt::format("the producer that is there, {}, has not published it", producer.job)
               : fmt::format("{} may write its memory again, or has", producer.job);
  std::string targets = channel.replicas.empty() ? "no replica is there" : "";
  constexpr std::size_t kNamedReplicas = 4;
  std::size_t count = 0;
  for (const auto& [key, replica] : channel.replicas) {
    if (++count > kNamedReplicas) continue;
    const Version live = replica.live();
    targets +=
        fmt::format("{}{} replica {} {}", targets.empty() ? "" : ", ", replica.job, replica.replica,
                    replica.session.value != 0 ? "is being brought a version"
                    : replica.dirty()          ? "is dirty"
                    : !replica.complete()      ? "is incomplete"
                    : live.value == 0          ? "serves none"
                                               : fmt::format("serves version {}", live.value));
  }
  if (count > kNamedReplicas) targets += fmt::format(", and {} more", count - kNamedReplicas);
  return fmt::format("nobody holds version {} of channel {} right now: {}; {}", version.value,
                     channel.name, source, targets);
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
  auto run = std::make_shared<VerifyRun>();
  run->channel = channel.name;
  run->version = version;
  run->holders = std::move(holders).value();
  run->deadline = executor_.Now() + TimeoutOf(request.timeout_ms(), options_.query_timeout);
  run->done = std::move(done);
  side_work_.Start<DigestAtoms>(
      SideWork::Lane::kQuestions, "verifying " + channel.name, run->deadline,
      [run] { return MakeAtoms(run->holders); },
      [this, run](Result<DigestAtoms> atoms) {
        if (!atoms.ok()) return run->done(atoms.status());
        run->atoms = std::move(atoms).value();
        AskHolders(run);
      });
}

void Core::AskHolders(const std::shared_ptr<VerifyRun>& run) {
  run->digests.resize(run->holders.size());
  run->open = run->holders.size();
  for (std::size_t h = 0; h < run->holders.size(); ++h) {
    auto job = std::make_shared<DigestJob>();
    job->holder = run->holders[h];
    job->box_count = run->atoms.of_holder[h].size();
    job->box_at = [run, h](std::size_t i) -> std::pair<const std::string&, const Box&> {
      const DigestBox& box = run->atoms.atoms[run->atoms.of_holder[h][i]];
      return {run->atoms.specs[box.tensor].name, box.box};
    };
    job->deadline = run->deadline;
    job->done = [this, run, h](Result<std::vector<DigestSum>> sums) {
      if (sums.ok()) {
        run->digests[h] = std::move(sums).value();
      } else if (run->fault.ok()) {
        run->fault = sums.status();
      }
      if (--run->open == 0) CompareHolders(run);
    };
    AskDigests(std::move(job));
  }
}

void Core::CompareHolders(const std::shared_ptr<VerifyRun>& run) {
  if (!run->fault.ok()) return run->done(run->fault);
  if (!StillHeld(run->channel, run->holders)) {
    return run->done(Status(Code::kAborted,
                            fmt::format("version {} was replaced while it was being verified; try "
                                        "again",
                                        run->version.value)));
  }
  side_work_.Start<proto::VerifyReply>(
      SideWork::Lane::kQuestions, "verifying " + run->channel,
      executor_.Now() + options_.work_timeout,
      [run]() -> Result<proto::VerifyReply> {
        proto::VerifyReply reply;
        CompareDigests(run->holders, run->atoms, run->digests, &reply);
        reply.set_version(run->version.value);
        reply.set_channel(run->channel);
        return reply;
      },
      [run](Result<proto::VerifyReply> reply) {
        if (reply.ok()) {
          Log(reply->equal() ? LogLevel::kInfo : LogLevel::kError, "verified",
              {{"channel", run->channel},
               {"version", run->version.value},
               {"equal", reply->equal()}});
        }
        run->done(std::move(reply));
      });
}

// ---- claim --------------------------------------------------------------------------------------

void Core::OnClaim(Agent& agent, const proto::ClaimVersion& message) {
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  auto run = std::make_shared<ClaimRun>();
  run->agent = agent.name;
  run->request = message.request();
  run->deadline = executor_.Now() + options_.work_timeout;
  if (!identity.ok()) return EndClaim(*run, identity.status(), {});
  run->identity = *identity;
  const RankState* const rank = FindOwn(agent, *identity);
  if (identity->role != Role::kConsumer || rank == nullptr) {
    return EndClaim(
        *run,
        Status(Code::kFailedPrecondition,
               identity->ToString() + " is not registered as a consumer; register it first"),
        {});
  }
  const Replica& replica =
      channels_.at(identity->channel).replicas.at({identity->job, identity->replica});
  if (replica.session.value != 0) return EndClaim(*run, WrittenMeanwhile(*identity), {});
  run->registered = rank->layout_blob;
  run->session_count = replica.session_count;
  const RankPart part = {.rank = identity->rank,
                         .blob = rank->layout_blob,
                         .bytes = rank->bytes,
                         .claim = {.who = identity->ToString(), .leave_out = {}}};
  side_work_.Start<std::shared_ptr<const Claimed>>(
      SideWork::Lane::kQuestions, "the claim of " + part.claim.who, run->deadline,
      [part, claim = std::make_shared<const proto::ClaimVersion>(message)] {
        return ReadClaim(part, *claim);
      },
      [this, run](Result<std::shared_ptr<const Claimed>> claimed) {
        if (!claimed.ok()) return EndClaim(*run, claimed.status(), {});
        run->claimed = std::move(claimed).value();
        FindCandidates(*run);
        NextCandidate(run);
      });
}

void Core::FindCandidates(ClaimRun& run) const {
  const auto found = channels_.find(run.identity.channel);
  if (found == channels_.end()) return;
  const Channel& channel = found->second;
  for (const auto& [key, replica] : channel.replicas) {
    const bool self = replica.job == run.identity.job && replica.replica == run.identity.replica;
    if (self || !replica.complete() || replica.dirty() || replica.live().value == 0 ||
        replica.session.value != 0) {
      continue;
    }
    ClaimRun::Candidate candidate{.version = replica.live(), .holders = {}};
    for (const auto& [number, rank] : replica.ranks) {
      candidate.holders.push_back({.identity = rank.identity,
                                   .agent = rank.agent,
                                   .version = candidate.version,
                                   .layout = replica.layout});
    }
    run.candidates.push_back(std::move(candidate));
  }
  for (const auto& [number, version] : channel.versions) {
    if (version.readable && !version.closing) {
      run.candidates.push_back({.version = number, .holders = ProducerHolders(channel, version)});
    }
  }
}

void Core::NextCandidate(const std::shared_ptr<ClaimRun>& run) {
  if (run->candidates.empty()) {
    return EndClaim(*run,
                    Status(Code::kNotFound,
                           fmt::format("what {} holds equals no version that anybody holds now; "
                                       "ask for a version to be brought",
                                       run->identity.ToString()),
                           run->differed ? Reason::kChecksumMismatch : Reason::kNone),
                    {});
  }
  if (executor_.Now() >= run->deadline) {
    return EndClaim(*run,
                    Status(Code::kDeadlineExceeded,
                           fmt::format("the claim of {} was compared for {:.0f} s and {} versions "
                                       "are left; ask for a version to be brought",
                                       run->identity.ToString(), Seconds(options_.work_timeout),
                                       run->candidates.size()),
                           Reason::kBusy),
                    {});
  }
  run->current = std::move(run->candidates.back());
  run->candidates.pop_back();
  side_work_.Start<std::map<std::uint32_t, ClaimShare>>(
      SideWork::Lane::kQuestions, "the claim of " + run->identity.ToString(), run->deadline,
      [held = run->current.holders.front().layout, claimed = run->claimed] {
        return ShareOut(*held, *claimed);
      },
      [this, run](Result<std::map<std::uint32_t, ClaimShare>> shares) {
        // Busy is an answer; a candidate that does not hold all of it is not.
        if (!shares.ok() && shares.status().reason() == Reason::kBusy) {
          return EndClaim(*run, shares.status(), {});
        }
        if (!shares.ok()) return NextCandidate(run);
        run->shares = std::move(shares).value();
        AskCandidate(run);
      });
}

void Core::AskCandidate(const std::shared_ptr<ClaimRun>& run) {
  run->theirs.assign(run->claimed->layout.tensors.size(), {});
  run->failed = false;
  run->open = run->shares.size();
  if (run->open == 0) return JudgeCandidate(run);  // it claims no byte, and holds all of those
  for (const auto& [source, share] : run->shares) {
    auto job = std::make_shared<DigestJob>();
    job->holder = run->current.holders[source];
    job->box_count = share.boxes.size();
    const ClaimShare* const asked = &share;  // `run` keeps it until the last answer
    job->box_at = [run, asked](std::size_t i) -> std::pair<const std::string&, const Box&> {
      const auto& box = asked->boxes[i];
      return {run->claimed->layout.tensors[box.first].spec.name, box.second};
    };
    job->deadline = std::min(executor_.Now() + options_.query_timeout, run->deadline);
    job->done = [this, run, asked](Result<std::vector<DigestSum>> sums) {
      run->failed = run->failed || !sums.ok();
      for (std::size_t i = 0; sums.ok() && i < sums->size(); ++i) {
        run->theirs[asked->boxes[i].first] += (*sums)[i];
      }
      if (--run->open == 0) JudgeCandidate(run);
    };
    AskDigests(std::move(job));
  }
}

void Core::JudgeCandidate(const std::shared_ptr<ClaimRun>& run) {
  const bool held = !run->failed && StillHeld(run->identity.channel, run->current.holders);
  const bool equal = held && run->theirs == run->claimed->sums;
  run->differed = run->differed || (held && !equal);
  if (equal) return EndClaim(*run, {}, run->current.version);
  NextCandidate(run);
}

void Core::EndClaim(const ClaimRun& run, const Status& outcome, Version version) {
  proto::ClaimAnswered reply;
  reply.set_request(run.request);
  RankState* rank = FindRank(KeyOf(run.identity));
  if (rank != nullptr && (rank->agent != run.agent || rank->layout_blob != run.registered)) {
    rank = nullptr;
  }
  const bool written =
      rank != nullptr && channels_.at(run.identity.channel)
                                 .replicas.at({run.identity.job, run.identity.replica})
                                 .session_count != run.session_count;
  const Status status = written ? WrittenMeanwhile(run.identity) : outcome;
  // Whatever it was thought to serve, it holds something else: the next update brings bytes.
  if (rank != nullptr && status.reason() == Reason::kChecksumMismatch) rank->live = {};
  if (status.ok() && rank != nullptr) {
    rank->live = version;
    rank->dirty = false;
    rank->doubt = {};
    reply.set_version(version.value);
    Log(LogLevel::kInfo, "version_claimed",
        {{"rank", run.identity.ToString()}, {"version", version.value}});
    ReconcileLater(run.identity.channel);
  } else {
    *reply.mutable_error() = rpc::ToProto(
        !status.ok() ? status
                     : Status(Code::kUnavailable,
                              run.identity.ToString() +
                                  " left or registered anew while its claim was compared",
                              Reason::kPeerLost));
  }
  SendTo(run.agent, Wrap(&proto::DaemonMessage::mutable_claim_answered, std::move(reply)));
}

}  // namespace tensorbus::daemon
