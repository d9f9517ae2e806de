#include "simulate/flows.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

namespace tensorbus::simulate {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
/// Bytes below this share of a flow are rounding.
constexpr double kDust = 1e-9;
/// Passes in which the caps of relays that wait for each other's bytes settle.
constexpr int kPasses = 4;
/// First windows that arrive within this share of the grain start together: chains have many hops,
/// and each may start late by so much.
constexpr double kStartShare = 0.125;

class Run {
 public:
  Run(std::span<const Flow> flows, std::span<const double> capacities, const FlowOptions& options)
      : flows_(flows), capacities_(capacities), options_(options), states_(flows.size()) {
    ListHopsAndInlets();
    if (options_.sharing == Sharing::kRounds) Queue();
    std::vector<double> load(capacities_.size());
    for (const Flow& flow : flows_) {
      for (const Hop& hop : flow.hops) load[hop.link] += flow.bytes * hop.cost;
    }
    for (std::size_t l = 0; l < load.size(); ++l)
      grain_s_ = std::max(grain_s_, options_.grain * load[l] / capacities_[l]);
    for (const std::uint32_t group : options_.groups) groups_ = std::max(groups_, group + 1);
  }

  Result<FlowOutcome> Go() {
    outcome_.times.resize(flows_.size());
    left_ = flows_.size();
    for (std::uint32_t f = 0; f < flows_.size(); ++f) {
      if (flows_[f].bytes <= 0) Finish(f, 0);
    }
    while (left_ > 0) {
      Choose();
      Share();
      const double step = NextEvent();
      if (step == kNever) {
        return Status(Code::kInternal, "simulation: no flow can move any more");
      }
      Record(step);
      Advance(step);
    }
    return std::move(outcome_);
  }

 private:
  struct State {
    double sent = 0;
    double rate = 0;
    double inflow = 0;  // bytes/s that arrive for a relay to pass on
    bool begun = false;
    bool done = false;
    bool fed = false;  // everything it passes on has arrived
    bool dry = true;   // it has passed on all it may
    std::uint32_t link = kNoLink;
  };

  /// A Feed with the quotient that every step needs.
  struct Inlet {
    std::uint32_t flow;
    double bytes;
    double share;  // of what the flow brings
  };

  /// Puts what is looked at again and again side by side.
  void ListHopsAndInlets() {
    for (const Flow& flow : flows_) {
      first_hop_.push_back(static_cast<std::uint32_t>(hops_.size()));
      hops_.insert(hops_.end(), flow.hops.begin(), flow.hops.end());
      first_inlet_.push_back(static_cast<std::uint32_t>(inlets_.size()));
      for (const Feed& feed : flow.feeds)
        inlets_.push_back({feed.flow, feed.bytes, feed.bytes / flows_[feed.flow].bytes});
    }
    first_hop_.push_back(static_cast<std::uint32_t>(hops_.size()));
    first_inlet_.push_back(static_cast<std::uint32_t>(inlets_.size()));
  }
  std::span<const Hop> HopsOf(std::uint32_t f) const {
    return std::span(hops_).subspan(first_hop_[f], first_hop_[f + 1] - first_hop_[f]);
  }
  std::span<const Inlet> InletsOf(std::uint32_t f) const {
    return std::span(inlets_).subspan(first_inlet_[f], first_inlet_[f + 1] - first_inlet_[f]);
  }

  double Left(std::uint32_t f) const { return flows_[f].bytes - states_[f].sent; }
  double Dust(std::uint32_t f) const { return flows_[f].bytes * kDust; }

  /// Bytes of a relayed flow that have arrived.
  double Arrived(std::uint32_t f) const {
    double bytes = 0;
    for (const Inlet& inlet : InletsOf(f))
      bytes += std::min(inlet.bytes, inlet.share * states_[inlet.flow].sent);
    return bytes;
  }
  /// Bytes that may be passed on now: whole windows, and the rest once everything is there.
  double Available(std::uint32_t f) const {
    if (states_[f].fed) return flows_[f].bytes;
    return std::max(0.0, Arrived(f) - std::min(flows_[f].window_bytes, flows_[f].bytes));
  }
  double Inflow(std::uint32_t f) const {
    double rate = 0;
    for (const Inlet& inlet : InletsOf(f)) {
      const State& state = states_[inlet.flow];
      if (!state.done) rate += inlet.share * state.rate;
    }
    return rate;
  }

