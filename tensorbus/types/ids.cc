#include "tensorbus/types/ids.h"

#include <fmt/format.h>

namespace tensorbus {

std::string RankIdentity::ToString() const {
  if (role == Role::kProducer)
    return fmt::format("{}/{} rank {} of {}", channel, job, rank, rank_count);
  return fmt::format("{}/{} replica {} rank {} of {}", channel, job, replica, rank, rank_count);
}

}  // namespace tensorbus
