// A tile that somebody chose, in the stead of a planner's default: it is obeyed, or refused with
// its arithmetic, and never altered. A default is capped until it fits and is never refused for it.
//
// Host code, no CUDA: tests/explicit_tile.cpp holds it to plan_small_m and plan_general.
#pragma once

#include "../check.h"
#include "../faults_for_tests.h"
#include "grouped_general_plan.h"
#include "small_m_plan.h"

namespace nvfp4::cuda {

// Refuses what doesn't fit: `parts` says how the bytes come about.
template <typename... Parts>
void check_shared(bool fits, const char* kernel, size_t bytes, size_t available,
                  const Parts&... parts) {
  NVFP4_CHECK(fits, kernel, ": the explicit tile needs ", concat(parts...), " = ", bytes,
              " bytes of shared memory a block, this GPU has ", available,
              ": take a smaller one, or leave it to the planner");
}

// plan_small_m's counterpart for a given tile. How much of A is in shared memory at a time follows
// from what is left, as it does there.
inline SmallMPlan explicit_small_m(int64_t m, int64_t n, int64_t k, const ExplicitTile& tile,
                                   const SmallMDevice& device) {
  constexpr const char* kKernel = "gemm_small_m";
  SmallMPlan p;
  p.m_tiles = small_m_tiles(m);
  p.strips = tile.strips;
  p.k_warps = tile.k_warps;
  p.cluster = tile.cluster;
  NVFP4_CHECK(p.strips >= 1 && p.k_warps >= 1 && p.strips * p.k_warps <= kMaxSmallMWarps, kKernel,
              ": the explicit tile has ", p.strips, " strips * ", p.k_warps,
              " warps along k = ", p.strips * p.k_warps, " warps, a block has 1 to ",
              kMaxSmallMWarps);
  NVFP4_CHECK(p.cluster >= 1 && p.cluster <= device.max_cluster, kKernel,
              ": cluster must be in [1, ", device.max_cluster, "] on this GPU, got ", p.cluster);
  const int64_t chunks = (k + kChunkK - 1) / kChunkK;
  p.chunks = static_cast<int>((chunks + p.cluster - 1) / p.cluster);
  const bool idle_block = p.cluster > 1 && int64_t{p.chunks} * (p.cluster - 1) >= chunks;
  const bool idle_warp = p.k_warps > 1 && p.k_warps > p.chunks;
  NVFP4_CHECK(!idle_block && !idle_warp, kKernel, ": k = ", k, " has ", chunks, " chunks of ",
              kChunkK, ", too few for cluster = ", p.cluster, " times k_warps = ", p.k_warps,
              ": some would have no work");
  const bool fits = fit_shared(m, device.shared_per_block, p);
  const size_t pipeline = kStages * kThreadStageBytes * static_cast<size_t>(p.threads());
  const size_t least = chunks > 0 ? static_cast<size_t>(p.k_warps) : 0;
  const size_t chunk = chunk_bytes(p.m_tiles);
  const size_t sums = sums_bytes(m, p.strips, p.k_warps, p.cluster);
  check_shared(fits, kKernel, std::max(pipeline + least * chunk, sums), device.shared_per_block,
               "max(", pipeline, " for B + ", least, " * ", chunk, " for A, ", sums, " for sums)");
  const int64_t strips = (n + kTileRows - 1) / kTileRows * kTileStrips;
  p.blocks = (strips + p.strips - 1) / p.strips * p.cluster;
  return p;
}

// plan_general's counterpart for a given number of stages.
inline GeneralPlan explicit_general(int stages, const GeneralDevice& device) {
  const bool fits = stages >= kLeastStages && general_bytes(stages) <= device.shared_per_block;
  check_shared(fits, "grouped_gemm", general_bytes(stages), device.shared_per_block,
               kGeneralFixedBytes, " + max(", stages, " (at least ", kLeastStages, ") * ",
               kGeneralStageBytes, ", ", kGeneralSumsBytes, " for sums)");
  return general_with(stages, device);
}

// The planner's own stages, unless a test says otherwise.
inline GeneralPlan choose_general(const GeneralDevice& device) {
  if (const int stages = explicit_tile.load(std::memory_order_relaxed).stages) {
    return explicit_general(stages, device);
  }
  if (has_fault(Fault::kPlannerUncapped)) return general_with(kUncappedStages, device);
  return plan_general(device);
}

}  // namespace nvfp4::cuda
