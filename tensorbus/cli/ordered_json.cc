#include "tensorbus/cli/ordered_json.h"

namespace tensorbus::cli {

std::string Dump(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace tensorbus::cli
