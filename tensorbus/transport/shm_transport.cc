#include "tensorbus/transport/shm_transport.h"

#include <algorithm>
#include <chrono>
#include <pthread.h>

#include "tensorbus/transport/foreign_landing.h"
#include "tensorbus/transport/part_plan.h"
#include "tensorbus/transport/pull_state.h"
#include "tensorbus/transport/route_check.h"

namespace tensorbus::transport {

namespace {

constexpr std::size_t kNoPart = static_cast<std::size_t>(-1);

}  // namespace

/// One pull. `next_part` belongs to the transport's mutex, the rest is immutable or thread-safe.
struct ShmTransport::Job {
  Job(const RouteKey& key, RouteEnd target, PullOptions options, Done done)
      : pull(key, std::move(target), std::move(options), std::move(done)) {}

  PullState pull;
  std::shared_ptr<Exposure> source;
  PartPlan plan{RouteEnd{}, 1};
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
    for (const auto& job : waiting_) job->pull.Cancel();
    for (const auto& job : running_) job->pull.Cancel();
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
  const auto job =
      std::make_shared<Job>(key, std::move(target), std::move(options), std::move(done));
  if (status.ok()) {
    Result<std::shared_ptr<Exposure>> opened = exposures_.Open(key, job->pull.options().capability);
    status = opened.status();
    if (opened.ok()) job->source = *std::move(opened);
  }
  if (status.ok()) status = CheckEndsMatch(key, job->source->end, job->pull.target().end());
  if (status.ok()) {
    job->plan = PartPlan(job->pull.target().end(), options_.part_bytes);
    if (job->pull.bytes() >= options_.stream_bytes) job->store = kernels::StoreKind::kStream;
  } else {
    job->pull.Fail(std::move(status));
  }
  const MutexLock lock(mutex_);
  if (stopping_) job->pull.Cancel();
  waiting_.push_back(job);
  work_.NotifyAll();
}

void ShmTransport::Cancel(SessionId session) {
  const MutexLock lock(mutex_);
  for (const auto* jobs : {&waiting_, &running_}) {
    for (const auto& job : *jobs) {
      if (job->pull.key().session == session) job->pull.Cancel();
    }
  }
}

std::shared_ptr<ShmTransport::Job> ShmTransport::NextJob(std::size_t& part) {
  turn_ = turn_ + 1 < waiting_.size() ? turn_ + 1 : 0;
  const std::shared_ptr<Job> job = waiting_[turn_];
  const bool has_part = !job->pull.failed() && job->next_part < job->plan.size();
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
    job->pull.CheckDeadline(std::chrono::steady_clock::now());
    if (part != kNoPart) RunPart(*job, part);
    if (!job->pull.over()) continue;
    {
      // Out of the lists before Done, which may destroy what the job borrows.
      const MutexLock lock(mutex_);
      std::erase(waiting_, job);
      std::erase(running_, job);
    }
    job->pull.Report();
  }
}

void ShmTransport::RunPart(Job& job, std::size_t part) {
  if (!job.pull.Enter()) return;
  {
    const AccessScope access(job.source->gate);
    if (access) {
      LandParts(job.pull, job.source->end, job.plan.part(part), job.store, options_.landing_hook);
    } else {
      job.pull.Fail(WithdrawnMeanwhile(job.pull.key()));
    }
  }
  job.pull.Leave();
}

}  // namespace tensorbus::transport
