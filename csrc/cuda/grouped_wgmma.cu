// Grouped GEMM for up to some hundred rows a group and packed weights, on Hopper's warpgroup tensor
// cores: reads the 4-bit weights once for every 64 rows of a group, decodes them in registers.
//
// - A block makes tiles of 256 weight rows x kTileM rows of A, 256 along k at a time. One warp
//   starts copies of boxes, two warpgroups multiply: 128 weight rows each, as two wgmma of
//   64 x kN x 16 per 16 of k, where kN <= kTileM is what the tile's rows need. The copies run ahead
//   across tiles. The copying warp alone looks for tiles: the others read what it found.
// - Nothing may be spilled: with this much shared memory hardly any L1 is left, and a spilled word
//   takes a microsecond to come back from L2 while copies are under way.
// - Weights are wgmma's register operand: each thread decodes the codes its fragments need while
//   the tensor cores work on the ones before. Lane (g, t) has four rows, 32 apart, whose scales for
//   64 of k are 16 consecutive bytes of the 128x4 layout, and of every 128 of k the 32 from 32 t
//   on: 16 bytes of codes. What k stands where in the product is free, as long as both sides agree:
//   A's rows have been brought into that order (grouped_unpack.cu).
// - Codes lie in shared memory as the copy swizzled them, vector v of row r in place v ^ r % 8. The
//   rows of lanes g and g + 1 differ by 4 of 8: a quarter of a warp reaches all banks.
// - Sums are FP32 in a fixed order: the same bytes in every run. A NaN scale of row n reaches row n
//   of B's products only.
#include "common.cuh"
#include "decode.cuh"
#include "grouped_gemm.h"
#include "grouped_ring.cuh"
#include "grouped_schedule.cuh"
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
// Where a warp turns results round: a matrix of each of its lanes' rows.
constexpr int kTurnBytes = kRowsPerLane * kMatrixBytes;
constexpr int kStagedBytes = kMultipliers * kGroupThreads / kWarpSize * kTurnBytes;
constexpr int kFragments = 2;  // words: one is decoded while the tensor cores have the other

template <int kTileM>
constexpr int kStageBytes = kCodeBytes + kBoxes * kTileM * kBoxBytes + kMultipliers * kScaleBytes;
template <int kTileM>
constexpr int kStages = kTileM <= 16 ? 4 : 3;
// A tile of fewer rows costs less by the multiple of this.
template <int kTileM>
constexpr int kRowUnit = kTileM <= 16 ? 8 : 16;
template <int kTileM>
constexpr int kSizes = kTileM / kRowUnit<kTileM>;
constexpr int kMaxSizes = 4;

// Registers a thread: 168 x 384 are handed out as these.
constexpr int kCopierRegisters = 72, kMultiplierRegisters = 216;

// Named barriers; 0 is __syncthreads.
constexpr int kCopier = 1;

// What the multipliers hear of a tile. No rows: there are no more tiles, and `row` is where those
// that no group has begin.
template <int kTileM>
struct Tile {
  int64_t group, row, n;
  int rows;
  float alpha;
  float gamma[kTileM];
  int target[kTileM];  // row of out, kDropped, or below that kMissing - row: zeros go there
};
constexpr int kDropped = -1, kMissing = -2;

template <int kTileM>
struct Memory {
  // Described while those before are multiplied.
  static constexpr int kTiles = kStages<kTileM> + 1;

  ScheduleMemory<kWarpSize> schedule;
  uint64_t full[kStages<kTileM>], empty[kStages<kTileM>];
  // Of a tile's place: every thread that writes or reads it arrives itself.
  uint64_t described[kTiles], finished[kTiles];
  Tile<kTileM> tiles[kTiles];
};

struct WgmmaArgs {
  CUtensorMap codes, a[kMaxSizes];  // boxes of kRowUnit rows, twice as many, ...
  GroupedGemmParams gemm;
  GroupedPart part;
  int steps;
  int64_t tiles_per_row;  // of B's scales
  int64_t scale_stack;    // bytes of one group's scales
  bool wide;
};

