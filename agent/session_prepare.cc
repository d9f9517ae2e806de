#include <algorithm>
#include <fmt/format.h>

#include "agent/receipts.h"
#include "agent/session.h"
#include "planner/host_topology.h"
#include "tensorbus/base/clock.h"
#include "tensorbus/base/log.h"
#include "tensorbus/rpc/convert.h"

// The first part of a session: from Prepare to SessionReady.
namespace tensorbus::agent {

void Session::Prepare() {
  deadline_ = host_.executor().Now() + spec_.timeout;
  phase_begin_ns_ = RealtimeNs();
  deadline_timer_ = host_.executor().PostAt(deadline_, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      self->Fail(Status(
          Code::kDeadlineExceeded,
          fmt::format("session {} did not end within {:.1f} s; it was {}", self->spec_.id.value,
                      Seconds(self->spec_.timeout), self->phase_name()),
          Reason::kMissingRank));
    }
  });
  going_ = false;
  if (const Status found = FindParts(); !found.ok()) return Fail(found);
  FetchLayout(true);
  FetchLayout(false);
}

Status Session::FindParts() {
  const auto own =
      std::find_if(spec_.participants.begin(), spec_.participants.end(),
                   [this](const SessionParticipant& p) { return p.agent == host_.agent_name(); });
  if (own == spec_.participants.end()) {
    return {Code::kInvalidArgument, "a session in which this agent takes no part",
            Reason::kMalformed};
  }
  for (const std::uint32_t number : own->source_ranks) {
    const std::shared_ptr<Rank> rank = host_.FindRank(spec_.SourceKey(number));
    if (rank == nullptr || !rank->is_producer()) {
      return {Code::kUnavailable,
              fmt::format("{}/{} rank {} is not here any more", spec_.channel, spec_.source_job,
                          number),
              Reason::kPeerLost};
    }
    // The daemon may have raised the epoch of ranks that registered before an agent told it of a
    // greater one.
    rank->epoch = spec_.epoch;
    SourcePart part;
    part.rank = rank;
    const auto snapshot = rank->snapshots.find(spec_.version);
    if (snapshot != rank->snapshots.end()) {
      part.memory = snapshot->second;
    } else if (spec_.from_snapshot || rank->published != spec_.version) {
      return {Code::kNotFound,
              fmt::format("{} does not hold version {} any more; it published {} last",
                          rank->Name(), spec_.version.value, rank->published.value),
              Reason::kStaleVersion};
    } else {
      part.memory = rank->memory;
    }
    sources_.push_back(std::move(part));
  }
  for (const std::uint32_t number : own->target_ranks) {
    const std::shared_ptr<Rank> rank = host_.FindRank(spec_.TargetKey(number));
    if (rank == nullptr || rank->is_producer()) {
      return {Code::kUnavailable,
              fmt::format("{}/{} replica {} rank {} is not here any more", spec_.channel,
                          spec_.target_job, spec_.replica, number),
              Reason::kPeerLost};
    }
    if (rank->flip != spec_.flip) {
      return {Code::kFailedPrecondition,
              fmt::format("{} registered another flip mode than its replica", rank->Name()),
              Reason::kLayoutMismatch};
    }
    if (rank->target_of.has_value()) {
      return {
          Code::kUnavailable,
          fmt::format("{} takes part in session {} still", rank->Name(), rank->target_of->value),
          Reason::kBusy};
    }
    rank->target_of = spec_.id;
    ++rank->target_count;
    rank->epoch = spec_.epoch;
    TargetPart part;
    part.rank = rank;
    part.memory = spec_.flip == FlipMode::kShadow ? rank->shadow : rank->memory;
    targets_.push_back(std::move(part));
  }
  return {};
}

void Session::FetchLayout(bool source) {
  if (!running()) return;
  const Hash128& hash = source ? spec_.source_layout : spec_.target_layout;
  std::shared_ptr<const JobLayout>& slot = source ? source_layout_ : target_layout_;
  slot = host_.layouts().Find(hash);
  if (slot != nullptr) return LayoutsThere();
  const auto parsed = [weak = weak_from_this(), source,
                       hash](const Result<std::shared_ptr<const JobLayout>>& layout) {
    const auto self = weak.lock();
    if (self == nullptr) return;
    --self->busy_;
    if (!self->running()) return self->CheckDrained();
    if (!layout.ok()) {
      return self->Fail(layout.status().Annotate(source ? "source layout" : "target layout"));
    }
    self->host_.layouts().Add(hash, *layout);
    (source ? self->source_layout_ : self->target_layout_) = *layout;
    self->LayoutsThere();
  };
  ++busy_;
  host_.GetLayout(hash, TimeLeft(),
                  [parsed, hash, &pool = host_.pool(),
                   &executor = host_.executor()](Result<std::vector<std::byte>> bytes) {
                    if (!bytes.ok()) return parsed(bytes.status());
                    auto kept = std::make_shared<std::vector<std::byte>>(*std::move(bytes));
                    pool.Submit([parsed, hash, kept, &executor] {
                      auto layout = std::make_shared<Result<std::shared_ptr<const JobLayout>>>(
                          ParseLayout(*kept, hash));
                      executor.Post([parsed, layout] { parsed(*layout); });
                    });
                  });
}

