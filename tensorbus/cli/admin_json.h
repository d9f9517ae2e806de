#pragma once

#include <nlohmann/json.hpp>

#include "proto/tensorbus.pb.h"
#include "tensorbus/base/status.h"

// The daemon's answers as JSON. Field names are fixed by docs/operations.md.
namespace tensorbus::cli {

nlohmann::ordered_json ToJson(const proto::StatusReply& reply);
nlohmann::ordered_json ToJson(const proto::VersionsReply& reply);
nlohmann::ordered_json ToJson(const proto::ExplainReply& reply);
nlohmann::ordered_json ToJson(const proto::WhoIsMissingReply& reply);
nlohmann::ordered_json ToJson(const proto::VerifyReply& reply);
/// The trace format that Perfetto and chrome://tracing read: one process per agent's tracks.
nlohmann::ordered_json ToTraceJson(const proto::TraceReply& reply);
/// {"error": {"code", "reason", "message"}}
nlohmann::ordered_json ErrorJson(const Status& status);

}  // namespace tensorbus::cli