// What the copying warp says of a tile, whose place is free.
template <int kTileM>
__device__ __forceinline__ void describe(const GroupedGemmParams& p, const GroupedTile& tile,
                                         int lane, Tile<kTileM>& out) {
  for (int i = lane; i < kTileM; i += kWarpSize) {
    const int64_t m = tile.row + i;
    const int64_t to = i < tile.rows ? target_row(p, m) : kDropped;
    const bool missing = to >= 0 && source_row(p, m) < 0;
    out.target[i] = static_cast<int>(missing ? kMissing - to : to);
    out.gamma[i] = p.gamma && i < tile.rows ? p.gamma[m] : 1.0f;
  }
  if (lane != 0) return;
  out.group = tile.group;
  out.row = tile.row;
  out.n = tile.n;
  out.rows = tile.rows;
  out.alpha = group_alpha(p, tile.group);
}

// One lane: a tile's steps, each as soon as its stage is free.
template <int kTileM>
__device__ __forceinline__ void copy_steps(const WgmmaArgs& args, const Memory<kTileM>* memory,
                                           uint32_t ring, int64_t window_begin,
                                           const GroupedTile& tile, Place<kStages<kTileM>>& place) {
  const GroupedGemmParams& p = args.gemm;
  const uint32_t full = shared_address(memory->full), empty = shared_address(memory->empty);
  const int size = (tile.rows - 1) / kRowUnit<kTileM>;
  const uint32_t box_bytes = static_cast<uint32_t>(size + 1) * kRowUnit<kTileM> * kBoxBytes;
  const int weight_row = static_cast<int>(tile.group * p.n + tile.n);
  const int a_row = static_cast<int>(tile.row - window_begin);
  const uint8_t* scales[kMultipliers];
  for (int i = 0; i < kMultipliers; ++i) {
    // Beyond the last row the last tile again: results are dropped.
    const int64_t scale_tile = min(tile.n / kTileRows + i, (p.n - 1) / kTileRows);
    scales[i] =
        p.b.scale + tile.group * args.scale_stack + scale_tile * args.tiles_per_row * kTileBytes;
  }
  for (int step = 0; step < args.steps; ++step) {
    const uint32_t stage = ring + static_cast<uint32_t>(place.stage) * kStageBytes<kTileM>;
    const uint32_t arrived = full + place.stage * 8;
    const int64_t tiles = min(args.tiles_per_row - int64_t{step} * kStepTiles, int64_t{kStepTiles});
    const uint32_t scale_bytes = static_cast<uint32_t>(tiles) * kTileBytes;
    barrier_wait(empty + place.stage * 8, place.parity ^ 1);
    barrier_expect(arrived, kCodeBytes + kBoxes * box_bytes + kMultipliers * scale_bytes);
    copy_box(stage, args.codes, step * kBoxBytes, weight_row, arrived);
    uint32_t target = stage + kCodeBytes;
    for (int i = 0; i < kBoxes; ++i, target += kTileM * kBoxBytes) {
      copy_box(target, args.a[size], step * kStepK + i * kBoxK, a_row, arrived);
    }
    for (int i = 0; i < kMultipliers; ++i, target += kScaleBytes) {
      copy_bulk(target, scales[i] + int64_t{step} * kScaleBytes, scale_bytes, arrived);
    }
    place.next();
  }
}

template <int kTileM>
__device__ __forceinline__ void copy_tiles(const WgmmaArgs& args, Memory<kTileM>* memory,
                                           uint32_t ring, const RowWindow& window, int lane) {
  const GroupedGemmParams& p = args.gemm;
  Schedule<kWarpSize, kTileM, kTileN, NamedBarrier<kCopier, kWarpSize>> schedule(
      p, &memory->schedule, lane, window);
  const uint32_t described = shared_address(memory->described);
  const uint32_t finished = shared_address(memory->finished);
  Place<kStages<kTileM>> place;
  Place<Memory<kTileM>::kTiles> tile_place;
  GroupedTile tile;
  wait_for_kernel_ahead();  // it makes A
  for (int64_t item = blockIdx.x; schedule.find(item, tile); item += gridDim.x) {
    barrier_wait(finished + tile_place.stage * 8, tile_place.parity ^ 1);
    describe<kTileM>(p, tile, lane, memory->tiles[tile_place.stage]);
    barrier_arrive(described + tile_place.stage * 8);
    tile_place.next();
    if (lane == 0) copy_steps<kTileM>(args, memory, ring, window.begin, tile, place);
    __syncwarp();  // they look for the next tile together
  }
  barrier_wait(finished + tile_place.stage * 8, tile_place.parity ^ 1);
  if (lane == 0) {
    memory->tiles[tile_place.stage].rows = 0;
    memory->tiles[tile_place.stage].row = schedule.rows_end();
  }
  barrier_arrive(described + tile_place.stage * 8);
}

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

