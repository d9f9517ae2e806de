#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "agent/piece_work.h"
#include "agent/rank.h"
#include "proto/tensorbus.pb.h"

namespace tensorbus::agent {

using TensorDigestList = google::protobuf::RepeatedPtrField<proto::TensorDigest>;

/// Adds one entry per piece; aliases that hold the same bytes are told once.
void AddTensorDigests(const PieceIndex& pieces, const std::vector<DigestSum>& sums,
                      TensorDigestList* out);

/// Digests what the rank's memory holds now: the boxes asked for, or with none every piece's own.
/// A box may span pieces; its byte count says how much of it the rank holds. `done` runs on the
/// executor.
///
/// Errors: ForeignMemory's; kInvalidArgument for a box that is none; kNotFound for a tensor the
/// rank does not hold.
void AnswerDigestQuery(const PieceWork& work, const Rank& rank, const proto::DigestQuery& query,
                       std::function<void(Result<TensorDigestList>)> done);

}  // namespace tensorbus::agent
