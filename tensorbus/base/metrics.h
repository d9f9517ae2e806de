#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensorbus/base/status.h"

namespace tensorbus {

/// Labels of one series; values come from small closed sets (transport, direction, code).
using MetricLabels = std::map<std::string, std::string>;

/// Only grows. Thread-safe.
class Counter {
 public:
  virtual ~Counter() = default;
  virtual void Add(double amount) = 0;
  void Increment() { Add(1); }
};

/// Goes up and down. Thread-safe.
class Gauge {
 public:
  virtual ~Gauge() = default;
  virtual void Set(double value) = 0;
};

/// Counts observations by size. Thread-safe.
class Histogram {
 public:
  virtual ~Histogram() = default;
  virtual void Observe(double value) = 0;
};

/// One process's metrics, named tensorbus_<component>_<what>_<unit>, and the page that shows them.
///
/// Threads: thread-safe. What Add…() returns lives as long as the registry. Asking twice for one
/// name and labels gives the same series; `help` counts the first time.
class Metrics {
 public:
  Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;
  ~Metrics();

  Counter& AddCounter(const std::string& name, const std::string& help,
                      const MetricLabels& labels = {});
  Gauge& AddGauge(const std::string& name, const std::string& help,
                  const MetricLabels& labels = {});
  /// A gauge that asks `read` whenever the page is made, on the page's thread. Once per name;
  /// `read` lives as long as the registry.
  void AddGauge(const std::string& name, const std::string& help, std::function<double()> read);
  /// `bounds`: upper bounds of the buckets, ascending.
  Histogram& AddHistogram(const std::string& name, const std::string& help,
                          const std::vector<double>& bounds, const MetricLabels& labels = {});

  /// The page in Prometheus text format.
  std::string Text() const;
  /// Names of all families, sorted; compared with docs/metrics.md by a test.
  std::vector<std::string> Names() const;

  /// Serves the page at http://`address`/metrics ("127.0.0.1:9400"; port 0: the system picks) until
  /// the registry dies. Returns the port. Error: kUnavailable naming the address.
  Result<int> Listen(const std::string& address);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tensorbus