void Session::LayoutsThere() {
  if (source_layout_ == nullptr || target_layout_ == nullptr || plan_ != nullptr) return;
  const planner::Topology topology = planner::TopologyByHost(spec_.participants);
  plan_key_ = {
      .source = spec_.source_layout, .target = spec_.target_layout, .topology = HashOf(topology)};
  if (auto known = host_.plans().Find(plan_key_)) return PlanThere(std::move(known));
  ++busy_;
  host_.pool().Submit([weak = weak_from_this(), source = source_layout_, target = target_layout_,
                       topology, &executor = host_.executor()] {
    auto made = std::make_shared<Result<std::shared_ptr<const PreparedPlan>>>(
        MakePlan(source, target, topology));
    executor.Post([weak, made] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      --self->busy_;
      if (!self->running()) return self->CheckDrained();
      if (!made->ok()) return self->Fail(made->status());
      self->host_.plans().Add(self->plan_key_, **made);
      self->PlanThere(**made);
    });
  });
}

void Session::PlanThere(std::shared_ptr<const PreparedPlan> plan) {
  plan_ = std::move(plan);
  bool all_bound = true;
  for (SourcePart& part : sources_) {
    part.routes = part.rank->bound.Find(plan_key_);
    all_bound = all_bound && part.routes != nullptr;
  }
  for (TargetPart& part : targets_) {
    part.routes = part.rank->bound.Find(plan_key_);
    all_bound = all_bound && part.routes != nullptr;
  }
  if (all_bound) return MakeReceipts(0);
  BindAll();
}

// Binds on a worker thread whatever is not bound yet; results come back in the order asked for.
void Session::BindAll() {
  struct Want {
    std::shared_ptr<Rank> rank;
    std::shared_ptr<const PieceIndex> pieces;
    std::uint32_t number = 0;
    RouteSide side = RouteSide::kSource;
  };
  auto wants = std::make_shared<std::vector<Want>>();
  for (const SourcePart& part : sources_) {
    if (part.routes != nullptr) continue;
    wants->push_back({part.rank, part.rank->pieces, part.rank->identity.rank, RouteSide::kSource});
  }
  for (const TargetPart& part : targets_) {
    if (part.routes != nullptr) continue;
    wants->push_back({part.rank, part.rank->pieces, part.rank->identity.rank, RouteSide::kTarget});
  }
  ++busy_;
  host_.pool().Submit([weak = weak_from_this(), wants, plan = plan_, key = plan_key_,
                       &executor = host_.executor()] {
    auto routes = std::make_shared<std::vector<std::shared_ptr<const BoundRoutes>>>();
    auto failure = std::make_shared<Status>();
    planner::RankSelection ranks;
    for (const Want& want : *wants) {
      (want.side == RouteSide::kSource ? ranks.sources : ranks.targets).push_back(want.number);
    }
    const Result<planner::Plan> own = OwnPart(*plan, std::move(ranks));
    if (!own.ok()) *failure = own.status();
    for (const Want& want : *wants) {
      if (!failure->ok()) break;
      Result<BoundRoutes> bound =
          BindRoutes(*want.pieces, *own, *plan->target, want.number, want.side);
      if (!bound.ok()) {
        *failure = bound.status();
        break;
      }
      routes->push_back(std::make_shared<const BoundRoutes>(*std::move(bound)));
    }
    executor.Post([weak, wants, routes, failure, key] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      --self->busy_;
      if (!self->running()) return self->CheckDrained();
      if (!failure->ok()) return self->Fail(*failure);
      for (std::size_t i = 0; i < wants->size(); ++i)
        (*wants)[i].rank->bound.Add(key, (*routes)[i]);
      for (SourcePart& part : self->sources_) part.routes = part.rank->bound.Find(key);
      for (TargetPart& part : self->targets_) part.routes = part.rank->bound.Find(key);
      self->MakeReceipts(0);
    });
  });
}

// This agent's part was certified when its ranks were bound; what every session checks again is
// that the bytes bound to their memory are exactly those the target layout asks for.
Status Session::CheckOwnPart() const {
  for (const TargetPart& part : targets_) {
    std::uint64_t bound = 0;
    for (const BoundRoute& route : *part.routes) bound += route.bytes;
    const std::uint64_t asked = BytesOf(*plan_->target, part.rank->identity.rank);
    if (bound != asked) {
      return {Code::kInternal,
              fmt::format("the plan brings {} bytes to {}, whose layout asks for {}", bound,
                          part.rank->Name(), asked),
              Reason::kPlanMismatch};
    }
  }
  return {};
}

