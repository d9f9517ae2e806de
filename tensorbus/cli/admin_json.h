#pragma once

#include "proto/tensorbus.pb.h"
#include "tensorbus/base/status.h"
#include "tensorbus/cli/ordered_json.h"

// The daemon's answers as JSON. Field names are fixed by docs/operations.md.
namespace tensorbus::cli {

OrderedJson ToJson(const proto::StatusReply& reply);
OrderedJson ToJson(const proto::VersionsReply& reply);
OrderedJson ToJson(const proto::ExplainReply& reply);
OrderedJson ToJson(const proto::WhoIsMissingReply& reply);
OrderedJson ToJson(const proto::VerifyReply& reply);
/// The trace format that Perfetto and chrome://tracing read: one process per agent's tracks.
OrderedJson ToTraceJson(const proto::TraceReply& reply);
/// {"error": {"code", "reason", "message"}}
OrderedJson ErrorJson(const Status& status);

}  // namespace tensorbus::cli
