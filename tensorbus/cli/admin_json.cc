#include "tensorbus/cli/admin_json.h"

#include <fmt/format.h>
#include <map>

#include "tensorbus/rpc/status_map.h"

namespace tensorbus::cli {

namespace {

OrderedJson BoxJson(const proto::BoxMessage& box) {
  OrderedJson out = OrderedJson::array();
  for (int d = 0; d < box.lo_size() && d < box.hi_size(); ++d) {
    out.push_back(OrderedJson::array({box.lo(d), box.hi(d)}));
  }
  return out;
}

std::string DigestText(const proto::Digest& digest) {
  return fmt::format("{:016x}{:016x}", digest.b(), digest.a());
}

OrderedJson RankJson(const proto::RankStatus& rank) {
  return {{"rank", rank.rank()},          {"agent", rank.agent()}, {"pid", rank.pid()},
          {"memory", rank.memory_mode()}, {"bytes", rank.bytes()}, {"waiting", rank.waiting()},
          {"dirty", rank.dirty()}};
}

OrderedJson ErrorBody(const Status& status) {
  return {{"code", std::string(CodeName(status.code()))},
          {"reason", std::string(ReasonName(status.reason()))},
          {"message", status.message()}};
}

OrderedJson ReplicaJson(const proto::ReplicaStatus& replica) {
  OrderedJson ranks = OrderedJson::array();
  for (const auto& rank : replica.ranks()) ranks.push_back(RankJson(rank));
  OrderedJson out = {{"job", replica.job()},
                     {"replica", replica.replica()},
                     {"state", replica.state()},
                     {"layout", replica.layout()},
                     {"live_version", replica.live_version()},
                     {"rank_count", replica.rank_count()},
                     {"flip", replica.flip()},
                     {"proof", replica.proof()},
                     {"ranks", std::move(ranks)}};
  if (replica.has_error()) out["error"] = ErrorBody(rpc::FromProto(replica.error()));
  return out;
}

}  // namespace

OrderedJson ToJson(const proto::StatusReply& reply) {
  OrderedJson agents = OrderedJson::array();
  for (const auto& agent : reply.agents()) {
    OrderedJson endpoints = OrderedJson::array();
    for (const auto& endpoint : agent.endpoints()) endpoints.push_back(endpoint);
    agents.push_back({{"agent", agent.agent()},
                      {"host", agent.host()},
                      {"pid", agent.pid()},
                      {"endpoints", std::move(endpoints)},
                      {"rank_count", agent.rank_count()}});
  }
  OrderedJson channels = OrderedJson::array();
  for (const auto& channel : reply.channels()) {
    OrderedJson producers = OrderedJson::array();
    for (const auto& rank : channel.producer_ranks()) producers.push_back(RankJson(rank));
    OrderedJson replicas = OrderedJson::array();
    for (const auto& replica : channel.replicas()) replicas.push_back(ReplicaJson(replica));
    channels.push_back({{"channel", channel.channel()},
                        {"epoch", channel.epoch()},
                        {"latest_version", channel.latest_version()},
                        {"tensors", channel.tensor_count()},
                        {"bytes", channel.bytes()},
                        {"producer_job", channel.producer_job()},
                        {"producer_rank_count", channel.producer_rank_count()},
                        {"producer_ranks", std::move(producers)},
                        {"replicas", std::move(replicas)}});
  }
  OrderedJson sessions = OrderedJson::array();
  for (const auto& session : reply.sessions()) {
    OrderedJson item = {{"session", session.session()},       {"channel", session.channel()},
                        {"target_job", session.target_job()}, {"replica", session.replica()},
                        {"version", session.version()},       {"state", session.state()},
                        {"seconds", session.seconds()},       {"bytes", session.bytes()}};
    if (session.has_error()) item["error"] = ErrorBody(rpc::FromProto(session.error()));
    sessions.push_back(std::move(item));
  }
  return {{"daemon", reply.daemon()},
          {"uptime_seconds", reply.uptime_seconds()},
          {"agents", std::move(agents)},
          {"channels", std::move(channels)},
          {"sessions", std::move(sessions)}};
}

OrderedJson ToJson(const proto::VersionsReply& reply) {
  OrderedJson versions = OrderedJson::array();
  for (const auto& version : reply.versions()) {
    OrderedJson live = OrderedJson::array();
    for (const auto& name : version.live_at()) live.push_back(name);
    versions.push_back({{"channel", version.channel()},
                        {"version", version.version()},
                        {"state", version.state()},
                        {"snapshot", version.snapshot()},
                        {"published_ranks", version.published_ranks()},
                        {"rank_count", version.rank_count()},
                        {"live_at", std::move(live)},
                        {"age_seconds", version.age_seconds()}});
  }
  return {{"versions", std::move(versions)}};
}

OrderedJson ToJson(const proto::ExplainReply& reply) {
  OrderedJson shape = OrderedJson::array();
  for (const std::uint64_t size : reply.shape()) shape.push_back(size);
  OrderedJson holders = OrderedJson::array();
  for (const auto& holder : reply.holders()) {
    OrderedJson boxes = OrderedJson::array();
    for (const auto& box : holder.boxes()) boxes.push_back(BoxJson(box));
    holders.push_back({{"job", holder.job()},
                       {"replica", holder.replica()},
                       {"rank", holder.rank()},
                       {"boxes", std::move(boxes)}});
  }
  OrderedJson routes = OrderedJson::array();
  for (const auto& route : reply.routes()) {
    routes.push_back({{"source", route.source_rank()},
                      {"target", route.target_rank()},
                      {"target_job", route.target_job()},
                      {"replica", route.replica()},
                      {"box", BoxJson(route.box())},
                      {"bytes", route.bytes()}});
  }
  OrderedJson out = {{"channel", reply.channel()},
                     {"dtype", reply.dtype()},
                     {"shape", std::move(shape)},
                     {"holders", std::move(holders)},
                     {"routes", std::move(routes)}};
  if (!reply.why_no_routes().empty()) out["why_no_routes"] = reply.why_no_routes();
  return out;
}

OrderedJson ToJson(const proto::WhoIsMissingReply& reply) {
  OrderedJson missing = OrderedJson::array();
  for (const auto& item : reply.missing()) {
    missing.push_back({{"what", item.what()},
                       {"who", item.who()},
                       {"waiting_seconds", item.waiting_seconds()},
                       {"remedy", item.remedy()}});
  }
  return {{"missing", std::move(missing)}};
}

OrderedJson ToJson(const proto::VerifyReply& reply) {
  OrderedJson faults = OrderedJson::array();
  for (const auto& fault : reply.faults()) {
    faults.push_back({{"tensor", fault.tensor()},
                      {"box", BoxJson(fault.box())},
                      {"holder", fault.holder()},
                      {"against", fault.against()},
                      {"message", fault.message()}});
  }
  OrderedJson tensors = OrderedJson::object();
  for (const auto& tensor : reply.tensors()) tensors[tensor.tensor()] = DigestText(tensor.digest());
  return {{"equal", reply.equal()},      {"channel", reply.channel()},
          {"version", reply.version()},  {"tensors", reply.tensor_count()},
          {"bytes", reply.bytes()},      {"holders", reply.holder_count()},
          {"faults", std::move(faults)}, {"digests", std::move(tensors)}};
}

OrderedJson ToTraceJson(const proto::TraceReply& reply) {
  OrderedJson events = OrderedJson::array();
  std::map<std::string, int> tracks;
  for (const auto& event : reply.events()) {
    const auto [track, fresh] =
        tracks.try_emplace(event.track(), static_cast<int>(tracks.size()) + 1);
    if (fresh) {
      events.push_back({{"name", "thread_name"},
                        {"ph", "M"},
                        {"pid", 1},
                        {"tid", track->second},
                        {"args", {{"name", event.track()}}}});
    }
    events.push_back(
        {{"name", event.name()},
         {"ph", "X"},
         {"pid", 1},
         {"tid", track->second},
         {"ts", static_cast<double>(event.begin_ns()) / 1e3},
         {"dur", static_cast<double>(event.end_ns() - event.begin_ns()) / 1e3},
         {"args",
          {{"session", event.session()}, {"bytes", event.bytes()}, {"detail", event.detail()}}}});
  }
  return {{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}};
}

OrderedJson ErrorJson(const Status& status) {
  return {{"error", ErrorBody(status)}};
}

}  // namespace tensorbus::cli