// Receipts of the sources, one after the other: the publisher asked for them, or the proof does.
// Those of a version published before this plan was known are made now, after making sure that the
// memory still is what it was at publish.
void Session::MakeReceipts(std::size_t part) {
  if (part == sources_.size()) return Ready();
  SourcePart& source = sources_[part];
  Rank& rank = *source.rank;
  if (spec_.proof == Proof::kStream) rank.wants_receipts = true;
  const auto known = rank.receipts.find(spec_.version);
  const bool wanted = spec_.proof == Proof::kStream || known != rank.receipts.end();
  if (!wanted || (known != rank.receipts.end() && known->second.routes.contains(plan_key_))) {
    return MakeReceipts(part + 1);
  }
  const PieceWork work{host_.pool(), host_.executor(), deadline_};
  const auto make = [weak = weak_from_this(), part, work] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    const SourcePart& at = self->sources_[part];
    MakeRouteSums(work, at.routes, at.memory, [weak, part](Result<RouteSums> sums) {
      const auto session = weak.lock();
      if (session == nullptr) return;
      --session->busy_;
      if (!session->running()) return session->CheckDrained();
      if (!sums.ok()) return session->Fail(sums.status());
      session->sources_[part].rank->receipts[session->spec_.version].routes[session->plan_key_] =
          *std::move(sums);
      session->MakeReceipts(part + 1);
    });
  };
  ++busy_;
  if (known == rank.receipts.end() || known->second.pieces.empty()) return make();
  DigestPieces(work, rank.pieces, source.memory,
               [weak = weak_from_this(), part, make,
                before = known->second.pieces](const Result<std::vector<DigestSum>>& now) {
                 const auto self = weak.lock();
                 if (self == nullptr) return;
                 const std::int64_t changed = now.ok() ? FirstDifference(before, *now) : -1;
                 if (now.ok() && changed < 0 && self->running()) return make();
                 --self->busy_;
                 if (!self->running()) return self->CheckDrained();
                 if (!now.ok()) return self->Fail(now.status());
                 const Rank& writer = *self->sources_[part].rank;
                 self->Fail(WrittenDuringPublish(
                     writer, self->spec_.version,
                     writer.pieces->NameOf(static_cast<std::uint32_t>(changed))));
               });
}

void Session::Ready() {
  if (const Status checked = CheckOwnPart(); !checked.ok()) return Fail(checked);
  Expose();
  if (!running()) return;
  phase_ = Phase::kReady;
  Trace("prepare", host_.agent_name(), phase_begin_ns_, 0);
  proto::AgentMessage message;
  proto::SessionReady& ready = *message.mutable_session_ready();
  ready.set_session(spec_.id.value);
  *ready.mutable_plan_digest() = rpc::ToProto(plan_->classes.digest);
  ready.set_plan_seconds(plan_->plan_seconds);
  host_.Send(std::move(message));
  // With another digest than the session's, the daemon sees it in SessionReady and decides.
  const bool agreed = spec_.go && spec_.plan_digest == plan_->classes.digest;
  if (agreed || going_) Go();
}

// Before anybody can be told to go, so that no pull comes too early from an agent that was. The
// write counter is compared with its value at publish before the first byte, and again at Finish.
void Session::Expose() {
  for (SourcePart& part : sources_) {
    const bool live = part.memory == part.rank->memory;
    if (live && part.rank->write_count() != part.rank->write_count_at_publish) {
      return Fail(WrittenDuringPublish(*part.rank, spec_.version, ""));
    }
    part.exposed = true;
    for (const BoundRoute& route : *part.routes) {
      transport::Transport* transport = TransportTo(ParticipantOfTarget(route.target_rank));
      if (transport == nullptr) {
        return Fail(Status(Code::kUnimplemented,
                           fmt::format("rank {} of {} is at another agent and this one has no "
                                       "transport to it; start it with --data-listen",
                                       route.target_rank, spec_.target_job),
                           Reason::kUnsupported));
      }
      transport::RouteEnd end = route.At(part.memory->bases());
      end.memory = part.memory->foreign();
      end.deadline = deadline_;
      end.capability = spec_.capability;
      const Status exposed = transport->Expose(KeyOf(route), std::move(end));
      if (!exposed.ok()) return Fail(exposed.Annotate(part.rank->Name()));
    }
  }
}

Status WrittenDuringPublish(const Rank& rank, Version version, const std::string& where) {
  return {
      Code::kFailedPrecondition,
      fmt::format("{} wrote to its memory{} after it published version {} and before that was "
                  "released; call before_write() (or install the optimizer hook) ahead of every "
                  "step, or publish with a snapshot",
                  rank.Name(), where.empty() ? "" : " (" + where + ")", version.value),
      Reason::kWriteDuringPublish};
}

}  // namespace tensorbus::agent
