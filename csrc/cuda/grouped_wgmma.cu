// Grouped GEMM for up to some hundred rows a group and packed weights, on Hopper's warpgroup tensor
// cores: reads the 4-bit weights once for every 64 rows of a group, decodes them in registers.
//
// - A block makes tiles of 256 weight rows x kTileM rows of A, 256 along k at a time. One warp
//   starts copies of boxes, two warpgroups multiply: 128 weight rows each, as two wgmma of
//   64 x kN x 16 per 16 of k, where kN <= kTileM is what the tile's rows need. The copies run ahead
//   across tiles. The warpgroups are a step apart: while one writes its sums, the other multiplies.
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
constexpr int kHalfK = 128;           // four lanes' 16 bytes of codes
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
constexpr int kMaxStages = 4;
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
constexpr int kCopierRegisters = 56, kMultiplierRegisters = 224;

// Named barriers; 0 is __syncthreads.
constexpr int kCopier = 1, kAllMultipliers = 2;

struct Memory {
  ScheduleMemory<kWarpSize> copier;
  ScheduleMemory<kMultipliers * kGroupThreads> multiplier;
  uint64_t full[kMaxStages], empty[kMaxStages];
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

template <int kTileM>
__device__ __forceinline__ void copy_tiles(const WgmmaArgs& args, Memory* memory, uint32_t ring,
                                           const RowWindow& window, int lane) {
  const GroupedGemmParams& p = args.gemm;
  Schedule<kWarpSize, kTileM, kTileN, NamedBarrier<kCopier, kWarpSize>> schedule(p, &memory->copier,
                                                                                 lane, window);
  const uint32_t full = shared_address(memory->full), empty = shared_address(memory->empty);
  Place<kStages<kTileM>> place;
  GroupedTile tile;
  wait_for_kernel_ahead();  // it makes A
  for (int64_t item = blockIdx.x; schedule.find(item, tile); item += gridDim.x) {
    if (lane != 0) continue;
    const int size = (tile.rows - 1) / kRowUnit<kTileM>;
    const uint32_t box_bytes = static_cast<uint32_t>(size + 1) * kRowUnit<kTileM> * kBoxBytes;
    const int weight_row = static_cast<int>(tile.group * p.n + tile.n);
    const int a_row = static_cast<int>(tile.row - window.begin);
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
      const int64_t tiles =
          min(args.tiles_per_row - int64_t{step} * kStepTiles, int64_t{kStepTiles});
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
}

// One of a warpgroup's lanes.
struct Lane {
  int group, thread, g, t;
  int first;    // of its rows among the warpgroup's, 32 apart
  int swizzle;  // they are this much modulo 8

  // Of the tile: row j of the lane's own, and the first of eight that it has of row j's matrix when
  // that is turned round.
  __device__ int row(int j) const { return group * kGroupRows + first + 32 * j; }
  __device__ int turned_row(int j) const {
    return group * kGroupRows + thread / kWarpSize * 8 + 32 * j;
  }

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

// What a tile's sums are multiplied with and added to: asked for ahead of its products.
struct Epilogue {
  float alpha, bias[kRowsPerLane];

  __device__ Epilogue(const GroupedGemmParams& p, const GroupedTile& tile, const Lane& lane)
      : alpha(group_alpha(p, tile.group)) {
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) {
      const int64_t n = tile.n + lane.row(j);
      bias[j] = p.bias && n < p.n ? load_as_float(p.bias, p.bias_type, tile.group * p.n + n) : 0.0f;
    }
  }

  // Of row m of the tile, where there is one.
  __device__ __forceinline__ static float gamma(const GroupedGemmParams& p, const GroupedTile& tile,
                                                int m) {
    return p.gamma && m < tile.rows ? p.gamma[tile.row + m] : 1.0f;
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

// The eight results at `from`, in the order of lanes, to out[n] on.
__device__ __forceinline__ void store_turned(uint16_t* out, int64_t n, int64_t n_end, uint32_t from,
                                             bool missing, bool wide) {
  if (wide) {
    const uint4 v = in_order(load_shared(from));
    *reinterpret_cast<uint4*>(out + n) = missing ? make_uint4(0, 0, 0, 0) : v;
    return;
  }
  const int count = static_cast<int>(min(n_end - n, int64_t{8}));
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const uint32_t pair = load_shared_word(from + i % 4 * 4);
    out[n + i] = missing ? 0 : static_cast<uint16_t>(pair >> (i / 4 * 16));
  }
}

// A warpgroup's 128 x kN sums to out. FP32: a sector is one fragment's eight rows already. 16 bits:
// a warp turns eight columns of its fragments round at a time, by way of shared memory of its own,
// so that a lane has eight neighbours of a row of out.
template <typename T, typename Out, int kN>
__device__ __forceinline__ void finish(const WgmmaArgs& args, const GroupedTile& tile,
                                       const Lane& lane, const Epilogue& epilogue, uint32_t staged,
                                       const float (&acc)[2][kN / 2]) {
  const GroupedGemmParams& p = args.gemm;
  const int in_warp = lane.thread % kWarpSize;
  // Of what a lane stores: matrix in_warp / 8, and in it row in_warp % 8.
  const int64_t n = tile.n + lane.turned_row(in_warp / 8);
  const uint32_t mine = staged + in_warp * kVectorBytes;
#pragma unroll
  for (int m0 = 0; m0 < kN; m0 += 8) {
    if (m0 >= tile.rows) break;
    float v[kRowsPerLane][2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int m = m0 + 2 * lane.t + c;
      const float gamma = Epilogue::gamma(p, tile, m);
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        const float sum = acc[j / 2][m0 / 2 + j % 2 * 2 + c] * (1.0f / kSplitUnit<T>);
        v[j][c] = gamma * fma_rn(epilogue.alpha, sum, epilogue.bias[j]);
      }
      if constexpr (std::is_same_v<Out, float>) {
        const int64_t to = m < tile.rows ? target_row(p, tile.row + m) : -1;
        if (to < 0) continue;
        const bool missing = source_row(p, tile.row + m) < 0;
#pragma unroll
        for (int j = 0; j < kRowsPerLane; ++j) {
          const int64_t at = tile.n + lane.row(j);
          if (at >= p.n) continue;
          static_cast<float*>(p.out)[to * p.n + at] = missing ? 0.0f : from_float<float>(v[j][c]);
        }
      }
    }
    if constexpr (!std::is_same_v<Out, float>) {
      uint32_t words[kRowsPerLane];
      round_pairs<Out>(v, words);
      __syncwarp();  // the eight before are stored
      store_matrices_transposed(mine, words);
      __syncwarp();
      const int m = m0 + in_warp % 8;
      const int64_t to = m < tile.rows ? target_row(p, tile.row + m) : -1;
      if (to < 0 || n >= p.n) continue;
      store_turned(static_cast<uint16_t*>(p.out) + to * p.n, n, p.n, mine,
                   source_row(p, tile.row + m) < 0, args.wide);
    }
  }
}

// Half a step of a lane's four rows: 16 bytes of codes and two scales each.
struct Half {
  uint32_t words[kRowsPerLane][4];
  uint32_t two[kRowsPerLane];
};

__device__ __forceinline__ Half load_half(uint32_t codes, uint32_t scales, int vector, int t,
                                          int blocks_left) {
  Half half;
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    const uint4 v = load_shared(codes + j * 32 * kBoxBytes + vector * kVectorBytes);
    half.words[j][0] = v.x;
    half.words[j][1] = v.y;
    half.words[j][2] = v.z;
    half.words[j][3] = v.w;
  }
  const uint4 four = load_shared(scales);
  const uint32_t rows[kRowsPerLane] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) half.two[j] = rows[j] >> (16 * (t & 1));
  if (blocks_left < kHalfK / kBlockSize) {  // the row's end: padding counts as 0 whatever it is
    uint32_t mask = 0xFFFFu;
    if (2 * t >= blocks_left) mask &= 0xFF00u;
    if (2 * t + 1 >= blocks_left) mask &= 0x00FFu;
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) half.two[j] &= mask;
  }
  return half;
}

