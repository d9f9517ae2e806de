#include "tensorbus/base/metrics.h"

#include <algorithm>
#include <exception>
#include <fmt/format.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <utility>

#include "tensorbus/base/mutex.h"

namespace tensorbus {
namespace {

class PrometheusCounter final : public Counter {
 public:
  explicit PrometheusCounter(prometheus::Counter& counter) : counter_(counter) {}
  void Add(double amount) override { counter_.Increment(amount); }

 private:
  prometheus::Counter& counter_;
};

class PrometheusGauge final : public Gauge {
 public:
  explicit PrometheusGauge(prometheus::Gauge& gauge) : gauge_(gauge) {}
  void Set(double value) override { gauge_.Set(value); }

 private:
  prometheus::Gauge& gauge_;
};

class PrometheusHistogram final : public Histogram {
 public:
  explicit PrometheusHistogram(prometheus::Histogram& histogram) : histogram_(histogram) {}
  void Observe(double value) override { histogram_.Observe(value); }

 private:
  prometheus::Histogram& histogram_;
};

using SeriesKey = std::pair<std::string, MetricLabels>;

}  // namespace

struct Metrics::State {
  Mutex mutex;
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  std::map<SeriesKey, std::unique_ptr<Counter>> counters TB_GUARDED_BY(mutex);
  std::map<SeriesKey, std::unique_ptr<Gauge>> gauges TB_GUARDED_BY(mutex);
  std::map<SeriesKey, std::unique_ptr<Histogram>> histograms TB_GUARDED_BY(mutex);
  std::unique_ptr<prometheus::Exposer> exposer TB_GUARDED_BY(mutex);
};

Metrics::Metrics() : state_(std::make_unique<State>()) {}
Metrics::~Metrics() = default;

Counter& Metrics::AddCounter(const std::string& name, const std::string& help,
                             const MetricLabels& labels) {
  MutexLock lock(state_->mutex);
  auto& slot = state_->counters[{name, labels}];
  if (slot == nullptr) {
    auto& family = prometheus::BuildCounter().Name(name).Help(help).Register(*state_->registry);
    slot = std::make_unique<PrometheusCounter>(family.Add(labels));
  }
  return *slot;
}

Gauge& Metrics::AddGauge(const std::string& name, const std::string& help,
                         const MetricLabels& labels) {
  MutexLock lock(state_->mutex);
  auto& slot = state_->gauges[{name, labels}];
  if (slot == nullptr) {
    auto& family = prometheus::BuildGauge().Name(name).Help(help).Register(*state_->registry);
    slot = std::make_unique<PrometheusGauge>(family.Add(labels));
  }
  return *slot;
}

Histogram& Metrics::AddHistogram(const std::string& name, const std::string& help,
                                 const std::vector<double>& bounds, const MetricLabels& labels) {
  MutexLock lock(state_->mutex);
  auto& slot = state_->histograms[{name, labels}];
  if (slot == nullptr) {
    auto& family = prometheus::BuildHistogram().Name(name).Help(help).Register(*state_->registry);
    slot = std::make_unique<PrometheusHistogram>(
        family.Add(labels, prometheus::Histogram::BucketBoundaries(bounds)));
  }
  return *slot;
}

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(state_->registry->Collect());
}

std::vector<std::string> Metrics::Names() const {
  std::vector<std::string> names;
  for (const auto& family : state_->registry->Collect()) names.push_back(family.name);
  std::sort(names.begin(), names.end());
  return names;
}

Result<int> Metrics::Listen(const std::string& address) {
  MutexLock lock(state_->mutex);
  try {
    auto exposer = std::make_unique<prometheus::Exposer>(address, /*num_threads=*/1);
    exposer->RegisterCollectable(state_->registry);
    const std::vector<int> ports = exposer->GetListeningPorts();
    state_->exposer = std::move(exposer);
    return ports.empty() ? 0 : ports.front();
  } catch (const std::exception& error) {  // civetweb's, the only way it reports
    return Status(Code::kUnavailable,
                  fmt::format("cannot serve metrics on {}: {}", address, error.what()));
  }
}

}  // namespace tensorbus
