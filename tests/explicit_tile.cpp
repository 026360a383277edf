// The planners of csrc/cuda and explicit_tile.h on the host: answers test_matrix.py, a line a
// request.
//
//   small_m default|uncapped SM_COUNT SHARED_PER_BLOCK MAX_CLUSTER M N K
//   small_m explicit         SM_COUNT SHARED_PER_BLOCK MAX_CLUSTER M N K STRIPS K_WARPS CLUSTER
//   general default|uncapped SHARED_PER_BLOCK SHARED_PER_SM
//   general explicit         SHARED_PER_BLOCK SHARED_PER_SM STAGES
//
// The answer is `plan STRIPS K_WARPS CLUSTER CHUNKS SEGMENT BLOCKS BYTES` or
// `plan STAGES BLOCKS_PER_SM BYTES`, `none`, or `refused MESSAGE`. "uncapped" is the negative
// control: shared memory is said to be endless.
#include "cuda/explicit_tile.h"

#include <iostream>
#include <string>

using namespace nvfp4;
using namespace nvfp4::cuda;

namespace {

std::string small_m(const std::string& how) {
  SmallMDevice device = {};
  int64_t m, n, k;
  std::cin >> device.sm_count >> device.shared_per_block >> device.max_cluster >> m >> n >> k;
  if (how == "uncapped") device.shared_per_block = size_t{1} << 40;
  SmallMPlan p;
  if (how == "explicit") {
    ExplicitTile tile;
    std::cin >> tile.strips >> tile.k_warps >> tile.cluster;
    p = explicit_small_m(m, n, k, tile, device);
  } else {
    p = plan_small_m(m, n, k, device);
  }
  if (!p.ok()) return "none";
  return concat("plan ", p.strips, ' ', p.k_warps, ' ', p.cluster, ' ', p.chunks, ' ', p.segment,
                ' ', p.blocks, ' ', p.shared_bytes);
}

// Through the switches that the kernel's host code asks.
std::string general(const std::string& how) {
  GeneralDevice device = {};
  std::cin >> device.shared_per_block >> device.shared_per_sm;
  ExplicitTile tile;
  if (how == "explicit") std::cin >> tile.stages;
  explicit_tile = tile;
  active_fault = how == "uncapped" ? Fault::kPlannerUncapped : Fault::kNone;
  const GeneralPlan p = choose_general(device);
  return concat("plan ", p.stages, ' ', p.blocks_per_sm, ' ', p.shared_bytes);
}

}  // namespace

int main() {
  std::string kernel, how;
  while (std::cin >> kernel >> how) {
    try {
      std::cout << (kernel == "general" ? general(how) : small_m(how)) << std::endl;
    } catch (const std::invalid_argument& refusal) {
      std::cout << "refused " << refusal.what() << std::endl;
    }
  }
}
