#include "tensorbus/base/metrics.h"

#include <algorithm>
#include <exception>
#include <fmt/format.h>
#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
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

/// A registry, and gauges that are read when the page is made.
class Page final : public prometheus::Collectable {
 public:
  prometheus::Registry& registry() { return registry_; }
  void Add(std::string name, std::string help, std::function<double()> read) {
    MutexLock lock(mutex_);
    read_.push_back({std::move(name), std::move(help), std::move(read)});
  }
  std::vector<prometheus::MetricFamily> Collect() const override {
    std::vector<prometheus::MetricFamily> families = registry_.Collect();
    MutexLock lock(mutex_);
    for (const ReadGauge& gauge : read_) {
      prometheus::MetricFamily& family = families.emplace_back();
      family.name = gauge.name;
      family.help = gauge.help;
      family.type = prometheus::MetricType::Gauge;
      family.metric.emplace_back().gauge.value = gauge.read();
    }
    return families;
  }

 private:
  struct ReadGauge {
    std::string name;
    std::string help;
    std::function<double()> read;
  };
  prometheus::Registry registry_;
  mutable Mutex mutex_;
  std::vector<ReadGauge> read_ TB_GUARDED_BY(mutex_);
};

using SeriesKey = std::pair<std::string, MetricLabels>;

}  // namespace

struct Metrics::State {
  Mutex mutex;
  std::shared_ptr<Page> page = std::make_shared<Page>();
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
    auto& family =
        prometheus::BuildCounter().Name(name).Help(help).Register(state_->page->registry());
    slot = std::make_unique<PrometheusCounter>(family.Add(labels));
  }
  return *slot;
}

Gauge& Metrics::AddGauge(const std::string& name, const std::string& help,
                         const MetricLabels& labels) {
  MutexLock lock(state_->mutex);
  auto& slot = state_->gauges[{name, labels}];
  if (slot == nullptr) {
    auto& family =
        prometheus::BuildGauge().Name(name).Help(help).Register(state_->page->registry());
    slot = std::make_unique<PrometheusGauge>(family.Add(labels));
  }
  return *slot;
}

void Metrics::AddGauge(const std::string& name, const std::string& help,
                       std::function<double()> read) {
  state_->page->Add(name, help, std::move(read));
}

Histogram& Metrics::AddHistogram(const std::string& name, const std::string& help,
                                 const std::vector<double>& bounds, const MetricLabels& labels) {
  MutexLock lock(state_->mutex);
  auto& slot = state_->histograms[{name, labels}];
  if (slot == nullptr) {
    auto& family =
        prometheus::BuildHistogram().Name(name).Help(help).Register(state_->page->registry());
    slot = std::make_unique<PrometheusHistogram>(
        family.Add(labels, prometheus::Histogram::BucketBoundaries(bounds)));
  }
  return *slot;
}

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(state_->page->Collect());
}

std::vector<std::string> Metrics::Names() const {
  std::vector<std::string> names;
  for (const auto& family : state_->page->Collect()) names.push_back(family.name);
  std::sort(names.begin(), names.end());
  return names;
}

Result<int> Metrics::Listen(const std::string& address) {
  MutexLock lock(state_->mutex);
  try {
    auto exposer = std::make_unique<prometheus::Exposer>(address, /*num_threads=*/1);
    exposer->RegisterCollectable(state_->page);
    const std::vector<int> ports = exposer->GetListeningPorts();
    state_->exposer = std::move(exposer);
    return ports.empty() ? 0 : ports.front();
  } catch (const std::exception& error) {  // civetweb's, the only way it reports
    return Status(Code::kUnavailable,
                  fmt::format("cannot serve metrics on {}: {}", address, error.what()));
  }
}

}  // namespace tensorbus
