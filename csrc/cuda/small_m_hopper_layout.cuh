// gemm_small_m_hopper's blocks: what they are told and what they have in shared memory.
#pragma once

#include "common.cuh"
#include "small_m_hopper_plan.h"

namespace nvfp4::cuda {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kRowBytes = kHopperChunk / 2;  // of a row of B, a chunk
constexpr int kChunkTiles = kHopperChunk / kBlockSize / kTileCols;
constexpr int kLaneK = kHopperChunk / 4;  // consecutive k of a lane
constexpr int kRowsPerLane = 4;           // j
constexpr int kStripRows = kHopperStripRows;
constexpr int kStagerWarps = 4, kSchedulers = 4;
// Cycles from the copies of one warp's first stage to those of the next in its scheduler, and to
// those of its second stage.
constexpr uint32_t kTurn = 600, kHeldBack = 1800;
constexpr int kThreads = (kHopperWarps + kStagerWarps) * kWarpSize;
constexpr uint32_t kCodesBytes = kStripRows * kRowBytes;  // of a warp's stage
constexpr uint32_t kScalesBytes = kChunkTiles * 8 * kVectorBytes;
constexpr uint32_t kStageBytes = kCodesBytes + kScalesBytes;
constexpr uint32_t kFragmentBytes = kWarpSize * kVectorBytes;  // A: eight rows, eight k a lane
constexpr uint32_t kAtomBytes = 1024;                          // A for wgmma: eight rows, 64 k

static_assert(kStripRows == 8 * kRowsPerLane);

// From 32 rows of A on a warpgroup's product takes less of its warps' time than theirs one by one.
template <int kTiles>
constexpr bool kByGroup = kTiles == 4;
static_assert(kStageBytes == kHopperStageBytes);
static_assert(2 * kFragmentBytes == kAtomBytes);

// Quotients of what is below 8 times the rows of B that a block has, by as many or fewer.
constexpr int kShareShift = 22;

struct Args {
  SmallMParams gemm;
  int strips;       // warps beside each other along n
  int strip_shift;  // log2 of that, or more than any warp has bits where it is all of them
  int k_groups;     // warps along k
  int slot_shift;   // log2 of the chunks of A in shared memory
  int span_shift;   // log2 of the rows beside each other that a block has: 8 of each strip, or 32
  int cluster;
  int chunks,
      longer;  // of k: a block has `chunks`, the first `longer` blocks of a cluster one more
  int pairs;   // t of which there are rows of A
  int share;   // rows of B whose sums a block adds up
  uint32_t per_share;  // 2^kShareShift / share, rounded up
  float unit;
  int m, k;
  int row_tiles, last_row;  // tiles of B's rows; the last row in the last of them
  int tiles_per_row;        // scale tiles along k
};

// t of a lane that has sums of any of m rows of A.
__device__ __forceinline__ int pairs_of(int m) { return min(4, (m + 1) / 2); }

template <int kTiles>
__device__ __forceinline__ int slot_shift(const Args& a) {
  return kTiles == 4 ? hopper_slot_shift(4, 4) : a.slot_shift;
}

// A block's rows of A: those of its row of the grid.
__device__ __forceinline__ Args slice_of(Args a) {
  const int begin = static_cast<int>(blockIdx.y) * kHopperSlice;
  a.m = min(a.m - begin, kHopperSlice);
  a.pairs = pairs_of(a.m);
  a.gemm.a_row_begin += begin;
  a.gemm.out = static_cast<char*>(a.gemm.out) +
               begin * a.gemm.n * (a.gemm.out_type == DType::kFloat32 ? 4 : 2);
  return a;
}

// The parts of shared memory, one behind the other.
template <int kTiles>
struct Layout {
  using Ring = HopperRing<kTiles>;
  static constexpr uint32_t kSlotBytes = 8 * kTiles * kFragmentBytes;  // a chunk of A
  static constexpr uint32_t kStages = 0;
  static constexpr uint32_t kSums = kStages + kHopperWarps * Ring::kStages * kStageBytes;
  static constexpr uint32_t kBarriers = kSums + hopper_sums_bytes(kTiles);
  static constexpr uint32_t kReceived = kBarriers + Ring::kSlots * 16;
  // From a multiple of an atom on, as all of it is; fewer where a plan has fewer.
  static constexpr uint32_t kSlots = (kReceived + 16 + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
  static constexpr uint32_t bytes(int slots) { return kSlots + slots * kSlotBytes + kAtomBytes; }
  static_assert(bytes(Ring::kSlots) <= kHopperShared);
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

}  // namespace
}  // namespace nvfp4::cuda
