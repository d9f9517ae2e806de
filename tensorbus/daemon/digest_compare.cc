#include "tensorbus/daemon/digest_compare.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>
#include <unordered_set>

#include "tensorbus/rpc/convert.h"

namespace tensorbus::daemon {

namespace {

/// The cells between the edges of all boxes that lie inside some box.
Result<std::vector<Box>> CutBoxes(const std::vector<const Box*>& boxes, const std::string& tensor) {
  const int rank = boxes.front()->rank();
  std::vector<std::vector<std::uint64_t>> edges(static_cast<std::size_t>(rank));
  std::size_t cells = 1;
  for (int d = 0; d < rank; ++d) {
    auto& cuts = edges[static_cast<std::size_t>(d)];
    for (const Box* box : boxes) {
      cuts.push_back((*box)[d].lo);
      cuts.push_back((*box)[d].hi);
    }
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    cells *= cuts.size() - 1;
    if (cells > kMaxAtomsOfTensor) {
      return Status(Code::kResourceExhausted,
                    fmt::format("the holders of {} cut it into more than {} parts", tensor,
                                kMaxAtomsOfTensor),
                    Reason::kUnsupported);
    }
  }
  std::vector<Box> out;
  for (std::size_t cell = 0; cell < cells; ++cell) {
    Box atom = *boxes.front();
    std::size_t rest = cell;
    for (int d = rank - 1; d >= 0; --d) {
      const auto& cuts = edges[static_cast<std::size_t>(d)];
      const std::size_t at = rest % (cuts.size() - 1);
      rest /= cuts.size() - 1;
      atom[d] = {.lo = cuts[at], .hi = cuts[at + 1]};
    }
    const bool held = std::any_of(boxes.begin(), boxes.end(),
                                  [&](const Box* box) { return box->Contains(atom); });
    if (held) out.push_back(atom);
  }
  return out;
}

/// The boxes of one rank of one tensor; none when it holds nothing.
const std::vector<Box>* BoxesOf(const JobLayout& layout, const JobLayout::Tensor& tensor,
                                std::uint32_t rank) {
  const Holding& holding = layout.HoldingOf(tensor);
  const auto found = std::lower_bound(
      holding.ranks.begin(), holding.ranks.end(), rank,
      [](const RankBoxes& boxes, std::uint32_t wanted) { return boxes.rank < wanted; });
  if (found == holding.ranks.end() || found->rank != rank) return nullptr;
  return &found->boxes;
}

}  // namespace

Result<DigestAtoms> MakeAtoms(const std::vector<DigestHolder>& holders) {
  DigestAtoms out;
  out.of_holder.resize(holders.size());
  std::set<const LayoutEntry*> layouts;
  std::unordered_set<std::string_view> seen;
  for (const DigestHolder& holder : holders) {
    if (!layouts.insert(holder.layout.get()).second) continue;
    for (const JobLayout::Tensor& tensor : holder.layout->layout.tensors) {
      if (seen.insert(tensor.spec.name).second) out.specs.push_back(tensor.spec);
    }
  }
  for (std::uint32_t t = 0; t < out.specs.size(); ++t) {
    std::vector<const std::vector<Box>*> shares(holders.size(), nullptr);
    std::vector<const Box*> boxes;
    for (std::size_t h = 0; h < holders.size(); ++h) {
      const LayoutEntry& entry = *holders[h].layout;
      const JobLayout::Tensor* const tensor = entry.index.Find(out.specs[t].name);
      if (tensor == nullptr) continue;
      shares[h] = BoxesOf(entry.layout, *tensor, holders[h].identity.rank);
      if (shares[h] == nullptr) continue;
      for (const Box& box : *shares[h]) boxes.push_back(&box);
    }
    if (boxes.empty()) continue;
    TB_ASSIGN_OR_RETURN(const std::vector<Box> atoms, CutBoxes(boxes, out.specs[t].name));
    for (const Box& atom : atoms) {
      const auto number = static_cast<std::uint32_t>(out.atoms.size());
      out.atoms.push_back({.tensor = t, .box = atom});
      for (std::size_t h = 0; h < holders.size(); ++h) {
        if (shares[h] == nullptr) continue;
        const bool held = std::any_of(shares[h]->begin(), shares[h]->end(),
                                      [&](const Box& box) { return box.Contains(atom); });
        if (held) out.of_holder[h].push_back(number);
      }
    }
  }
  return out;
}

void CompareDigests(const std::vector<DigestHolder>& holders, const DigestAtoms& atoms,
                    const std::vector<std::vector<DigestSum>>& digests, proto::VerifyReply* reply) {
  struct Seen {
    std::size_t holder;
    DigestSum sum;
  };
  std::vector<std::vector<Seen>> seen(atoms.atoms.size());
  std::uint64_t bytes = 0;
  for (std::size_t h = 0; h < holders.size(); ++h) {
    for (std::size_t i = 0; i < atoms.of_holder[h].size(); ++i) {
      seen[atoms.of_holder[h][i]].push_back({h, digests[h][i]});
      bytes += digests[h][i].bytes;
    }
  }
  std::vector<DigestSum> whole(atoms.specs.size());
  bool equal = true;
  for (std::size_t a = 0; a < seen.size(); ++a) {
    if (seen[a].empty()) continue;
    const Seen* reference = nullptr;
    std::size_t most = 0;
    for (const Seen& candidate : seen[a]) {
      if (holders[candidate.holder].identity.role == Role::kProducer) {
        reference = &candidate;
        break;
      }
      const auto same = static_cast<std::size_t>(
          std::count_if(seen[a].begin(), seen[a].end(),
                        [&](const Seen& other) { return other.sum == candidate.sum; }));
      if (same > most) {
        most = same;
        reference = &candidate;
      }
    }
    const DigestBox& atom = atoms.atoms[a];
    whole[atom.tensor] += reference->sum;
    for (const Seen& other : seen[a]) {
      if (other.sum == reference->sum) continue;
      equal = false;
      if (static_cast<std::size_t>(reply->faults_size()) >= kMaxListedFaults) continue;
      const std::string& tensor = atoms.specs[atom.tensor].name;
      proto::VerifyFault& fault = *reply->add_faults();
      fault.set_tensor(tensor);
      *fault.mutable_box() = rpc::ToProto(atom.box);
      fault.set_holder(holders[other.holder].identity.ToString());
      fault.set_against(holders[reference->holder].identity.ToString());
      fault.set_message(fmt::format("{} {} at {} differs from {}", tensor, atom.box.ToString(),
                                    fault.holder(), fault.against()));
    }
  }
  for (std::uint32_t t = 0; t < whole.size(); ++t) {
    if (whole[t].bytes != atoms.specs[t].bytes())
      continue;  // not all of it is held by anybody here
    proto::TensorDigest& out = *reply->add_tensors();
    out.set_tensor(atoms.specs[t].name);
    *out.mutable_box() = rpc::ToProto(Box::Whole(atoms.specs[t].shape));
    *out.mutable_digest() = rpc::ToProto(whole[t]);
  }
  reply->set_equal(equal);
  reply->set_tensor_count(atoms.specs.size());
  reply->set_bytes(bytes);
  reply->set_holder_count(static_cast<std::uint32_t>(holders.size()));
}

}  // namespace tensorbus::daemon
