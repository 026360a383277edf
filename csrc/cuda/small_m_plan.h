// How gemm_small_m cuts a problem into blocks: a host function that owns its defaults.
//
// A block has eight warps: `strips` of them side by side along n, 32 rows of B each, times
// `k_warps` along k. `cluster` blocks share one set of rows and split k between them; their sums
// meet in shared memory in a fixed order. Two blocks share an SM where the shared memory allows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../nvfp4.h"

namespace nvfp4::cuda {

constexpr int kSmallMWarps = 8;
constexpr int kSmallMThreads = kSmallMWarps * 32;
constexpr int kStripRows = 32;     // rows of B a warp multiplies
constexpr int kChunkK = 128;       // elements of k a warp takes at a time
constexpr int kMTileRows = 8;      // rows of A a tensor-core tile holds
constexpr int kMaxPackedWork = 8;  // m_tiles * k_warps: registers that hold packed A's next step
constexpr int kMaxCluster = 8;     // blocks: the portable limit
constexpr int kMinStages = 2, kMaxStages = 6;
// Per stage and thread: four rows' 16 bytes of codes and 16 bytes of scales.
constexpr size_t kWeightStageBytes = size_t{kSmallMThreads} * 5 * 16;

struct SmallMDevice {
  int sm_count;
  size_t shared_per_sm, shared_per_block;  // bytes; the latter with the opt-in
  int max_cluster;                         // 1 below compute capability 9.0
  // Blocks that can be resident at once in clusters of c, at two blocks an SM. 0: not known.
  int resident[kMaxCluster + 1];
};

struct SmallMPlan {
  int m_tiles = 0;  // 1, 2 or 4: rows of A, padded, over 8
  int strips = 0, k_warps = 0;
  int cluster = 1;
  int stages = 0;      // of the shared-memory pipeline
  int iterations = 0;  // steps of k_warps * kChunkK, per block
  int64_t blocks = 0;  // the grid
  size_t shared_bytes = 0;

  bool ok() const { return blocks > 0; }
};

constexpr int small_m_tiles(int64_t m) { return m <= 8 ? 1 : m <= 16 ? 2 : 4; }

// Bytes of A's 16-bit values for one step of a block.
constexpr size_t activation_stage_bytes(int m_tiles, int k_warps) {
  return size_t{2} * m_tiles * kMTileRows * k_warps * kChunkK;
}

// FP32 sums of the warps along k, then the block's tile with its rows 16 bytes apart from a
// multiple of the banks.
constexpr size_t reduction_bytes(int m_tiles, int strips, int k_warps) {
  return size_t{4} * kStripRows * m_tiles * kMTileRows * strips * (k_warps - 1);
}
constexpr int tile_pitch(int strips) { return strips * kStripRows + 4; }
constexpr size_t tile_bytes(int m_tiles, int strips) {
  return size_t{4} * m_tiles * kMTileRows * tile_pitch(strips);
}

// Not ok() where no choice fits the device's shared memory. packed_a: A is NVFP4 and is decoded
// into two buffers; else its values go through the pipeline.
inline SmallMPlan plan_small_m(int64_t m, int64_t n, int64_t k, bool packed_a,
                               const SmallMDevice& device) {
  constexpr double kReuse = 1.25;     // of a fair share of bandwidth that a lone block can use
  constexpr double kOverhead = 24e3;  // bytes a block could have read while it starts and ends
  constexpr double kL2Cost = 0.35;    // of a byte of A, which comes out of L2
  const int64_t chunks = (k + kChunkK - 1) / kChunkK;
  const int m_tiles = small_m_tiles(m);
  SmallMPlan best;
  double best_cost = 0;
  for (int per_sm = 2; per_sm >= 1; --per_sm) {
    const size_t budget = std::min(device.shared_per_block, device.shared_per_sm / per_sm - 1024);
    for (int strips = 4; strips >= 1; strips /= 2) {
      for (int cluster = 1; cluster <= std::min(device.max_cluster, kMaxCluster); ++cluster) {
        SmallMPlan p;
        p.m_tiles = m_tiles;
        p.strips = strips;
        p.k_warps = kSmallMWarps / strips;
        p.cluster = cluster;
        const int64_t span = int64_t{p.k_warps} * cluster;
        p.iterations = static_cast<int>((chunks + span - 1) / span);
        // A block of the cluster without work is no use.
        if (cluster > 1 && int64_t{p.iterations} * p.k_warps * (cluster - 1) >= chunks) continue;
        const size_t activations = activation_stage_bytes(m_tiles, p.k_warps);
        if (packed_a && m_tiles * p.k_warps > kMaxPackedWork) continue;
        const size_t fixed = packed_a ? 2 * activations : 0;
        const size_t stage = kWeightStageBytes + (packed_a ? 0 : activations);
        if (fixed + kMinStages * stage > budget) continue;
        p.stages = static_cast<int>(std::min<size_t>(kMaxStages, (budget - fixed) / stage));
        p.stages = std::max(kMinStages, std::min(p.stages, p.iterations + 1));
        p.shared_bytes =
            std::max(fixed + p.stages * stage,
                     reduction_bytes(m_tiles, strips, p.k_warps) + tile_bytes(m_tiles, strips));
        if (p.shared_bytes > budget) continue;
        const int64_t tile_rows = kStripRows * strips;
        // Strips interleave within a 128-row tile of scales: count whole tiles.
        const int64_t tiles = (n + kTileRows - 1) / kTileRows * (kTileRows / tile_rows);
        p.blocks = tiles * cluster;
        int64_t resident = int64_t{device.sm_count} * per_sm;
        if (device.resident[cluster] > 0) {
          resident = std::min<int64_t>(resident, device.resident[cluster] * per_sm / 2);
        }
        resident = std::max<int64_t>(resident, cluster);
        const double block_bytes =
            double{kChunkK} * p.iterations * p.k_warps *
                (tile_rows * (0.5 + 1.0 / kBlockSize) +
                 kL2Cost * m_tiles * kMTileRows * (packed_a ? 0.5625 : 2.0)) +
            kOverhead * (cluster > 1 ? 1.25 : 1.0);
        const int64_t waves = (p.blocks + resident - 1) / resident;
        const double cost =
            std::max(block_bytes * p.blocks / resident, block_bytes * waves / kReuse) *
            (2.0 / per_sm);
        if (!best.ok() || cost < best_cost) {
          best = p;
          best_cost = cost;
        }
      }
    }
    if (best.ok()) break;  // two blocks an SM wherever they fit
  }
  return best;
}

}  // namespace nvfp4::cuda
