#pragma once

#include <functional>
#include <optional>
#include <string>

#include "planner/plan.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::cli {

/// The ways to name a transfer on the command line; empty strings were not given.
struct TransferOptions {
  std::string source;    ///< layout file
  std::string target;    ///< layout file
  std::string layouts;   ///< layouts file, manifests beside it; empty: the one that is shipped
  std::string scenario;  ///< id, unique prefix of one, or "all"
  std::string model;     ///< LoadModel()
  std::string from;      ///< planner::ParseTemplateUse()
  std::string to;        ///< planner::ParseTemplateUse()
  std::string topology;  ///< JSON file
  bool colocated = false;
};

/// Two layouts, valid, of one model.
struct Transfer {
  std::string scenario;  ///< the id; empty for other ways
  std::string model;     ///< with `from` and `to` as they were given; empty for other ways
  std::string from;
  std::string to;
  JobLayout source;
  JobLayout target;
  std::optional<planner::Topology> topology;  ///< where a file was given
  bool colocated = false;                     ///< source rank i and target rank i are one device
};

/// Reads every transfer that the options name (several for scenario "all") and hands them over one
/// by one, so that only one is in memory. Errors: kInvalidArgument or kNotFound for what is not
/// well formed or not there; the first that `use` returns.
Status ForEachTransfer(const TransferOptions& options, const std::function<Status(Transfer)>& use);

}  // namespace tensorbus::cli
