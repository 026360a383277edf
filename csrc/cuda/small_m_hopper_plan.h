// How gemm_small_m_hopper cuts a problem into blocks: a host function that owns its defaults.
//
// A block is three groups of four warps. A group has 128 rows of B, a tile of its scales; the three
// stand beside each other along n, or split the block's k. The blocks of a cluster split k as well.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../nvfp4.h"

namespace nvfp4::cuda {

constexpr int kHopperGroups = 3;
constexpr int kHopperChunk = 256;  // elements of k that a group takes at a time
constexpr int kHopperMaxCluster = 8;
constexpr uint32_t kHopperShared = 227 * 1024;    // of a block
constexpr uint32_t kHopperStageBytes = 32 * 144;  // B: a warp's rows of a chunk, and scales

// Rows of A that a block takes. More of them are slices, each of which reads B.
constexpr int kHopperSlice = 32;
constexpr int64_t hopper_slices(int64_t m) { return (m + kHopperSlice - 1) / kHopperSlice; }

constexpr int hopper_tiles(int64_t m) { return m <= 8 ? 1 : m <= 16 ? 2 : 4; }

// Shared memory by eights of rows of A: chunks of A, and a warp's stages of B.
template <int kTiles>
struct HopperRing {
  static constexpr int kSlots = kTiles == 1 ? 8 : 4;
  static constexpr int kStages = 2;
};

// FP32 sums that a block receives at most: a block's rows, or a tile from each group; the shares of
// a cluster's blocks may be rounded up.
constexpr uint32_t hopper_sums_bytes(int m) {
  return 4u * static_cast<uint32_t>(m) * kHopperGroups * (kTileRows + kHopperMaxCluster - 1);
}

struct HopperDevice {
  int resident[kHopperMaxCluster + 1];  // blocks at once, in clusters of c; 0: none
};

struct HopperPlan {
  int row_groups = 1;  // groups beside each other along n: 1 or all
  int cluster = 1;
};

constexpr int64_t hopper_blocks(int64_t n, const HopperPlan& p) {
  const int64_t rows = int64_t{kTileRows} * p.row_groups;
  return (n + rows - 1) / rows * p.cluster;
}

// Rows of B whose sums a block of the cluster adds up.
constexpr int hopper_share(const HopperPlan& p) {
  return (kTileRows * p.row_groups + p.cluster - 1) / p.cluster;
}

// Chunks that a group multiplies one after the other, all waves of blocks together.
constexpr int64_t hopper_steps(int64_t n, int64_t k, const HopperPlan& p, int64_t resident) {
  const int64_t chunks = (k + kHopperChunk - 1) / kHopperChunk;
  const int64_t own = (chunks + p.cluster - 1) / p.cluster, k_groups = kHopperGroups / p.row_groups;
  return (hopper_blocks(n, p) + resident - 1) / resident * ((own + k_groups - 1) / k_groups);
}

// Whether the kernel is worth it: measured, it is where its groups of warps are busy for most of
// its steps (4096 x 14336, where they are for 0.65 of them, is 3 to 24 % faster here), or where
// there are few anyway. gemm_small_m cuts finer.
constexpr bool hopper_pays(int64_t n, int64_t k, int sm_count) {
  int64_t steps = 0;
  for (const int row_groups : {1, kHopperGroups}) {
    for (int cluster = 1; cluster <= kHopperMaxCluster; ++cluster) {
      // Clusters leave some SMs of the GPU's groups out.
      const int64_t resident = cluster == 1 ? sm_count : int64_t{sm_count} * 9 / 10;
      if (resident < cluster) continue;
      const HopperPlan p{row_groups, cluster};
      const int64_t more_waves = (hopper_blocks(n, p) - 1) / resident;  // two steps each, about
      const int64_t found = hopper_steps(n, k, p, resident) + 2 * more_waves;
      if (steps == 0 || found < steps) steps = found;
    }
  }
  const int64_t tiles = (n + kTileRows - 1) / kTileRows;
  const int64_t chunks = (k + kHopperChunk - 1) / kHopperChunk;
  return steps <= 2 || 10 * tiles * chunks >= 6 * steps * sm_count * kHopperGroups;
}

// Whether slices are worth it: measured, they are up to 2.2 times as fast as gemm_mid_m as long as
// all of them run at once with their k split over whole clusters, and soon slower beyond.
constexpr bool hopper_slices_pay(int64_t m, int64_t n, int sm_count) {
  const int64_t tiles = (n + kTileRows - 1) / kTileRows, slices = hopper_slices(m);
  return slices <= 1 || slices * tiles * kHopperMaxCluster <= sm_count;
}

inline HopperPlan plan_hopper(int64_t m, int64_t n, int64_t k, const HopperDevice& device) {
  // In microseconds, about: a group's chunk of B, laying out a chunk of A, a block's beginning and
  // end, one more block in a cluster.
  const double tiles = hopper_tiles(m);
  const double chunk_cost = 1.2 + 0.25 * std::min(tiles, 3.0), stage_cost = 0.03 * tiles;
  constexpr double kFixedCost = 2.5, kBlockCost = 0.05;
  const int64_t chunks = (k + kHopperChunk - 1) / kHopperChunk;
  HopperPlan best;
  double best_cost = 0;
  for (const int row_groups : {1, kHopperGroups}) {
    for (int cluster = 1; cluster <= kHopperMaxCluster; ++cluster) {
      const int64_t resident = device.resident[cluster];
      if (resident == 0 || (cluster > 1 && cluster > chunks)) continue;
      const HopperPlan p{row_groups, cluster};
      const int64_t own = (chunks + cluster - 1) / cluster, k_groups = kHopperGroups / row_groups;
      const int64_t steps = (own + k_groups - 1) / k_groups;
      const int64_t waves = (hopper_blocks(n, p) * hopper_slices(m) + resident - 1) / resident;
      const double cost = static_cast<double>(waves) * (static_cast<double>(steps) * chunk_cost +
                                                        static_cast<double>(own) * stage_cost +
                                                        kFixedCost + kBlockCost * cluster);
      if (best_cost == 0 || cost < best_cost) {
        best = p;
        best_cost = cost;
      }
    }
  }
  return best;
}

}  // namespace nvfp4::cuda
