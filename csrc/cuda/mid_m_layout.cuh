// gemm_mid_m's blocks: what they have in shared memory, what they are told, what they do of which
// tile.
#pragma once

#include <algorithm>

#include "common.cuh"
#include "mid_m_plan.h"

namespace nvfp4::cuda {
namespace {

constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kMultipliers = 256;   // threads: two warpgroups, 64 rows of B each
constexpr int kThreads = kMultipliers + kGroupThreads;  // and one of which a thread fetches A
constexpr int kImageThreads = 128;
constexpr int kLaneK = 32;  // consecutive elements of k a lane decodes
constexpr int kVectorBytes = 16;
constexpr int kBarrierBytes = 8;
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kSwizzleBytes = 1024;  // shared memory's alignment of a swizzled tile
constexpr int kStageK = 64;          // of A: half a chunk, a swizzled row of 128 bytes
constexpr int kRows = 2;             // of B, a lane
constexpr int kCodeStep = kMidMChunkK / 2;
// Registers a thread: 168 x 384 are handed out as these.
constexpr int kFetcherRegisters = 24, kMultiplierRegisters = 240;
constexpr int kPatience = 20;  // looks for other blocks, about half a microsecond each

// Shared memory, and how much of it there is for what, for tiles of kRowsOfA. A slot has what
// copies bring of a chunk: both halves of A, and the tile's scales of B as they lie in memory.
template <int kRowsOfA>
struct Layout {
  static constexpr int kN = kRowsOfA, kAcc = kN / 2;  // sums a thread
  static constexpr int kPart = kAcc / kMidMParts;
  // Sums of a part, and of how many other blocks, to load together: as there are registers for.
  static constexpr int kBatch = kN == 256 ? kPart / 2 : kPart, kAtOnce = kN == 256 ? 1 : 2;
  // Words of a row decoded at a time: short products need more of them under way.
  static constexpr int kWords = kN <= 128 ? 2 : 1;
  static constexpr uint32_t kABytes = kN * kStageK * 2;  // of half a chunk
  static constexpr uint32_t kScales = 2 * kABytes,
                            kScaleBytes = kMidMChunkK / kBlockSize * kTileRows;
  static constexpr uint32_t kSlotBytes = kScales + kScaleBytes;
  static constexpr uint32_t kBBytes = kMultipliers * kRows * kVectorBytes;
  static constexpr int kBStages = kN == 256 ? 3 : 6;
  // Whether halves of a slot are free each for itself, where there are few slots.
  static constexpr bool kHalves = kN >= 192;
  // Four a slot: first half and scales have come, second half has, first half is read, second is.
  static constexpr uint32_t kBarrierStep = 4 * kBarrierBytes;
  static constexpr int kSlots = std::min<int>(
      8, (kMaxSharedBytes - kSwizzleBytes - kBStages * kBBytes) / (kSlotBytes + kBarrierStep));
  static constexpr uint32_t kB = kSlots * kSlotBytes;
  static constexpr uint32_t kBarriers = kB + kBStages * kBBytes;
  static constexpr uint32_t kEnd = kBarriers + kSlots * kBarrierStep;
  // Of pairs of blocks: the other one has read its slots; a warp has received its sums.
  static constexpr uint32_t kOtherDone = kEnd, kReceived = kEnd + kBarrierBytes;
  static constexpr uint32_t kBytes = kReceived + kMidMWarps * kBarrierBytes + kSwizzleBytes;
  // Bytes of a warp's sums: of a part; that a warp receives in pairs; that it has room for where
  // slots were.
  static constexpr uint32_t kPartBytes = kWarpSize * kPart * 4;
  static constexpr uint32_t kSent = kMidMParts / 2 * kPartBytes;
  static constexpr uint32_t kRoom = kSlots * kSlotBytes / kMidMWarps / kPartBytes * kPartBytes;
  static_assert(kSent <= kRoom);
  static_assert(kSlots >= 3 && kBytes <= kMaxSharedBytes);
};

struct MidMArgs {
  SmallMParams gemm;
  MidMPlan plan;
  uint8_t* image;
  float* sums;
  unsigned* counters;  // how many blocks have left their sums: by tile, part and warp
  float unit;
  int64_t tiles_per_row;
};

// ----------------------------------------------------------------------------------------- pieces

// What a worker does of one tile: chunks [first, first + count) of it. Workers [from, to] share it.
struct Segment {
  int tile, m_tile, n_tile, first, count, from, to;
};

// The segments of a worker's piece, one after the other.
class Piece {
 public:
  __device__ Piece(const MidMPlan& plan, int worker)
      : plan_(plan), at_(plan.begin(worker)), end_(plan.begin(worker + 1)) {}

  __device__ bool next(Segment& s) {
    if (at_ >= end_) return false;
    s.tile = plan_.chunks.divide(at_);
    s.first = at_ - s.tile * plan_.chunks.value;
    s.count = min(plan_.chunks.value - s.first, end_ - at_);
    s.n_tile = plan_.m_tiles.divide(s.tile);
    s.m_tile = s.tile - s.n_tile * plan_.m_tiles.value;
    at_ += s.count;
    return true;
  }
  __device__ void find_others(Segment& s) const {
    s.from = plan_.worker_of(s.tile, 0);
    s.to = plan_.worker_of(s.tile, plan_.chunks.value - 1);
  }

 private:
  const MidMPlan& plan_;
  int at_, end_;
};

// Row h of a lane's two, in the tile: after a transposition lane t has four neighbours.
__device__ __forceinline__ int row_in_tile(int warp, int g, int h) {
  return 16 * warp + 4 * (g / 2) + 2 * h + g % 2;
}

}  // namespace
}  // namespace nvfp4::cuda