// Words of (0, 4), (1, 5), (2, 6), (3, 7): the order in which lanes g have a fragment's rows.
__device__ __forceinline__ uint4 in_order(uint4 v) {
  return make_uint4(permute_bytes(v.x, v.y, 0x5410), permute_bytes(v.z, v.w, 0x5410),
                    permute_bytes(v.x, v.y, 0x7632), permute_bytes(v.z, v.w, 0x7632));
}

// What a lane adds to its rows: asked for ahead of the tile's products.
struct Bias {
  float of[kRowsPerLane];

  __device__ Bias(const GroupedGemmParams& p, int64_t group, int64_t tile_n, const Lane& lane) {
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) {
      const int64_t n = tile_n + lane.row(j);
      of[j] = p.bias && n < p.n ? load_as_float(p.bias, p.bias_type, group * p.n + n) : 0.0f;
    }
  }
};

// Four pairs as 16-bit results.
template <typename Out>
__device__ __forceinline__ void round_pairs(const float (&v)[kRowsPerLane][2],
                                            uint32_t (&words)[kRowsPerLane]) {
  bool nan = false;
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    words[j] = round_pair<Out>(v[j][0], v[j][1]);
    nan |= v[j][0] != v[j][0] || v[j][1] != v[j][1];
  }
  if (!nan) return;
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {  // NaN has bytes of its own
    words[j] = bits_of(from_float<Out>(v[j][0])) | bits_of(from_float<Out>(v[j][1])) << 16;
  }
}

// Eight results, in the order of lanes, to `out` on, of which `count` exist. Not where 16-byte
// stores may be used and all exist.
__device__ void store_narrow(uint16_t* out, uint32_t from, int count, bool missing) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const uint32_t pair = load_shared_word(from + i % 4 * 4);
    out[i] = missing ? 0 : static_cast<uint16_t>(pair >> (i / 4 * 16));
  }
}

// A warpgroup's sums of a tile to out. FP32: a sector is one fragment's eight rows already. 16
// bits: a warp turns eight columns of its fragments round at a time, by way of shared memory of its
// own, so that a lane has eight neighbours of a row of out. One function for all kN: its
// instructions come from far at the end of every tile, the loop over steps fills the near caches.
template <typename T, typename Out, int kTileM>
__device__ __forceinline__ void finish(const WgmmaArgs& args, const Tile<kTileM>& tile,
                                       const Lane& lane, const Bias& bias, uint32_t staged,
                                       const float (&acc)[2][kTileM / 2]) {
  const GroupedGemmParams& p = args.gemm;
  const float alpha = tile.alpha;
  // Said anew, here and for every eight below, or the compiler makes what follows from it ahead of
  // all tiles or all eights, and spills it.
  uint32_t thread = lane.thread;
  keep(thread);
  const uint32_t in_warp = thread % kWarpSize;
  // Of what a lane stores: matrix in_warp / 8, and in it row in_warp % 8.
  const int64_t n = tile.n + lane.group * kGroupRows + thread / kWarpSize * 8 + in_warp / 8 * 32;
  const int count = static_cast<int>(max(min(p.n - n, int64_t{8}), int64_t{0}));
  const uint32_t mine = staged + in_warp * kVectorBytes;
#pragma unroll
  for (int m0 = 0; m0 < kTileM; m0 += 8) {
    if (m0 >= tile.rows) break;
    uint32_t my_column = 2 * lane.t, my_turned = in_warp % 8;
    keep(my_column);
    keep(my_turned);
    float v[kRowsPerLane][2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float gamma = tile.gamma[m0 + my_column + c];
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        const float sum = acc[j / 2][m0 / 2 + j % 2 * 2 + c] * (1.0f / kSplitUnit<T>);
        v[j][c] = gamma * fma_rn(alpha, sum, bias.of[j]);
      }
      if constexpr (std::is_same_v<Out, float>) {
        const int target = tile.target[m0 + my_column + c];
        if (target == kDropped) continue;
        const int64_t to = target < 0 ? kMissing - target : target;
#pragma unroll
        for (int j = 0; j < kRowsPerLane; ++j) {
          const int64_t at = tile.n + lane.row(j);
          if (at >= p.n) continue;
          static_cast<float*>(p.out)[to * p.n + at] =
              target < 0 ? 0.0f : from_float<float>(v[j][c]);
        }
      }
    }
    if constexpr (!std::is_same_v<Out, float>) {
      uint32_t words[kRowsPerLane];
      round_pairs<Out>(v, words);
      __syncwarp();  // the eight before are stored
      store_matrices_transposed(mine, words);
      __syncwarp();
      const int target = tile.target[m0 + my_turned];
      if (target == kDropped || count == 0) continue;
      const int64_t to = target < 0 ? kMissing - target : target;
      uint16_t* out = static_cast<uint16_t*>(p.out) + to * p.n + n;
      if (args.wide) {  // then a lane has all eight or none
        uint4 results = in_order(load_shared(mine));
        if (target < 0) results = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(out) = results;
      } else {
        store_narrow(out, mine, count, target < 0);
      }
    }
  }
}

