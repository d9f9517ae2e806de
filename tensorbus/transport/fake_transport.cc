#include "tensorbus/transport/fake_transport.h"

#include <optional>
#include <vector>

#include "tensorbus/transport/foreign_landing.h"
#include "tensorbus/transport/part_plan.h"
#include "tensorbus/transport/pull_state.h"
#include "tensorbus/transport/route_check.h"

namespace tensorbus::transport {

std::shared_ptr<ExposureTable> FakeNet::Find(const std::string& endpoint) const {
  const MutexLock lock(mutex_);
  const auto found = nodes_.find(endpoint);
  return found == nodes_.end() ? nullptr : found->second;
}

void FakeNet::Join(const std::string& endpoint, std::shared_ptr<ExposureTable> sources) {
  const MutexLock lock(mutex_);
  nodes_[endpoint] = std::move(sources);
}

void FakeNet::Leave(const std::string& endpoint) {
  const MutexLock lock(mutex_);
  nodes_.erase(endpoint);
}

struct FakeTransport::Job {
  Job(const RouteKey& key, RouteEnd target, PullOptions options, Done done)
      : pull(key, std::move(target), std::move(options), std::move(done)) {}

  PullState pull;
  // The rest belongs to the executor's thread.
  std::shared_ptr<Exposure> source;
  std::optional<PartPlan> plan;
  std::size_t next_part = 0;
  std::optional<Executor::TimerId> timer;
};

struct FakeTransport::State {
  State(FakeNet& n, Executor& e, FakeOptions o) : net(n), executor(e), options(std::move(o)) {}

  FakeNet& net;
  Executor& executor;
  const FakeOptions options;
  const std::shared_ptr<ExposureTable> exposures = std::make_shared<ExposureTable>();
  Mutex mutex;
  std::vector<std::shared_ptr<Job>> jobs TB_GUARDED_BY(mutex);
};

FakeTransport::FakeTransport(FakeNet& net, Executor& executor, FakeOptions options)
    : state_(std::make_shared<State>(net, executor, std::move(options))) {
  net.Join(state_->options.endpoint, state_->exposures);
}

FakeTransport::~FakeTransport() {
  state_->net.Leave(state_->options.endpoint);
  const MutexLock lock(state_->mutex);
  for (const auto& job : state_->jobs) job->pull.Cancel();
}

std::string FakeTransport::endpoint() const {
  return state_->options.endpoint;
}

Status FakeTransport::Expose(const RouteKey& key, RouteEnd source) {
  return state_->exposures->Add(key, std::move(source));
}

void FakeTransport::Withdraw(const RouteKey& key) {
  state_->exposures->Remove(key);
}

void FakeTransport::Pull(const RouteKey& key, RouteEnd target, PullOptions options, Done done) {
  Status status = CheckEnd(target).Annotate(RouteName(key));
  const TimePoint deadline = options.deadline;
  const auto job =
      std::make_shared<Job>(key, std::move(target), std::move(options), std::move(done));
  if (!status.ok()) job->pull.Fail(std::move(status));
  {
    const MutexLock lock(state_->mutex);
    state_->jobs.push_back(job);
  }
  state_->executor.Post([state = state_, job, deadline] {
    if (deadline != TimePoint::max()) {
      job->timer = state->executor.PostAt(deadline, [state, job] {
        job->pull.CheckDeadline(state->executor.Now());
        Finish(*state, job);
      });
    }
    Step(state, job);
  });
}

void FakeTransport::Cancel(SessionId session) {
  const MutexLock lock(state_->mutex);
  for (const auto& job : state_->jobs) {
    if (job->pull.key().session == session) job->pull.Cancel();
  }
}

void FakeTransport::Step(const std::shared_ptr<State>& state, const std::shared_ptr<Job>& job) {
  job->pull.CheckDeadline(state->executor.Now());
  if (!job->pull.failed()) MoveOne(*state, *job);
  if (job->pull.over()) {
    Finish(*state, job);
  } else {
    state->executor.Post([state, job] { Step(state, job); });
  }
}

void FakeTransport::MoveOne(const State& state, Job& job) {
  const RouteKey& key = job.pull.key();
  const std::string& peer = job.pull.options().peer;
  const auto sources = peer.empty() ? state.exposures : state.net.Find(peer);
  if (sources == nullptr) {
    job.pull.Fail(
        Status(Code::kUnavailable, RouteName(key) + ": nobody is at " + peer, Reason::kPeerLost));
    return;
  }
  if (job.source == nullptr) {
    Result<std::shared_ptr<Exposure>> opened = sources->Open(key, job.pull.options().capability);
    if (!opened.ok()) return job.pull.Fail(opened.status());
    job.source = *std::move(opened);
    const Status match = CheckEndsMatch(key, job.source->end, job.pull.target().end());
    if (!match.ok()) return job.pull.Fail(match);
    job.plan.emplace(job.pull.target().end(), state.options.step_bytes);
  }
  if (job.next_part == job.plan->size() || !job.pull.Enter()) return;
  {
    const AccessScope access(job.source->gate);
    if (!access) job.pull.Fail(WithdrawnMeanwhile(key));
    if (access) {
      LandParts(job.pull, job.source->end, job.plan->part(job.next_part),
                kernels::StoreKind::kPlain, state.options.landing_hook);
      ++job.next_part;
    }
  }
  job.pull.Leave();
}

void FakeTransport::Finish(State& state, const std::shared_ptr<Job>& job) {
  if (!job->pull.over()) return;
  {
    const MutexLock lock(state.mutex);
    std::erase(state.jobs, job);
  }
  if (job->timer.has_value()) state.executor.CancelTimer(*job->timer);
  job->pull.Report();
}

}  // namespace tensorbus::transport