// Word kWord of half q: while it is decoded, the tensor cores have the one before; when this is
// over, only this one.
template <typename T, int kTileM, int kWord, int kCount>
__device__ __forceinline__ void decode_and_multiply(Half& half,
                                                    const uint32_t (&scale)[kRowsPerLane][2],
                                                    uint32_t (&fragment)[kFragments][2][2][4],
                                                    uint64_t a, int q, float (&acc)[2][kCount]) {
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
  a += (2 * q + kWord / 2) * (kTileM * kBoxBytes / 16) + kWord % 2 * 4;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    wgmma(acc[0], mine[0][s], a + 2 * s, T{});
    wgmma(acc[1], mine[1][s], a + 2 * s, T{});
  }
  wgmma_commit();
  wgmma_wait<1>();
}

// Where a warpgroup is in the ring, and where its barriers are.
template <int kTileM>
struct Ring {
  uint32_t stages, full, empty;
  Place<kStages<kTileM>> place;

  __device__ __forceinline__ uint32_t stage() const {
    return stages + static_cast<uint32_t>(place.stage) * kStageBytes<kTileM>;
  }
  __device__ __forceinline__ void wait() const {
    barrier_wait(full + place.stage * 8, place.parity);
  }
};

// A tile of at most kN rows.
template <typename T, int kTileM, int kN>
__device__ __forceinline__ void multiply(const WgmmaArgs& args, const GroupedTile& tile,
                                         const Lane& lane, uint32_t staged, Ring<kTileM>& ring) {
  const Epilogue epilogue(args.gemm, tile, lane);
  constexpr uint32_t kAAt = kCodeBytes, kScalesAt = kAAt + kBoxes * kTileM * kBoxBytes;
  const uint32_t my_codes = static_cast<uint32_t>(lane.group * kGroupRows + lane.first) * kBoxBytes;
  const uint32_t my_scales = kScalesAt + static_cast<uint32_t>(lane.group) * kScaleBytes +
                             static_cast<uint32_t>(lane.t / 2) * kTileBytes + lane.first * 16;
  const bool signals = lane.thread % kWarpSize == 0;
  float acc[2][kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  uint32_t fragment[kFragments][2][2][4];  // pair of rows, 16 of k, registers
  int blocks_left = static_cast<int>(args.gemm.k / kBlockSize);
  const auto load = [&](int q) {
    const uint32_t stage = ring.stage();
    return load_half(stage + my_codes, stage + my_scales + q * 2 * kTileBytes,
                     (4 * q + lane.t) ^ lane.swizzle, lane.t,
                     blocks_left - q * (kHalfK / kBlockSize));
  };
  ring.wait();
  Half halves[2];
  halves[0] = load(0);
  int before = 0;
  for (int step = 0; step < args.steps; ++step) {
    const int stage = ring.place.stage;
    // All lanes have the same: said in this way, so that it stays in uniform registers.
    const uint64_t a =
        wgmma_descriptor_of(__shfl_sync(kFullWarp, wgmma_descriptor_low(ring.stage() + kAAt), 0));
#pragma unroll
    for (int q = 0; q < kStepK / kHalfK; ++q) {
      Half& half = halves[q];
      uint32_t scale[kRowsPerLane][2];
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) scale_pairs(half.two[j], scale[j], T{});
      decode_and_multiply<T, kTileM, 0>(half, scale, fragment, a, q, acc);
      if (q == 0 && step > 0 && signals) barrier_arrive(ring.empty + before * 8);
      decode_and_multiply<T, kTileM, 1>(half, scale, fragment, a, q, acc);
      // What comes next is on its way while the rest is worked on; sooner, it would take registers.
      if (q == 0) {
        halves[1] = load(1);
      } else {
        ring.place.next();
        blocks_left -= kStepBlocks;
        if (step + 1 < args.steps) {
          ring.wait();
          halves[0] = load(0);
        }
      }
      decode_and_multiply<T, kTileM, 2>(half, scale, fragment, a, q, acc);
      decode_and_multiply<T, kTileM, 3>(half, scale, fragment, a, q, acc);
    }
    before = stage;
  }
  wgmma_wait<0>();
  pin_registers(acc[0]);
  pin_registers(acc[1]);
  if (signals) barrier_arrive(ring.empty + before * 8);
  switch (args.gemm.out_type) {
    case DType::kFloat32:
      return finish<T, float, kN>(args, tile, lane, epilogue, staged, acc);
    case DType::kBFloat16:
      return finish<T, __nv_bfloat16, kN>(args, tile, lane, epilogue, staged, acc);
    case DType::kFloat16:
      return finish<T, __half, kN>(args, tile, lane, epilogue, staged, acc);
  }
}