// Where a warpgroup is in the ring.
template <int kTileM>
struct Ring {
  uint32_t stages, full, empty;
  Place<kStages<kTileM>> place;

  __device__ __forceinline__ uint32_t stage() const {
    return stages + static_cast<uint32_t>(place.stage) * kStageBytes<kTileM>;
  }
  __device__ __forceinline__ uint64_t a() const {
    // All lanes have the same: said in this way, so that it stays in uniform registers.
    return wgmma_descriptor_of(
        __shfl_sync(kFullWarp, wgmma_descriptor_low(stage() + kCodeBytes), 0));
  }
  __device__ __forceinline__ void wait() const {
    barrier_wait(full + place.stage * 8, place.parity);
  }
};

// 16 bytes of codes of each of a lane's rows: half a step.
struct Codes {
  uint32_t words[kRowsPerLane][4];
};

__device__ __forceinline__ void load_codes(Codes& half, uint32_t codes, int q, const Lane& lane) {
  const uint32_t from =
      codes + static_cast<uint32_t>((4 * q + lane.t) ^ lane.swizzle) * kVectorBytes;
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    const uint4 v = load_shared(from + j * 32 * kBoxBytes);
    half.words[j][0] = v.x;
    half.words[j][1] = v.y;
    half.words[j][2] = v.z;
    half.words[j][3] = v.w;
  }
}

// A step's four scales of each of a lane's rows, two of either half.
struct Scales {
  uint32_t four[kRowsPerLane];
};

__device__ __forceinline__ void load_scales(Scales& scales, uint32_t from, int t, int blocks_left) {
  const uint4 first = load_shared(from), second = load_shared(from + 2 * kTileBytes);
  const uint32_t selector = t & 1 ? 0x7632 : 0x5410;
  scales.four[0] = permute_bytes(first.x, second.x, selector);
  scales.four[1] = permute_bytes(first.y, second.y, selector);
  scales.four[2] = permute_bytes(first.z, second.z, selector);
  scales.four[3] = permute_bytes(first.w, second.w, selector);
  if (blocks_left < kStepBlocks) {  // the row's end: padding counts as 0 whatever it is
    uint32_t mask = 0;
    for (int i = 0; i < 4; ++i) {
      const int block = i / 2 * (kHalfK / kBlockSize) + 2 * t + i % 2;
      if (block < blocks_left) mask |= 0xFFu << (8 * i);
    }
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) scales.four[j] &= mask;
  }
}

// Word kWord of a half: while it is decoded, the tensor cores have the one before; when this is
// over, only this one.
template <typename T, int kTileM, int kWord, int kCount>
__device__ __forceinline__ void decode_and_multiply(Codes& half,
                                                    const uint32_t (&scale)[kRowsPerLane][2],
                                                    uint32_t (&fragment)[kFragments][2][2][4],
                                                    uint64_t a, int q, float (&low)[kCount],
                                                    float (&high)[kCount]) {
  auto& mine = fragment[kWord % kFragments];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    // Not sooner: the tensor cores are to have work while this word is decoded.
    pin_register(half.words[j][kWord]);
    uint32_t pairs[4];
    decode8_split<T>(half.words[j][kWord], scale[j][kWord / 2], pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[j / 2][i / 2][2 * (i % 2) + j % 2] = pairs[i];
  }
  wgmma_fence();
  a += (2 * q + kWord / 2) * (kTileM * kBoxBytes / kVectorBytes) + kWord % 2 * 4;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    wgmma(low, mine[0][s], a + 2 * s, T{});
    wgmma(high, mine[1][s], a + 2 * s, T{});
  }
  wgmma_commit();
  wgmma_wait<1>();
}

// The first of them.
template <int kCount>
using Sums = float[kCount];
template <int kCount, int kAll>
__device__ __forceinline__ Sums<kCount>& first_of(Sums<kAll>& all) {
  return reinterpret_cast<Sums<kCount>&>(all);
}

