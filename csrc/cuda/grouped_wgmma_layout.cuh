// grouped_wgmma's tiles: what lies where, and who has what.
#pragma once

#include <cstddef>

#include "common.cuh"
#include "grouped_gemm.h"
#include "grouped_shares.cuh"
#include "hopper.cuh"
#include "tensor_copy.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kStepK = 256;  // kBoxBytes of codes
constexpr int kStepBlocks = kStepK / kBlockSize, kStepTiles = kStepBlocks / kTileCols;
constexpr int kHalfK = 128;  // four lanes' 16 bytes of codes
constexpr int kStepHalves = kStepK / kHalfK;
constexpr int kBoxK = kBoxBytes / 2;  // of A's 16-bit values
constexpr int kBoxes = kStepK / kBoxK;
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kMultipliers = 2;     // warpgroups
constexpr int kThreads = (1 + kMultipliers) * kGroupThreads;
constexpr int kGroupRows = kTileRows;  // of weights, a warpgroup: one tile of scales
constexpr int kTileN = kMultipliers * kGroupRows;
constexpr int kRowsPerLane = 4;  // j
constexpr int kCodeBytes = kTileN * kBoxBytes;
constexpr int kScaleBytes = kStepTiles * kTileBytes;  // a warpgroup's
constexpr int kMatrixBytes = 8 * kVectorBytes;        // 8 x 8 results of 16 bits
constexpr int kMultiplierWarps = kMultipliers * kGroupThreads / kWarpSize;
constexpr int kFragments = 2;  // words: one is decoded while the tensor cores have the other

template <int kTileM>
constexpr int kStageBytes = kCodeBytes + kBoxes * kTileM * kBoxBytes + kMultipliers * kScaleBytes;
template <int kTileM>
constexpr int kStages = kTileM <= 16 ? 4 : 3;
// Rows of A come and are multiplied in multiples of this: a tile of fewer costs less.
template <int kTileM>
constexpr int kRowUnit = kTileM <= 16 ? 8 : 16;
template <int kTileM>
constexpr int kSizes = kTileM / kRowUnit<kTileM>;
constexpr int kMaxSizes = 4;

// Where a warp turns results round, kRowUnit columns of its fragments at a time: of eight of them,
// a matrix of each of its lanes' rows.
constexpr int kTurnBytes = kRowsPerLane * kMatrixBytes;
template <int kTileM>
constexpr int kStagedBytes = kMultiplierWarps * kRowUnit<kTileM> / 8 * kTurnBytes;

// How long a tile takes, by its rows: decoding is the same for all. Measured on an H200.
template <int kTileM>
struct TileLengths {
  static constexpr int kDecoding = 96, kUnit = kTileM <= 16 ? 4 : 16;
  static constexpr int kWhole = kDecoding + kSizes<kTileM> * kUnit;
  __device__ __forceinline__ static int of(int rows) {
    return kDecoding + (rows + kRowUnit<kTileM> - 1) / kRowUnit<kTileM> * kUnit;
  }
};

constexpr int kCopiers = 2;  // warps: one of weights, one of A
// Registers of a thread at the launch, which leaves 7,168 for a block of those that arrange A
// (grouped_unpack.cu). They are handed out as the others: to the planner and the copiers, and to
// those who multiply.
constexpr int kLaunchRegisters = 152, kCopierRegisters = 56, kMultiplierRegisters = 200;
static_assert(kCopierRegisters + kMultipliers * kMultiplierRegisters <=
              (1 + kMultipliers) * kLaunchRegisters);

// Named barriers; 0 is __syncthreads.
constexpr int kPlanner = 1;

// What the multipliers hear of a piece of a tile. No rows: there are no more, and `row` is where
// those that no group has begin.
template <int kTileM>
struct Tile {
  int64_t group, row, n;
  int rows;
  int begin, end, meets;  // see TilePiece
  uint32_t number;        // of the block's pieces, from 0 on
  float alpha;
  float bias[kTileN];
  float gamma[kTileM];
  int target[kTileM];  // row of out, kDropped, or below that kMissing - row: zeros go there
};
constexpr int kDropped = -1, kMissing = -2;

constexpr int kTiles = 4;  // described while those before are multiplied

template <int kTileM>
struct Barriers {
  uint64_t full[kStages<kTileM>], empty[kStages<kTileM>];
  // Of a tile's place: every thread that writes or reads it arrives itself.
  uint64_t described[kTiles], finished[kTiles];
};
template <int kTileM>
struct Memory {
  Barriers<kTileM> barriers;
  Tile<kTileM> tiles[kTiles];
  ScheduleMemory<kWarpSize, TileLengths<kTileM>> schedule;
};

// Where these are in shared memory: the ring first, from a multiple of 1,024 on.
template <int kTileM>
struct Addresses {
  uint32_t ring;

  static constexpr uint32_t kStaged = kStages<kTileM> * kStageBytes<kTileM>;
  static constexpr uint32_t kMemory = kStaged + kStagedBytes<kTileM>;

  __device__ __forceinline__ uint32_t stage(int i) const {
    return ring + static_cast<uint32_t>(i) * kStageBytes<kTileM>;
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return ring + kMemory + offsetof(Barriers<kTileM>, full) + 8 * i;
  }
  __device__ __forceinline__ uint32_t empty(int i) const {
    return ring + kMemory + offsetof(Barriers<kTileM>, empty) + 8 * i;
  }
  __device__ __forceinline__ uint32_t described(int i) const {
    return ring + kMemory + offsetof(Barriers<kTileM>, described) + 8 * i;
  }
  __device__ __forceinline__ uint32_t finished(int i) const {
    return ring + kMemory + offsetof(Barriers<kTileM>, finished) + 8 * i;
  }
  __device__ __forceinline__ uint32_t staged(uint32_t warp) const {
    return ring + kStaged + warp * (kStagedBytes<kTileM> / kMultiplierWarps);
  }
};

struct WgmmaArgs {
  CUtensorMap codes, a[kMaxSizes];  // boxes of kRowUnit rows, twice as many, ...
  GroupedGemmParams gemm;
  GroupedPart part;
  ArrangedA arranged;
  int steps;
  int64_t tiles_per_row;  // of scales, 128x4
  int64_t scale_stack;    // bytes of one group's scales
  bool wide;
};

// One of a warpgroup's lanes.
struct Lane {
  int group, thread, g, t;
  int first;    // of its rows among the warpgroup's, 32 apart
  int swizzle;  // they are this much modulo 8

  // Row j of the lane's own, of the tile.
  __device__ int row(int j) const { return group * kGroupRows + first + 32 * j; }

  __device__ explicit Lane(int multiplier)
      : group(multiplier / kGroupThreads),
        thread(multiplier % kGroupThreads),
        g(multiplier % kWarpSize / 4),
        t(multiplier % 4),
        first(thread / kWarpSize * 8 + (g & 1) * 4 + g / 2),
        swizzle((g & 1) * 4 + g / 2) {}
};

}  // namespace
}  // namespace nvfp4::cuda
