// How gemm_small_m_hopper cuts a problem into blocks: a host function that owns its defaults.
//
// A block is twelve warps of 32 rows of B each, a strip, a quarter of a tile of its scales. They
// stand beside each other along n, or fewer of them do and the rest splits the block's k. The
// blocks of a cluster split k as well.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../nvfp4.h"

namespace nvfp4::cuda {

constexpr int kHopperWarps = 12;  // that multiply
constexpr int kHopperStripRows = 32;
constexpr int kHopperTileStrips = kTileRows / kHopperStripRows;
constexpr int kHopperChunk = 256;  // elements of k that a warp takes at a time
constexpr int kHopperMaxCluster = 8;
constexpr uint32_t kHopperShared = 227 * 1024;    // of a block
constexpr uint32_t kHopperStageBytes = 32 * 144;  // B: a warp's rows of a chunk, and scales

// Rows of A that a block takes. More of them are slices, each of which reads B.
constexpr int kHopperSlice = 32;
constexpr int64_t hopper_slices(int64_t m) { return (m + kHopperSlice - 1) / kHopperSlice; }

constexpr int hopper_tiles(int64_t m) { return m <= 8 ? 1 : m <= 16 ? 2 : 4; }

// Strips beside each other in a block, at least: a warpgroup's product takes four, and as many
// chunks of A as there are warps along k must fit.
constexpr int hopper_least_strips(int tiles) { return tiles; }
constexpr int kHopperStrips[] = {1, 2, 4, kHopperWarps};
constexpr int hopper_k_groups(int strips) { return kHopperWarps / strips; }

// Chunks of A in shared memory, a power of two: not more than it takes, since what is loaded early
// holds B up.
constexpr int hopper_slot_shift(int tiles, int strips) {
  int shift = tiles == 1 ? 3 : 2;
  while (hopper_k_groups(strips) > 1 << shift) ++shift;
  return shift;
}

// Shared memory by eights of rows of A: chunks of A, and a warp's stages of B.
template <int kTiles>
struct HopperRing {
  static constexpr int kSlots = 1 << hopper_slot_shift(kTiles, hopper_least_strips(kTiles));
  static constexpr int kStages = 2;
};

// FP32 sums that a block receives at most: those of its warps' rows; the shares of a cluster's
// blocks may be rounded up.
constexpr uint32_t hopper_sums_bytes(int tiles) {
  const int rounded = hopper_k_groups(hopper_least_strips(tiles)) * (kHopperMaxCluster - 1);
  return 4u * 8u * static_cast<uint32_t>(tiles * (kHopperWarps * kHopperStripRows + rounded));
}

struct HopperDevice {
  int resident[kHopperMaxCluster + 1];  // blocks at once, in clusters of c; 0: none
};

struct HopperPlan {
  int strips = kHopperTileStrips;  // beside each other along n, of kHopperStrips
  int cluster = 1;
};

constexpr int64_t hopper_blocks(int64_t n, const HopperPlan& p) {
  const int64_t strips = (n + kTileRows - 1) / kTileRows * kHopperTileStrips;
  return (strips + p.strips - 1) / p.strips * p.cluster;
}

// Rows of B whose sums a block of the cluster adds up.
constexpr int hopper_share(const HopperPlan& p) {
  return (kHopperStripRows * p.strips + p.cluster - 1) / p.cluster;
}

// Chunks that a warp multiplies one after the other, all waves of blocks together.
constexpr int64_t hopper_steps(int64_t n, int64_t k, const HopperPlan& p, int64_t resident) {
  const int64_t chunks = (k + kHopperChunk - 1) / kHopperChunk,
                k_groups = hopper_k_groups(p.strips);
  const int64_t own = (chunks + p.cluster - 1) / p.cluster;
  return (hopper_blocks(n, p) + resident - 1) / resident * ((own + k_groups - 1) / k_groups);
}

// Whether the kernel is worth it: measured, it is where its groups of warps are busy for most of
// its steps (4096 x 14336, where they are for 0.65 of them, is 3 to 24 % faster here), or where
// there are few anyway. gemm_small_m cuts finer. Measured with whole tiles in a block.
constexpr bool hopper_pays(int64_t n, int64_t k, int sm_count) {
  int64_t steps = 0;
  for (const int strips : {kHopperTileStrips, kHopperWarps}) {
    for (int cluster = 1; cluster <= kHopperMaxCluster; ++cluster) {
      // Clusters leave some SMs of the GPU's groups out.
      const int64_t resident = cluster == 1 ? sm_count : int64_t{sm_count} * 9 / 10;
      if (resident < cluster) continue;
      const HopperPlan p{strips, cluster};
      const int64_t more_waves = (hopper_blocks(n, p) - 1) / resident;  // two steps each, about
      const int64_t found = hopper_steps(n, k, p, resident) + 2 * more_waves;
      if (steps == 0 || found < steps) steps = found;
    }
  }
  const int64_t tiles = (n + kTileRows - 1) / kTileRows;
  const int64_t chunks = (k + kHopperChunk - 1) / kHopperChunk;
  return steps <= 2 ||
         10 * tiles * chunks >= 6 * steps * sm_count * hopper_k_groups(kHopperTileStrips);
}

// Whether slices are worth it: measured, they are up to 2.2 times as fast as gemm_mid_m as long as
// all of them run at once with their k split over whole clusters, and soon slower beyond.
constexpr bool hopper_slices_pay(int64_t m, int64_t n, int sm_count) {
  const int64_t tiles = (n + kTileRows - 1) / kTileRows, slices = hopper_slices(m);
  return slices <= 1 || slices * tiles * kHopperMaxCluster <= sm_count;
}

// Microseconds, about, fitted to 2,388 timings of plans of 18 shapes on an H200: the plan of least
// cost is on average 0.5 % slower than the fastest one timed, at most 13 % (2048 x 2048).
struct HopperCosts {
  double chunk;        // a warp's chunk of B, beside the others'
  double stage, row;   // a chunk of A laid out, or at least that; each row of it
  double layout;       // what of it nothing hides
  double block, rank;  // a block's beginning and end; one more block in a cluster
};

constexpr HopperCosts hopper_costs(int tiles, bool packed) {
  if (packed) {
    return tiles == 1   ? HopperCosts{1.42, 0.17, 0, 0.09, 2.49, 0.04}
           : tiles == 2 ? HopperCosts{1.86, 0.42, 0, 0.01, 2.94, 0.05}
                        : HopperCosts{2.17, 0.11, 0, 0.05, 4.40, 0.02};
  }
  return tiles == 1   ? HopperCosts{1.61, 0.24, 0.02, 0.02, 2.61, 0.10}
         : tiles == 2 ? HopperCosts{1.64, 0.50, 0, 0.20, 3.29, 0.05}
                      : HopperCosts{2.07, 0.10, 0, 0.70, 4.11, 0.02};
}

// packed: A is.
inline HopperPlan plan_hopper(int64_t m, int64_t n, int64_t k, bool packed,
                              const HopperDevice& device) {
  const int tiles = hopper_tiles(m);
  const HopperCosts costs = hopper_costs(tiles, packed);
  const double stage = costs.stage + costs.row * static_cast<double>(m);
  const int64_t chunks = (k + kHopperChunk - 1) / kHopperChunk;
  HopperPlan best;
  double best_cost = 0;
  for (const int strips : kHopperStrips) {
    if (strips < hopper_least_strips(tiles)) continue;
    for (int cluster = 1; cluster <= kHopperMaxCluster; ++cluster) {
      const int64_t resident = device.resident[cluster];
      if (resident == 0 || (cluster > 1 && cluster > chunks)) continue;
      const HopperPlan p{strips, cluster};
      const int64_t own = (chunks + cluster - 1) / cluster, k_groups = hopper_k_groups(strips);
      const int64_t steps = (own + k_groups - 1) / k_groups;
      const int64_t waves = (hopper_blocks(n, p) * hopper_slices(m) + resident - 1) / resident;
      const double loop =
          std::max(static_cast<double>(steps) * costs.chunk, static_cast<double>(own) * stage);
      const double cost =
          static_cast<double>(waves) *
          (loop + static_cast<double>(own) * costs.layout + costs.block + costs.rank * cluster);
      if (best_cost == 0 || cost < best_cost) {
        best = p;
        best_cost = cost;
      }
    }
  }
  return best;
}

}  // namespace nvfp4::cuda
