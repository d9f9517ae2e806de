#include "tensorbus/transport/shm_transport.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <pthread.h>

#include "tensorbus/kernels/joint_copy.h"
#include "tensorbus/transport/foreign_landing.h"
#include "tensorbus/transport/pull_state.h"
#include "tensorbus/transport/route_check.h"

namespace tensorbus::transport {

namespace {

constexpr std::size_t kNoPart = static_cast<std::size_t>(-1);

}  // namespace

/// One pull.
struct ShmTransport::Member {
  Member(const RouteKey& key, RouteEnd target, PullOptions options, Transport::Done done)
      : pull(key, std::move(target), std::move(options), std::move(done)) {}

  /// Whether both ends lie in this process's memory, so that it may share a pass over the source.
  bool joins() const {
    return source != nullptr && source->end.memory == nullptr &&
           pull.target().end().memory == nullptr;
  }

  PullState pull;
  std::shared_ptr<Exposure> source;  ///< null when it failed before it began
};

/// Pulls that are worked on together. `next_part` belongs to the transport's mutex, the rest is
/// immutable or thread-safe.
struct ShmTransport::Job {
  bool failed() const {
    return std::all_of(members.begin(), members.end(),
                       [](const auto& member) { return member->pull.failed(); });
  }
  bool over() const {
    return std::all_of(members.begin(), members.end(),
                       [](const auto& member) { return member->pull.over(); });
  }
  void Cancel() {
    for (const auto& member : members) member->pull.Cancel();
  }

  std::vector<std::unique_ptr<Member>> members;
  JointPlan plan;
  kernels::StoreKind store = kernels::StoreKind::kPlain;
  std::size_t next_part = 0;
};

std::unique_ptr<ShmTransport> ShmTransport::Create(ShmOptions options) {
  if (options.threads == 0) options.threads = std::max(1U, std::thread::hardware_concurrency());
  return std::unique_ptr<ShmTransport>(new ShmTransport(std::move(options)));
}

ShmTransport::ShmTransport(ShmOptions options) : options_(std::move(options)) {
  for (unsigned i = 0; i < options_.threads; ++i) {
    threads_.emplace_back([this] { Work(); });
    pthread_setname_np(threads_.back().native_handle(), "tb-shm");
  }
}

ShmTransport::~ShmTransport() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    for (auto& [key, members] : held_) waiting_.push_back(MakeJob(std::move(members)));
    held_.clear();
    for (const auto& job : waiting_) job->Cancel();
    for (const auto& job : running_) job->Cancel();
    work_.NotifyAll();
  }
  threads_.clear();
}

Status ShmTransport::Expose(const RouteKey& key, RouteEnd source) {
  return exposures_.Add(key, std::move(source));
}

void ShmTransport::Withdraw(const RouteKey& key) {
  exposures_.Remove(key);
}

void ShmTransport::Pull(const RouteKey& key, RouteEnd target, PullOptions options, Done done) {
  Status status = CheckEnd(target).Annotate(RouteName(key));
  const bool more = options.more_follow;
  auto member =
      std::make_unique<Member>(key, std::move(target), std::move(options), std::move(done));
  if (status.ok()) {
    Result<std::shared_ptr<Exposure>> opened =
        exposures_.Open(key, member->pull.options().capability);
    status = opened.status();
    if (opened.ok()) member->source = *std::move(opened);
  }
  if (status.ok()) status = CheckEndsMatch(key, member->source->end, member->pull.target().end());
  if (!status.ok()) {
    member->source = nullptr;
    member->pull.Fail(std::move(status));
  }
  const std::pair group(key.session, key.source_rank);
  std::vector<std::unique_ptr<Member>> members;
  {
    const MutexLock lock(mutex_);
    if (more && !stopping_) {
      held_[group].push_back(std::move(member));
      return;
    }
    if (auto held = held_.extract(group); !held.empty()) members = std::move(held.mapped());
  }
  members.push_back(std::move(member));
  // Those that share no memory of this process go by themselves.
  std::vector<std::shared_ptr<Job>> jobs;
  std::vector<std::unique_ptr<Member>> joined;
  for (std::unique_ptr<Member>& each : members) {
    const bool alike =
        joined.empty() || joined.front()->pull.options().proof == each->pull.options().proof;
    if (each->joins() && alike) {
      joined.push_back(std::move(each));
      continue;
    }
    std::vector<std::unique_ptr<Member>> alone;
    alone.push_back(std::move(each));
    jobs.push_back(MakeJob(std::move(alone)));
  }
  if (!joined.empty()) jobs.push_back(MakeJob(std::move(joined)));
  const MutexLock lock(mutex_);
  for (const std::shared_ptr<Job>& job : jobs) {
    if (stopping_) job->Cancel();
    waiting_.push_back(job);
  }
  work_.NotifyAll();
}