// The products of a tile of at most kN rows, whose first step is there.
template <typename T, int kTileM, int kN>
__device__ __forceinline__ void multiply_steps(const WgmmaArgs& args, const Lane& lane,
                                               Ring<kTileM>& ring, float (&acc)[2][kTileM / 2]) {
  auto& low = first_of<kN / 2>(acc[0]);
  auto& high = first_of<kN / 2>(acc[1]);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) low[i] = high[i] = 0.0f;
  const uint32_t my_codes = static_cast<uint32_t>(lane.group * kGroupRows + lane.first) * kBoxBytes;
  const uint32_t my_scales =
      kCodeBytes + kBoxes * kTileM * kBoxBytes + static_cast<uint32_t>(lane.group) * kScaleBytes +
      static_cast<uint32_t>(lane.t / 2) * kTileBytes + lane.first * kVectorBytes;
  const bool signals = lane.thread % kWarpSize == 0;
  uint32_t fragment[kFragments][2][2][4];  // pair of rows, 16 of k, registers
  int blocks_left = static_cast<int>(args.gemm.k / kBlockSize);
  Codes halves[kStepHalves];
  Scales scales;
  load_codes(halves[0], ring.stage() + my_codes, 0, lane);
  load_scales(scales, ring.stage() + my_scales, lane.t, blocks_left);
  int before = 0;
  for (int step = 0; step < args.steps; ++step) {
    const int stage = ring.place.stage;
    const Scales now = scales;
    const uint64_t a = ring.a();
#pragma unroll
    for (int q = 0; q < kStepHalves; ++q) {
      uint32_t scale[kRowsPerLane][2];
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        scale_pairs(now.four[j] >> (16 * q), scale[j], T{});
      }
      decode_and_multiply<T, kTileM, 0>(halves[q], scale, fragment, a, q, low, high);
      if (q == 0 && step > 0 && signals) barrier_arrive(ring.empty + before * 8);
      decode_and_multiply<T, kTileM, 1>(halves[q], scale, fragment, a, q, low, high);
      // What comes next is on its way while the rest is worked on; sooner, it would take registers.
      if (q == 0) {
        load_codes(halves[1], ring.stage() + my_codes, 1, lane);
      } else {
        ring.place.next();
        if (step + 1 < args.steps) {
          blocks_left -= kStepBlocks;
          ring.wait();
          load_codes(halves[0], ring.stage() + my_codes, 0, lane);
          load_scales(scales, ring.stage() + my_scales, lane.t, blocks_left);
        }
      }
      decode_and_multiply<T, kTileM, 2>(halves[q], scale, fragment, a, q, low, high);
      decode_and_multiply<T, kTileM, 3>(halves[q], scale, fragment, a, q, low, high);
    }
    before = stage;
  }
  wgmma_wait<0>();
  pin_registers(low);
  pin_registers(high);
  if (signals) barrier_arrive(ring.empty + before * 8);
}

// By the fewest rows that will do.
template <typename T, int kTileM, int kN = kTileM>
__device__ __forceinline__ void multiply(const WgmmaArgs& args, int rows, const Lane& lane,
                                         Ring<kTileM>& ring, float (&acc)[2][kTileM / 2]) {
  if constexpr (kN > kRowUnit<kTileM>) {
    constexpr int kFewer = kN - kRowUnit<kTileM>;
    if (rows <= kFewer) return multiply<T, kTileM, kFewer>(args, rows, lane, ring, acc);
  }
  multiply_steps<T, kTileM, kN>(args, lane, ring, acc);
}

