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
constexpr int kOutRows = 16;                          // of A, written at a time
constexpr int kOutPitch = kGroupRows + 8;             // 16-bit results; spreads rows over banks
constexpr int kStagedBytes = kMultipliers * kOutRows * kOutPitch * 2;
constexpr int kMaxStages = 4;
constexpr int kFragments = 2, kPending = 1;  // words in registers, and being multiplied

template <int kTileM>
constexpr int kStageBytes = kCodeBytes + kBoxes * kTileM * kBoxBytes + kMultipliers * kScaleBytes;
template <int kTileM>
constexpr int kStages = kTileM <= 16 ? 4 : 3;

// Registers a thread: 168 x 384 are handed out as these.
constexpr int kCopierRegisters = 56, kMultiplierRegisters = 224;

// Named barriers; 0 is __syncthreads.
constexpr int kCopier = 1, kAllMultipliers = 2, kOneMultiplier = 3;

struct Memory {
  ScheduleMemory<kWarpSize> copier;
  ScheduleMemory<kMultipliers * kGroupThreads> multiplier;
  uint64_t full[kMaxStages], empty[kMaxStages];
};

struct WgmmaArgs {
  CUtensorMap codes, a;
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
  for (int64_t item = blockIdx.x; schedule.find(item, tile); item += gridDim.x) {
    if (lane != 0) continue;
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
      barrier_expect(arrived,
                     kCodeBytes + kBoxes * kTileM * kBoxBytes + kMultipliers * scale_bytes);
      copy_box(stage, args.codes, step * kBoxBytes, weight_row, arrived);
      uint32_t target = stage + kCodeBytes;
      for (int i = 0; i < kBoxes; ++i, target += kTileM * kBoxBytes) {
        copy_box(target, args.a, step * kStepK + i * kBoxK, a_row, arrived);
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

  __device__ explicit Lane(int multiplier)
      : group(multiplier / kGroupThreads),
        thread(multiplier % kGroupThreads),
        g(multiplier % kWarpSize / 4),
        t(multiplier % 4),
        first(thread / kWarpSize * 8 + (g & 1) * 4 + g / 2),
        swizzle((g & 1) * 4 + g / 2) {}
};

// A pair as two 16-bit results.
__device__ __forceinline__ uint32_t round_two(DType type, float low, float high) {
  if (type == DType::kBFloat16) {
    return bits_of(from_float<__nv_bfloat16>(low)) | bits_of(from_float<__nv_bfloat16>(high)) << 16;
  }
  return bits_of(from_float<__half>(low)) | bits_of(from_float<__half>(high)) << 16;
}

// Words of (0, 4), (1, 5), (2, 6), (3, 7): the order in which lanes g have a fragment's rows.
__device__ __forceinline__ uint4 in_order(uint4 v) {
  return make_uint4(permute_bytes(v.x, v.y, 0x5410), permute_bytes(v.z, v.w, 0x5410),
                    permute_bytes(v.x, v.y, 0x7632), permute_bytes(v.z, v.w, 0x7632));
}

// A warpgroup's 128 x kN sums to out. 16-bit results are transposed by way of shared memory, so
// that what a row of out gets is consecutive; an FP32 sector is one fragment's eight rows already.
// staged: kOutRows rows of kOutPitch.
template <typename T, int kN>
__device__ __forceinline__ void finish(const WgmmaArgs& args, const GroupedTile& tile,
                                       const Lane& lane, uint32_t staged,
                                       const float (&acc)[2][kN / 2]) {
  const GroupedGemmParams& p = args.gemm;
  const float alpha = group_alpha(p, tile.group);
  const int64_t n0 = tile.n + lane.group * kGroupRows;
  float bias[kRowsPerLane];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    const int64_t n = n0 + lane.first + 32 * j;
    bias[j] = p.bias && n < p.n ? load_as_float(p.bias, p.bias_type, tile.group * p.n + n) : 0.0f;
  }
  constexpr int kPart = kN < kOutRows ? kN : kOutRows;
#pragma unroll
  for (int m0 = 0; m0 < kN; m0 += kPart) {
    if (m0 >= tile.rows) break;
#pragma unroll
    for (int eight = 0; eight < kPart / 8; ++eight) {  // rows of A
      float v[kRowsPerLane][2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int m = m0 + 8 * eight + 2 * lane.t + c;
        const float gamma = p.gamma && m < tile.rows ? p.gamma[tile.row + m] : 1.0f;
#pragma unroll
        for (int j = 0; j < kRowsPerLane; ++j) {
          const float sum = acc[j / 2][(m0 / 8 + eight) * 4 + j % 2 * 2 + c];
          v[j][c] = gamma * fma_rn(alpha, sum * (1.0f / kSplitUnit<T>), bias[j]);
        }
        if (p.out_type == DType::kFloat32 && m < tile.rows) {
          const int64_t to = target_row(p, tile.row + m);
          const bool missing = source_row(p, tile.row + m) < 0;
#pragma unroll
          for (int j = 0; j < kRowsPerLane; ++j) {
            const int64_t n = n0 + lane.first + 32 * j;
            if (to < 0 || n >= p.n) continue;
            store_one(p.out, DType::kFloat32, to * p.n + n, missing ? 0.0f : v[j][c]);
          }
        }
      }
      if (p.out_type == DType::kFloat32) continue;
      // Four 8 x 8 matrices, of rows j; a lane gives the address of a row of the transposed ones.
      uint32_t words[kRowsPerLane];
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        words[j] = round_two(p.out_type, v[j][0], v[j][1]);
      }
      const int in_warp = lane.thread % kWarpSize, warp = lane.thread / kWarpSize;
      store_matrices_transposed(
          staged + ((8 * eight + in_warp % 8) * kOutPitch + warp * 8 + in_warp / 8 * 32) * 2,
          words);
    }
    if (p.out_type == DType::kFloat32) continue;
    barrier_sync(kOneMultiplier + lane.group, kGroupThreads);
    constexpr int kEights = kGroupRows / 8;
    uint16_t* out = static_cast<uint16_t*>(p.out);
    const int rows = min(tile.rows - m0, kPart);
    for (int i = lane.thread; i < rows * kEights; i += kGroupThreads) {
      const int m = i / kEights, e = i % kEights;
      const int64_t n = n0 + e * 8, to = target_row(p, tile.row + m0 + m);
      if (to < 0 || n >= p.n) continue;
      uint4 v = in_order(load_shared(staged + (m * kOutPitch + e * 8) * 2));
      if (source_row(p, tile.row + m0 + m) < 0) v = make_uint4(0, 0, 0, 0);
      if (args.wide) {
        *reinterpret_cast<uint4*>(out + to * p.n + n) = v;
      } else {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int w = 0; w < 8; ++w) {
          if (n + w < p.n) {
            out[to * p.n + n + w] = static_cast<uint16_t>(words[w / 2] >> (w % 2 * 16));
          }
        }
      }
    }
    barrier_sync(kOneMultiplier + lane.group, kGroupThreads);  // `staged` is free again
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

// Where a warpgroup is in the ring, and where its barriers are.
template <int kTileM>
struct Ring {
  uint32_t stages, full, empty;
  Place<kStages<kTileM>> place;
};

// A tile of at most kN rows.
template <typename T, int kTileM, int kN>
__device__ __forceinline__ void multiply_tile(const WgmmaArgs& args, const GroupedTile& tile,
                                              const Lane& lane, uint32_t staged,
                                              Ring<kTileM>& ring) {
  constexpr uint32_t kAAt = kCodeBytes, kScalesAt = kAAt + kBoxes * kTileM * kBoxBytes;
  const uint32_t my_codes = static_cast<uint32_t>(lane.group * kGroupRows + lane.first) * kBoxBytes;
  const uint32_t my_scales = kScalesAt + static_cast<uint32_t>(lane.group) * kScaleBytes +
                             static_cast<uint32_t>(lane.t / 2) * kTileBytes + lane.first * 16;
  const bool signals = lane.thread % kWarpSize == 0;
  auto& place = ring.place;
  float acc[2][kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  uint32_t fragment[kFragments][2][2][4];  // of a word; pair of rows, 16 of k, registers
  int blocks_left = static_cast<int>(args.gemm.k / kBlockSize);
  const auto load = [&](int q) {
    const uint32_t base = ring.stages + static_cast<uint32_t>(place.stage) * kStageBytes<kTileM>;
    return load_half(base + my_codes, base + my_scales + q * 2 * kTileBytes,
                     (4 * q + lane.t) ^ lane.swizzle, lane.t,
                     blocks_left - q * (kHalfK / kBlockSize));
  };
  barrier_wait(ring.full + place.stage * 8, place.parity);
  Half half = load(0);
  int before = 0;
  for (int step = 0; step < args.steps; ++step) {
    const int stage = place.stage;
    // All lanes have the same: said in this way, so that it stays in uniform registers.
    const uint32_t a =
        __shfl_sync(kFullWarp,
                    wgmma_descriptor_low(ring.stages +
                                         static_cast<uint32_t>(stage) * kStageBytes<kTileM> + kAAt),
                    0);
#pragma unroll
    for (int q = 0; q < kStepK / kHalfK; ++q) {
      uint32_t scale[kRowsPerLane][2];
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) scale_pairs(half.two[j], scale[j], T{});
      // What comes next is on its way while this half is worked on.
      Half next;
      if (q == 0) {
        next = load(1);
      } else {
        place.next();
        blocks_left -= kStepBlocks;
        if (step + 1 < args.steps) {
          barrier_wait(ring.full + place.stage * 8, place.parity);
          next = load(0);
        }
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        auto& mine = fragment[w % kFragments];
#pragma unroll
        for (int j = 0; j < kRowsPerLane; ++j) {
          // Not sooner: the tensor cores are to have work while this word is decoded.
          pin_register(half.words[j][w]);
          uint32_t pairs[4];
          decode8_split<T>(half.words[j][w], scale[j][w / 2], pairs);
#pragma unroll
          for (int i = 0; i < 4; ++i) mine[j / 2][i / 2][2 * (i % 2) + j % 2] = pairs[i];
        }
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const uint64_t descriptor = wgmma_descriptor_of(
              a + (2 * q + w / 2) * (kTileM * kBoxBytes / 16) + (2 * (w % 2) + s) * 2);
          wgmma(acc[0], mine[0][s], descriptor, T{});
          wgmma(acc[1], mine[1][s], descriptor, T{});
        }
        wgmma_commit();
        wgmma_wait<kPending>();  // words before are done: the next one's registers are free
        if (q == 0 && w == kPending - 1 && step > 0 && signals) {  // and the stage before
          barrier_arrive(ring.empty + before * 8);
        }
      }
      half = next;
    }
    before = stage;
  }
  wgmma_wait<0>();
  pin_registers(acc[0]);
  pin_registers(acc[1]);
  if (signals) barrier_arrive(ring.empty + before * 8);
  finish<T, kN>(args, tile, lane, staged, acc);
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
  staged += static_cast<uint32_t>(lane.group) * kOutRows * kOutPitch * 2;
  Ring<kTileM> ring{stages, shared_address(memory->full), shared_address(memory->empty), {}};
  bool apart = lane.group == 0 || args.steps < 2;
  GroupedTile tile;
  for (int64_t item = blockIdx.x; schedule.find(item, tile); item += gridDim.x) {
    if (!apart) barrier_wait(ring.full + 8, 0);
    apart = true;
    if constexpr (kTileM <= 16) {
      if (tile.rows <= 8) {
        multiply_tile<T, kTileM, 8>(args, tile, lane, staged, ring);
      } else {
        multiply_tile<T, kTileM, 16>(args, tile, lane, staged, ring);
      }
    } else if (tile.rows <= 16) {
      multiply_tile<T, kTileM, 16>(args, tile, lane, staged, ring);
    } else if (tile.rows <= 32) {
      multiply_tile<T, kTileM, 32>(args, tile, lane, staged, ring);
    } else {
      multiply_tile<T, kTileM, kTileM>(args, tile, lane, staged, ring);
    }
  }
  if (!p.scatter) {
    zero_rows(p, schedule.rows_end(), window.end, kAll, thread, args.wide);
  }
}

template <typename T, int kTileM>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_wgmma_kernel(const __grid_constant__ WgmmaArgs args) {
  if (NVFP4_WGMMA) {  // else an empty kernel: see grouped_hopper_available
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
  args.a = tensor_map(a, 2, std::min(part.rows, p.m), pitch, pitch * 2, kTileM);
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
                    1, stream, args);
}

// Whether what is loaded is the kernel: code for another target has an empty one in its place, and
// that needs next to no registers.
bool is_built() {
  cudaFuncAttributes found = {};
  const Kernel kernel = grouped_wgmma_kernel<__nv_bfloat16, 64>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)),
        "cudaFuncGetAttributes");
  return found.numRegs > 64;
}

}  // namespace

bool grouped_hopper_available() { return current_device().cc_major == 9 && is_built(); }

void grouped_wgmma(const GroupedGemmParams& p, const GroupedPart& part, const void* a, DType type,
                   int64_t pitch, int64_t rows, Stream stream) {
  if (rows <= 16) return run<16>(p, part, a, type, pitch, stream);
  run<64>(p, part, a, type, pitch, stream);
}

}  // namespace nvfp4::cuda
