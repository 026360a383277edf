// csrc/cuda/small_m_plan.h and explicit_tile.h on the host: answers test_matrix.py, a line a
// request.
//
//   default|uncapped|explicit SM_COUNT SHARED_PER_BLOCK MAX_CLUSTER M N K [STRIPS K_WARPS CLUSTER]
//
// The answer is `plan STRIPS K_WARPS CLUSTER CHUNKS SEGMENT BLOCKS BYTES`, `none`, or
// `refused MESSAGE`. "uncapped" is the negative control: shared memory is said to be endless.
#include "cuda/explicit_tile.h"

#include <iostream>
#include <string>

using namespace nvfp4;
using namespace nvfp4::cuda;

int main() {
  std::string how;
  while (std::cin >> how) {
    SmallMDevice device = {};
    int64_t m, n, k;
    std::cin >> device.sm_count >> device.shared_per_block >> device.max_cluster >> m >> n >> k;
    if (how == "uncapped") device.shared_per_block = size_t{1} << 40;
    try {
      SmallMPlan p;
      if (how == "explicit") {
        ExplicitTile tile;
        std::cin >> tile.strips >> tile.k_warps >> tile.cluster;
        p = explicit_small_m(m, n, k, tile, device);
      } else {
        p = plan_small_m(m, n, k, device);
      }
      if (!p.ok()) {
        std::cout << "none" << std::endl;
      } else {
        std::cout << "plan " << p.strips << ' ' << p.k_warps << ' ' << p.cluster << ' ' << p.chunks
                  << ' ' << p.segment << ' ' << p.blocks << ' ' << p.shared_bytes << std::endl;
      }
    } catch (const std::invalid_argument& refusal) {
      std::cout << "refused " << refusal.what() << std::endl;
    }
  }
}