std::shared_ptr<ShmTransport::Job> ShmTransport::MakeJob(
    std::vector<std::unique_ptr<Member>> members) const {
  auto job = std::make_shared<Job>();
  std::vector<JointPlan::Route> routes;
  std::uint64_t bytes = 0;
  for (const std::unique_ptr<Member>& member : members) {
    if (member->source == nullptr) continue;
    routes.push_back({.source = &member->source->end, .target = &member->pull.target().end()});
    bytes += member->pull.bytes();
  }
  // A member that failed is alone: numbers of routes are numbers of members.
  job->plan = JointPlan(routes, options_.part_bytes);
  if (bytes >= options_.stream_bytes) job->store = kernels::StoreKind::kStream;
  job->members = std::move(members);
  return job;
}

void ShmTransport::Cancel(SessionId session) {
  const MutexLock lock(mutex_);
  for (auto held = held_.begin(); held != held_.end();) {
    if (held->first.first != session) {
      ++held;
      continue;
    }
    waiting_.push_back(MakeJob(std::move(held->second)));
    held = held_.erase(held);
    work_.NotifyAll();
  }
  for (const auto* jobs : {&waiting_, &running_}) {
    for (const auto& job : *jobs) {
      if (job->members.front()->pull.key().session == session) job->Cancel();
    }
  }
}

std::shared_ptr<ShmTransport::Job> ShmTransport::NextJob(std::size_t& part) {
  turn_ = turn_ + 1 < waiting_.size() ? turn_ + 1 : 0;
  const std::shared_ptr<Job> job = waiting_[turn_];
  const bool has_part = !job->failed() && job->next_part < job->plan.size();
  part = has_part ? job->next_part++ : kNoPart;
  if (!has_part || job->next_part == job->plan.size()) {
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(turn_));
    running_.push_back(job);
  }
  return job;
}

void ShmTransport::Work() {
  for (;;) {
    std::shared_ptr<Job> job;
    std::size_t part = kNoPart;
    {
      const MutexLock lock(mutex_);
      while (waiting_.empty() && !stopping_) work_.Wait(mutex_);
      if (waiting_.empty()) return;
      job = NextJob(part);
    }
    const TimePoint now = std::chrono::steady_clock::now();
    for (const auto& member : job->members) member->pull.CheckDeadline(now);
    if (part != kNoPart) RunPart(*job, part);
    if (job->over()) {
      // Out of the lists before the last Done, which may destroy what the job borrows.
      const MutexLock lock(mutex_);
      std::erase(waiting_, job);
      std::erase(running_, job);
    }
    for (const auto& member : job->members) {
      if (member->pull.over()) member->pull.Report();
    }
  }
}

void ShmTransport::RunPart(Job& job, std::size_t part) {
  const auto [first, last] = job.plan.part(part);
  std::vector<bool> open(job.members.size());
  std::vector<Member*> inside;
  std::vector<AccessGate*> gates;
  for (std::size_t s = first; s < last; ++s) {
    for (const JointPlan::Item& item : job.plan.slice(s)) {
      Member& member = *job.members[item.route];
      if (open[item.route] || !member.pull.Enter()) continue;
      inside.push_back(&member);
      if (member.source->gate.Enter()) {
        gates.push_back(&member.source->gate);
        open[item.route] = true;
      } else {
        member.pull.Fail(WithdrawnMeanwhile(member.pull.key()));
      }
    }
  }
  if (job.members.size() == 1) {
    // Many small parts of one route at a time: foreign memory is asked for all of them in one call.
    std::vector<BlockPart> parts;
    for (std::size_t s = first; s < last; ++s) {
      for (const JointPlan::Item& item : job.plan.slice(s)) parts.push_back(item.part);
    }
    Member& member = *job.members.front();
    if (open.front()) {
      LandParts(member.pull, member.source->end, parts, job.store, options_.landing_hook);
    }
  } else {
    for (std::size_t s = first; s < last; ++s) RunSlice(job, job.plan.slice(s), open);
  }
  for (AccessGate* const gate : gates) gate->Leave();
  for (Member* const member : inside) member->pull.Leave();
}

void ShmTransport::RunSlice(Job& job, std::span<const JointPlan::Item> slice,
                            const std::vector<bool>& open) const {
  std::array<JointPart, kernels::kJointMax> parts;
  std::size_t count = 0;
  for (const JointPlan::Item& item : slice) {
    Member& member = *job.members[item.route];
    if (!open[item.route] || member.pull.failed()) continue;
    parts[count++] = {.pull = &member.pull, .source = &member.source->end, .part = item.part};
  }
  LandJointly(std::span(parts).first(count), job.store, options_.landing_hook);
}

}  // namespace tensorbus::transport
