#include "agent/tensor_digests.h"

#include <algorithm>
#include <fmt/format.h>

#include "agent/registered_place.h"
#include "tensorbus/rpc/convert.h"

namespace tensorbus::agent {
namespace {

void AddEntry(const std::string& tensor, const Box& box, const DigestSum& sum,
              TensorDigestList* out) {
  proto::TensorDigest& entry = *out->Add();
  entry.set_tensor(tensor);
  *entry.mutable_box() = rpc::ToProto(box);
  *entry.mutable_digest() = rpc::ToProto(sum);
}

}  // namespace

void AddTensorDigests(const PieceIndex& pieces, const std::vector<DigestSum>& sums,
                      TensorDigestList* out) {
  const Registration& registration = pieces.registration();
  for (std::uint32_t i = 0; i < registration.pieces.size(); ++i) {
    const Piece& piece = registration.pieces[i];
    const std::span<const std::uint32_t> siblings = pieces.PiecesOf(piece.tensor);
    const bool told = std::any_of(siblings.begin(), siblings.end(), [&](std::uint32_t other) {
      return other < i && registration.pieces[other].box == piece.box && sums[other] == sums[i];
    });
    if (!told) AddEntry(registration.tensors[piece.tensor].name, piece.box, sums[i], out);
  }
}

void AnswerDigestQuery(const PieceWork& work, const Rank& rank, const proto::DigestQuery& query,
                       std::function<void(Result<TensorDigestList>)> done) {
  const std::shared_ptr<const PieceIndex> pieces = rank.pieces;
  std::shared_ptr<const MemoryAccess> memory = rank.memory;
  if (query.snapshot_version() != 0) {
    const auto snapshot = rank.snapshots.find(Version{query.snapshot_version()});
    if (snapshot == rank.snapshots.end()) {
      return work.executor.Post([done = std::move(done),
                                 status = Status(Code::kNotFound,
                                                 fmt::format("{} keeps no snapshot of version {}",
                                                             rank.Name(), query.snapshot_version()),
                                                 Reason::kStaleVersion)] { done(status); });
    }
    memory = snapshot->second;
  }
  if (query.boxes().empty()) {
    return DigestPieces(
        work, pieces, memory,
        [pieces, done = std::move(done)](const Result<std::vector<DigestSum>>& sums) {
          if (!sums.ok()) return done(sums.status());
          TensorDigestList list;
          AddTensorDigests(*pieces, *sums, &list);
          done(std::move(list));
        });
  }
  auto blocks = std::make_shared<std::vector<PlacedBlock>>();
  auto owners = std::make_shared<std::vector<std::size_t>>();  // of each block: the box asked for
  auto asked = std::make_shared<std::vector<std::pair<std::string, Box>>>();
  Status failure;
  for (const proto::TensorDigest& want : query.boxes()) {
    const Result<Box> box = rpc::FromProto(want.box());
    const std::int64_t tensor = pieces->TensorIndex(want.tensor());
    if (!box.ok()) {
      failure = box.status();
    } else if (tensor < 0) {
      failure = Status(Code::kNotFound, fmt::format("{} holds no {}", rank.Name(), want.tensor()),
                       Reason::kUnknownTensor);
    }
    if (!failure.ok()) break;
    std::vector<Box> counted;  // an alias of a counted box is not counted again
    for (const std::uint32_t number : pieces->PiecesOf(static_cast<std::uint32_t>(tensor))) {
      const Box& held = pieces->registration().pieces[number].box;
      if (std::find(counted.begin(), counted.end(), held) != counted.end()) continue;
      counted.push_back(held);
      const std::optional<Box> common =
          held.rank() == box->rank() ? Intersect(held, *box) : std::nullopt;
      if (!common.has_value()) continue;
      blocks->push_back(RegisteredPlace(pieces->registration(), number, *common,
                                        pieces->KeyOf(static_cast<std::uint32_t>(tensor))));
      owners->push_back(asked->size());
    }
    asked->emplace_back(want.tensor(), *box);
  }
  if (!failure.ok()) {
    return work.executor.Post([failure, done = std::move(done)] { done(failure); });
  }
  DigestBlocks(work, blocks, memory,
               [owners, asked, done = std::move(done)](const Result<std::vector<DigestSum>>& read) {
                 if (!read.ok()) return done(read.status());
                 const std::vector<DigestSum>& sums = *read;
                 std::vector<DigestSum> totals(asked->size());
                 for (std::size_t i = 0; i < sums.size(); ++i) totals[(*owners)[i]] += sums[i];
                 TensorDigestList list;
                 for (std::size_t i = 0; i < totals.size(); ++i) {
                   AddEntry((*asked)[i].first, (*asked)[i].second, totals[i], &list);
                 }
                 done(std::move(list));
               });
}

}  // namespace tensorbus::agent
