// What of an update that sums gradients over ranks is the same in every run.
#pragma once
#include "operators/optimizer_rules.h"

namespace dlsys {

struct AllReduceUpdateOptions {
  rule::UpdateOptions update;
  int64_t ranks;   // the communicator over whose ranks gradients are summed
  int32_t shares;  // each sums a share of them for all, rather than all by itself
};

}  // namespace dlsys