  void Queue() {
    std::vector<std::uint32_t> order(flows_.size());
    for (std::uint32_t f = 0; f < order.size(); ++f) order[f] = f;
    std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
      return flows_[a].round < flows_[b].round;
    });
    for (const std::uint32_t f : order) {
      senders_[flows_[f].sender].push_back(f);
      receivers_[flows_[f].receiver].push_back(f);
    }
    for (auto* queues : {&senders_, &receivers_}) {
      for (auto& [rank, queue] : *queues) std::reverse(queue.begin(), queue.end());
    }
  }
  bool Heads(std::map<std::uint32_t, std::vector<std::uint32_t>>& queues, std::uint32_t rank,
             std::uint32_t f) {
    auto& queue = queues[rank];
    while (!queue.empty() && states_[queue.back()].done) queue.pop_back();
    return !queue.empty() && queue.back() == f;
  }

  /// The flows that move now.
  void Choose() {
    moving_.clear();
    const auto consider = [&](std::uint32_t f) {
      State& state = states_[f];
      const double rate_before = std::exchange(state.rate, 0);
      if (state.done) return;
      if (const auto inlets = InletsOf(f); !inlets.empty()) {
        state.fed = state.fed || std::all_of(inlets.begin(), inlets.end(), [&](const Inlet& inlet) {
                      return states_[inlet.flow].done;
                    });
        const double ready = Available(f) - state.sent;
        // One that has caught up may fall behind a little before it hurries again; else every
        // change of a rate would make it hurry for a moment.
        const double behind = state.dry ? grain_s_ * rate_before : 0;
        state.dry = !state.fed && ready <= std::max(Dust(f), behind);
        // Before the first window is there, nothing may be passed on.
        if (state.dry && !state.fed &&
            Arrived(f) + Dust(f) < std::min(flows_[f].window_bytes, flows_[f].bytes))
          return;
      }
      moving_.push_back(f);
    };
    if (options_.sharing != Sharing::kRounds) {
      for (std::uint32_t f = 0; f < flows_.size(); ++f) consider(f);
      return;
    }
    std::vector<std::uint32_t> heads;
    for (auto& [rank, queue] : senders_) {
      while (!queue.empty() && states_[queue.back()].done) queue.pop_back();
      if (queue.empty()) continue;
      const std::uint32_t f = queue.back();
      if (Heads(receivers_, flows_[f].receiver, f)) heads.push_back(f);
    }
    std::sort(heads.begin(), heads.end());
    for (const std::uint32_t f : heads) consider(f);
  }

  /// Rates of the moving flows. A relay that has caught up is held to what arrives for it; since
  /// that depends on the rates themselves, it takes a few passes.
  void Share() {
    demands_.clear();
    bool held = false;
    for (const std::uint32_t f : moving_) {
      const double weight = options_.sharing == Sharing::kRemaining ? Left(f) : 1.0;
      demands_.push_back({HopsOf(f), std::max(weight, Dust(f)), kNever});
      held = held || Held(f);
    }
    MaxMinShares sharing(demands_, capacities_);
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::span<const Allotment> shares = sharing.Run();
      bool changed = false;
      for (std::size_t i = 0; i < moving_.size(); ++i) {
        states_[moving_[i]].rate = shares[i].rate;
        states_[moving_[i]].link = shares[i].link;
      }
      if (!held) return;
      for (std::size_t i = 0; i < moving_.size(); ++i) {  // feeds come earlier in the list
        State& state = states_[moving_[i]];
        if (!Held(moving_[i])) continue;
        const double inflow = Inflow(moving_[i]);
        changed = changed || std::abs(inflow - demands_[i].cap) > 1e-6 * inflow;
        demands_[i].cap = inflow;
        if (state.rate > inflow) {
          state.rate = inflow;
          state.link = kNoLink;
        }
      }
      if (!changed) return;
    }
  }
  bool Held(std::uint32_t f) const {
    return !InletsOf(f).empty() && !states_[f].fed && states_[f].dry;
  }

  /// Seconds until a flow ends, a relay has its first window, or one has caught up.
  double NextEvent() {
    double step = kNever;
    for (const std::uint32_t f : moving_) {
      State& state = states_[f];
      if (state.rate > 0) step = std::min(step, Left(f) / state.rate);
      if (InletsOf(f).empty() || state.fed || state.dry) continue;
      state.inflow = Inflow(f);
      if (state.rate > state.inflow) {
        const double caught_up = (Available(f) - state.sent) / (state.rate - state.inflow);
        step = std::min(step, std::max(caught_up, grain_s_));
      }
    }
    for (std::uint32_t f = 0; f < flows_.size(); ++f) {
      const State& state = states_[f];
      if (state.done || InletsOf(f).empty() || state.begun) continue;
      const double inflow = Inflow(f);
      const double missing = std::min(flows_[f].window_bytes, flows_[f].bytes) - Arrived(f);
      if (inflow > 0 && missing > Dust(f))
        step = std::min(step, std::max(missing / inflow, kStartShare * grain_s_));
    }
    return step;
  }

  void Record(double step) {
    Stretch stretch = {now_, now_ + step, std::vector<double>(groups_)};
    for (const std::uint32_t f : moving_) {
      for (const Hop& hop : HopsOf(f)) {
        stretch.used[options_.groups.empty() ? 0 : options_.groups[hop.link]] +=
            states_[f].rate * hop.cost;
      }
    }
    outcome_.stretches.push_back(std::move(stretch));
  }

  void Advance(double step) {
    const double until = now_ + step;
    for (const std::uint32_t f : moving_) {
      State& state = states_[f];
      if (state.rate <= 0) continue;
      if (!state.begun) {
        state.begun = true;
        outcome_.times[f].start_s = now_;
      }
      state.sent += state.rate * step;
      const double left = Left(f);
      // Relays end only once what they pass on has: their bytes may still be on the way.
      const bool may_end = InletsOf(f).empty() || state.fed;
      if (may_end && (left <= Dust(f) || left <= state.rate * grain_s_))
        Finish(f, until + std::max(0.0, left) / state.rate);
    }
    now_ = until;
    for (const std::uint32_t f : moving_) {
      // Bytes that rounding let a relay pass on too early are waited for.
      if (!InletsOf(f).empty() && !states_[f].done && !states_[f].fed)
        states_[f].sent = std::min(states_[f].sent, Available(f));
    }
  }

  void Finish(std::uint32_t f, double at) {
    states_[f].done = true;
    states_[f].sent = flows_[f].bytes;
    states_[f].begun = true;
    outcome_.times[f].end_s = at;
    outcome_.times[f].link = states_[f].link;
    outcome_.end_s = std::max(outcome_.end_s, at);
    --left_;
  }

  std::span<const Flow> flows_;
  std::span<const double> capacities_;
  const FlowOptions& options_;
  std::vector<State> states_;
  std::vector<Hop> hops_;                   // flow by flow
  std::vector<std::uint32_t> first_hop_;    // by flow
  std::vector<Inlet> inlets_;               // flow by flow
  std::vector<std::uint32_t> first_inlet_;  // by flow
  std::vector<std::uint32_t> moving_;
  std::vector<Demand> demands_;
  std::map<std::uint32_t, std::vector<std::uint32_t>> senders_;    // flows by round, last first
  std::map<std::uint32_t, std::vector<std::uint32_t>> receivers_;  // the same
  double now_ = 0;
  double grain_s_ = 0;
  std::uint32_t groups_ = 1;
  std::size_t left_ = 0;
  FlowOutcome outcome_;
};

}  // namespace

Result<FlowOutcome> RunFlows(std::span<const Flow> flows, std::span<const double> capacities,
                             const FlowOptions& options) {
  return Run(flows, capacities, options).Go();
}

}  // namespace tensorbus::simulate
