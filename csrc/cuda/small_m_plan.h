// How gemm_small_m cuts a problem into blocks: a host function that owns its defaults.
//
// A block is `strips` warps side by side along n, 32 rows of B each, times `k_warps` along k.
// `cluster` blocks share one set of rows and split k between them; their sums meet in shared memory
// in a fixed order. One block a multiprocessor: the loop is bound by instructions as much as by
// memory, so what counts is how evenly the warps' chunks of k spread over the GPU, and how little
// time goes by before and after the loop.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../nvfp4.h"

namespace nvfp4::cuda {

constexpr int kMaxSmallMWarps = 16;
constexpr int kMaxSmallMThreads = kMaxSmallMWarps * 32;
constexpr int kStripRows = 32;  // rows of B a warp multiplies
constexpr int kTileStrips = kTileRows / kStripRows;
constexpr int kChunkK = 128;                  // elements of k a warp takes at a time
constexpr int kMTileRows = 8;                 // rows of A a tensor-core tile holds
constexpr int kSlotBytes = 512;               // 16 bytes of A for each lane
constexpr int kMaxCluster = 8;                // blocks: the portable limit
constexpr int kStages = 3;                    // of the pipeline that brings B
constexpr size_t kThreadStageBytes = 5 * 16;  // of a stage: four rows' codes, and scales

struct SmallMDevice {
  int sm_count;
  size_t shared_per_block;  // bytes, with the opt-in
  int max_cluster;          // 1 below compute capability 9.0
  // Blocks that can be resident at once in clusters of c, at one block an SM. 0: not known.
  int resident[kMaxCluster + 1];
};

struct SmallMPlan {
  int m_tiles = 0;  // 1, 2 or 4: rows of A, padded, over 8
  int strips = 0, k_warps = 0;
  int cluster = 1;
  int chunks = 0;       // of k, a block
  int segment = 0;      // chunks of A in shared memory at a time: all, or a multiple of k_warps
  int64_t blocks = 0;   // the grid
  size_t a_offset = 0;  // of A in shared memory: behind the sums, or where they will be
  size_t shared_bytes = 0;

  bool ok() const { return blocks > 0; }
  int threads() const { return strips * k_warps * 32; }
};

constexpr int small_m_tiles(int64_t m) { return m <= 8 ? 1 : m <= 16 ? 2 : 4; }

// Bytes of A's 16-bit values for one chunk.
constexpr size_t chunk_bytes(int m_tiles) { return size_t{2} * m_tiles * kMTileRows * kChunkK; }

// Outputs a block of the cluster adds up.
constexpr int64_t share_of(int64_t m, int strips, int cluster) {
  return (m * strips * kStripRows + cluster - 1) / cluster;
}

// FP32 sums that a block receives: one set from every warp along k in the cluster.
inline size_t sums_bytes(int64_t m, int strips, int k_warps, int cluster) {
  return static_cast<size_t>(round_up(4 * share_of(m, strips, cluster) * k_warps * cluster, 16));
}

// Lays out the shared memory of a plan that has all but that; false where it doesn't fit.
inline bool fit_shared(int64_t m, size_t limit, SmallMPlan& p) {
  const size_t sums = sums_bytes(m, p.strips, p.k_warps, p.cluster);
  const size_t pipeline = kStages * kThreadStageBytes * p.threads(), chunk = chunk_bytes(p.m_tiles);
  if (pipeline >= limit || sums > limit) return false;
  const int64_t fit = static_cast<int64_t>((limit - pipeline) / chunk);
  p.segment = static_cast<int>(fit >= p.chunks ? p.chunks : fit / p.k_warps * p.k_warps);
  if (p.chunks > 0 && p.segment < 1) return false;
  const size_t rest = pipeline + p.segment * chunk;
  // Sums apart save a barrier.
  p.a_offset = sums + rest <= limit ? sums : 0;
  p.shared_bytes = std::max(p.a_offset + rest, sums);
  return true;
}

// Not ok() where no choice fits the device's shared memory.
inline SmallMPlan plan_small_m(int64_t m, int64_t n, int64_t k, const SmallMDevice& device) {
  // Cycles, fitted to 2,178 timings of plans on an H200: the plan of least cost is on average 1.6 %
  // slower than the fastest one timed. A scheduler's for a chunk of a warp, and a lone warp's; a
  // segment, and a batch of A's loads by a warp; a set of sums added by a thread.
  const int m_tiles = small_m_tiles(m);
  const double chunk_cost = 370.0 + 170.0 * m_tiles;
  constexpr double kLatency = 900.0, kSegmentCost = 2500.0, kBatchCost = 1200.0, kSetCost = 140.0;
  constexpr int64_t kBatch = 8;  // pairs of rows
  const int64_t chunks = (k + kChunkK - 1) / kChunkK;
  const int64_t all_strips = (n + kTileRows - 1) / kTileRows * kTileStrips;
  SmallMPlan best;
  double best_cost = 0;
  for (int cluster = 1; cluster <= std::min(device.max_cluster, kMaxCluster); ++cluster) {
    for (int strips = 1; strips <= kMaxSmallMWarps; ++strips) {
      for (int k_warps = kMaxSmallMWarps / strips; k_warps >= 1; --k_warps) {
        SmallMPlan p;
        p.m_tiles = m_tiles;
        p.strips = strips;
        p.k_warps = k_warps;
        p.cluster = cluster;
        p.chunks = static_cast<int>((chunks + cluster - 1) / cluster);
        // A block of the cluster without work is no use.
        if (cluster > 1 && int64_t{p.chunks} * (cluster - 1) >= chunks) continue;
        if (k_warps > 1 && k_warps > p.chunks) continue;
        if (!fit_shared(m, device.shared_per_block, p)) continue;
        const int segments = p.chunks > 0 ? (p.chunks + p.segment - 1) / p.segment : 1;
        p.blocks = (all_strips + strips - 1) / strips * cluster;
        int64_t resident = device.sm_count;
        if (device.resident[cluster] > 0) {
          resident = std::min<int64_t>(resident, device.resident[cluster]);
        }
        resident = std::max<int64_t>(resident, cluster);
        const int64_t waves = (p.blocks + resident - 1) / resident;
        const int steps = (p.chunks + k_warps - 1) / k_warps;
        const int warps = strips * k_warps;
        const int64_t batches = (p.chunks * ((m + 1) / 2) + warps * kBatch - 1) / (warps * kBatch);
        const int64_t sums = (share_of(m, strips, cluster) + p.threads() - 1) / p.threads();
        const double block = std::max(chunk_cost * ((warps + 3) / 4), kLatency) * steps +
                             kSegmentCost * segments + kBatchCost * batches +
                             kSetCost * (sums * k_warps * cluster);
        const double cost = block * waves;
        if (!best.ok() || cost < best_cost) {
          best = p;
          best_cost = cost;
        }
      }
    }
  }
  return best;
}

}  // namespace nvfp4::cuda