// For the fewest rows that will do.
template <typename T, int kTileM, int kN = kTileM>
__device__ __forceinline__ void multiply_tile(const WgmmaArgs& args, const GroupedTile& tile,
                                              const Lane& lane, uint32_t staged,
                                              Ring<kTileM>& ring) {
  if constexpr (kN > kRowUnit<kTileM>) {
    constexpr int kFewer = kN - kRowUnit<kTileM>;
    if (tile.rows <= kFewer) {
      return multiply_tile<T, kTileM, kFewer>(args, tile, lane, staged, ring);
    }
  }
  multiply<T, kTileM, kN>(args, tile, lane, staged, ring);
}

template <typename T, int kTileM>
__device__ __forceinline__ void multiply_tiles(const WgmmaArgs& args, Memory* memory,
                                               uint32_t stages, uint32_t staged,
                                               const RowWindow& window, int thread) {
  const GroupedGemmParams& p = args.gemm;
  constexpr int kAll = kMultipliers * kGroupThreads;
  Schedule<kAll, kTileM, kTileN, NamedBarrier<kAllMultipliers, kAll>> schedule(
      p, &memory->multiplier, thread, window);
  const Lane lane(thread);
  staged += static_cast<uint32_t>(thread) / kWarpSize * kTurnBytes;
  Ring<kTileM> ring{stages, shared_address(memory->full), shared_address(memory->empty), {}};
  bool apart = lane.group == 0 || args.steps < 2;
  GroupedTile tile;
  for (int64_t item = blockIdx.x; schedule.find(item, tile); item += gridDim.x) {
    if (!apart) barrier_wait(ring.full + 8, 0);
    apart = true;
    multiply_tile<T, kTileM>(args, tile, lane, staged, ring);
  }
  if (!p.scatter) {
    zero_rows(p, schedule.rows_end(), window.end, kAll, thread, args.wide);
  }
}

template <typename T, int kTileM>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_wgmma_kernel(const __grid_constant__ WgmmaArgs args) {
  if (NVFP4_WGMMA) {  // else an empty kernel: see kHasHopperKernels
    uint8_t* const shared = dynamic_shared();
    const uint32_t ring = (shared_address(shared) + 1023u) & ~1023u;
    const uint32_t staged = ring + kStages<kTileM> * kStageBytes<kTileM>;
    auto* const memory =
        reinterpret_cast<Memory*>(shared + (staged - shared_address(shared)) + kStagedBytes);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      for (int i = 0; i < kStages<kTileM>; ++i) {
        barrier_init(shared_address(&memory->full[i]), 1);
        barrier_init(shared_address(&memory->empty[i]), kMultipliers * kGroupThreads / kWarpSize);
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
      1024 + kStages<kTileM> * kStageBytes<kTileM> + kStagedBytes + sizeof(Memory);
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