template <typename T, int kTileM>
__device__ __forceinline__ void multiply_tiles(const WgmmaArgs& args, const Memory<kTileM>* memory,
                                               uint32_t stages, uint32_t staged,
                                               const RowWindow& window, int thread) {
  const GroupedGemmParams& p = args.gemm;
  const Lane lane(thread);
  staged += static_cast<uint32_t>(thread) / kWarpSize * kTurnBytes;
  Ring<kTileM> ring{stages, shared_address(memory->full), shared_address(memory->empty), {}};
  const uint32_t described = shared_address(memory->described);
  const uint32_t finished = shared_address(memory->finished);
  Place<Memory<kTileM>::kTiles> place;
  for (;; place.next()) {
    barrier_wait(described + place.stage * 8, place.parity);
    const Tile<kTileM>& tile = memory->tiles[place.stage];
    const int rows = tile.rows;
    if (rows == 0) {
      if (!p.scatter) {
        zero_rows(p, tile.row, window.end, kMultipliers * kGroupThreads, thread, args.wide);
      }
      return;
    }
    const Bias bias(p, tile.group, tile.n, lane);
    ring.wait();
    float acc[2][kTileM / 2];
    multiply<T, kTileM>(args, rows, lane, ring, acc);
    switch (p.out_type) {
      case DType::kFloat32:
        finish<T, float>(args, tile, lane, bias, staged, acc);
        break;
      case DType::kBFloat16:
        finish<T, __nv_bfloat16>(args, tile, lane, bias, staged, acc);
        break;
      case DType::kFloat16:
        finish<T, __half>(args, tile, lane, bias, staged, acc);
        break;
    }
    barrier_arrive(finished + place.stage * 8);
  }
}

template <typename T, int kTileM>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_wgmma_kernel(const __grid_constant__ WgmmaArgs args) {
  if (NVFP4_WGMMA) {  // else an empty kernel: see kHasHopperKernels
    uint8_t* const shared = dynamic_shared();
    const uint32_t ring = (shared_address(shared) + 1023u) & ~1023u;
    const uint32_t staged = ring + kStages<kTileM> * kStageBytes<kTileM>;
    auto* const memory = reinterpret_cast<Memory<kTileM>*>(
        shared + (staged - shared_address(shared)) + kStagedBytes);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      constexpr int kReaders = kMultipliers * kGroupThreads / kWarpSize;
      for (int i = 0; i < kStages<kTileM>; ++i) {
        barrier_init(shared_address(&memory->full[i]), 1);
        barrier_init(shared_address(&memory->empty[i]), kReaders);
      }
      for (int i = 0; i < Memory<kTileM>::kTiles; ++i) {
        barrier_init(shared_address(&memory->described[i]), kWarpSize);
        barrier_init(shared_address(&memory->finished[i]), kMultipliers * kGroupThreads);
      }
      fence_barrier_init();
    }
    __syncthreads();
    const RowWindow window = window_of(args.part);
    if (thread < kGroupThreads) {
      give_registers<kCopierRegisters>();
      if (thread < kWarpSize) copy_tiles<kTileM>(args, memory, ring, window, thread);
    } else {
      take_registers<kMultiplierRegisters>();
      multiply_tiles<T, kTileM>(args, memory, ring, staged, window, thread - kGroupThreads);
    }
  }
}

// ------------------------------------------------------------------------------------------- host

using Kernel = void (*)(const WgmmaArgs);

template <int kTileM>
void run(const GroupedGemmParams& p, const GroupedPart& part, const void* a, DType type,
         int64_t pitch, Stream stream) {
  WgmmaArgs args = {};
  args.codes = tensor_map(p.b.data, 1, p.groups * p.n, p.k / 2, p.k / 2, kTileN);
  for (int i = 0; i < kSizes<kTileM>; ++i) {
    args.a[i] =
        tensor_map(a, 2, std::min(part.rows, p.m), pitch, pitch * 2, (i + 1) * kRowUnit<kTileM>);
  }
  args.gemm = p;
  args.part = part;
  args.steps = static_cast<int>(ceil_div(p.k, kStepK));
  args.tiles_per_row = ceil_div(p.k / kBlockSize, kTileCols);
  args.scale_stack = ceil_div(p.n, kTileRows) * args.tiles_per_row * kTileBytes;
  args.wide = wide_stores(p);
  constexpr size_t kBytes =
      1024 + kStages<kTileM> * kStageBytes<kTileM> + kStagedBytes + sizeof(Memory<kTileM>);
  static_assert(kBytes <= 227 * 1024);
  const Kernel kernel = type == DType::kFloat16 ? grouped_wgmma_kernel<__half, kTileM>
                                                : grouped_wgmma_kernel<__nv_bfloat16, kTileM>;
  launch_persistent("grouped_gemm (wgmma)", kernel, most_items(p, kTileM, kTileN), kThreads, kBytes,
                    1, stream, args, 1, true);
}

}  // namespace

void grouped_wgmma(const GroupedGemmParams& p, const GroupedPart& part, const void* a, DType type,
                   int64_t pitch, int64_t rows, Stream stream) {
  if (rows <= 16) return run<16>(p, part, a, type, pitch, stream);
  run<64>(p, part, a, type, pitch, stream);
}

}  // namespace nvfp4::cuda
