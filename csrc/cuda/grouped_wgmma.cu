// Grouped GEMM for many rows a group and packed weights, on Hopper's warpgroup tensor cores. A is
// dense, or has been decoded (grouped_gemm.cpp).
//
// - A block makes tiles of 256 weight rows x kTileM rows of A, 64 along k at a time. One warpgroup
//   copies, two multiply: 128 weight rows each, as two wgmma of 64 x kTileM x 16 per 16 of k.
// - Weights are wgmma's register operand: each thread decodes the codes its fragments need while
// the
//   tensor cores work on the ones before. A lane (g, t) has rows 32 j + 8 warp + g, j < 4, whose
//   scales for 64 of k are 16 consecutive bytes of the 128x4 layout.
// - A slot pair of the instruction is one byte of a code word: byte t of every eight codes. The
//   copying warpgroup transposes bytes on the way, so that a lane reads its eight bytes at once.
// - A is wgmma's shared operand, copied by cp.async row by row, so rows may come from anywhere.
// - Stages are handed over by named barriers; the copying side runs ahead across tiles.
// - Sums are FP32 in a fixed order: the same bytes in every run. A NaN scale of row n reaches row n
//   of B's products only.
#include "common.cuh"
#include "decode.cuh"
#include "grouped_gemm.h"
#include "grouped_schedule.cuh"
#include "wgmma.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kStepK = 64;
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kMultipliers = 2;     // warpgroups
constexpr int kThreads = (1 + kMultipliers) * kGroupThreads;
constexpr int kGroupRows = kTileRows;  // of weights, a warpgroup: one tile of scales
constexpr int kTileN = kMultipliers * kGroupRows;
constexpr int kRowsPerLane = 4;                         // j
constexpr int kRowVectors = kStepK * 2 / kVectorBytes;  // of A's 16-bit values
constexpr int kRowCodes = kStepK / 2;                   // bytes of a weight row
constexpr int kCodeBytes = kTileN * kRowCodes;
constexpr int kScaleBytes = kMultipliers * kTileBytes;
constexpr int kAhead = 2;  // steps whose copies are under way when the next one's are issued
constexpr int kMaxStages = 5, kMinStages = kAhead + 2;
constexpr int kOutPitch = kGroupRows + 8;  // 16-bit results; spreads a fragment's rows over banks

// Registers a thread: 168 x 384 are handed out as these.
constexpr int kCopierRegisters = 72, kMultiplierRegisters = 216;

// Named barriers; 0 is __syncthreads.
constexpr int kFull = 1, kEmpty = kFull + kMaxStages;
constexpr int kCopiers = kEmpty + kMaxStages, kAllMultipliers = kCopiers + 1,
              kOneMultiplier = kAllMultipliers + 1;
static_assert(kOneMultiplier + kMultipliers <= 16);

template <int kId, int kCount>
struct NamedBarrier {
  __device__ __forceinline__ static void sync() { barrier_sync(kId, kCount); }
};

template <int kTileM>
struct Memory {
  ScheduleMemory copier, multiplier;
  float gamma[kMultipliers][kTileM];
  uint16_t out[kMultipliers][kTileM * kOutPitch];
};

template <int kTileM>
constexpr uint32_t kStageBytes = kTileM * kStepK * 2 + kCodeBytes + kScaleBytes;

struct WgmmaArgs {
  GroupedGemmParams gemm;
  int stages, steps;
  int64_t tiles_per_row;  // of B's scales
  int64_t scale_stack;    // bytes of one group's scales
  bool wide;
};

// ------------------------------------------------------------------------------------ the copiers

// Byte i of each of four words, in word i.
__device__ __forceinline__ void transpose_bytes(uint4& v) {
  const uint32_t a = permute_bytes(v.x, v.y, 0x5140), b = permute_bytes(v.z, v.w, 0x5140);
  const uint32_t c = permute_bytes(v.x, v.y, 0x7362), d = permute_bytes(v.z, v.w, 0x7362);
  v.x = permute_bytes(a, b, 0x5410);
  v.y = permute_bytes(a, b, 0x7632);
  v.z = permute_bytes(c, d, 0x5410);
  v.w = permute_bytes(c, d, 0x7632);
}

// A copying thread's share of a tile.
template <int kTileM>
struct Copier {
  static constexpr int kRows = kTileN / kGroupThreads;  // of weights
  static constexpr int kEach = kTileM * kRowVectors / kGroupThreads;

  const uint8_t* codes[kRows];
  const uint8_t* scale;
  const uint16_t* a[kEach];  // null: this row is zero
  uint4 held[kRows][2];      // the next step's codes

  __device__ void start(const WgmmaArgs& args, const GroupedTile& tile, int thread) {
    const GroupedGemmParams& p = args.gemm;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // A row past the end is read as the last one, and its result dropped.
      const int64_t n = min(tile.n + i * kGroupThreads + thread, p.n - 1);
      codes[i] = static_cast<const uint8_t*>(p.b.data) + (tile.group * p.n + n) * (p.k / 2);
    }
    const int64_t scale_tile =
        min(tile.n / kTileRows + thread / (kTileBytes / kVectorBytes), (p.n - 1) / kTileRows);
    scale = p.b.scale + tile.group * args.scale_stack +
            scale_tile * args.tiles_per_row * kTileBytes +
            thread % (kTileBytes / kVectorBytes) * kVectorBytes;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int m = (thread + i * kGroupThreads) / kRowVectors;
      const int64_t from = m < tile.rows ? source_row(p, tile.row + m) : -1;
      a[i] = from < 0 ? nullptr
                      : static_cast<const uint16_t*>(p.a.data) + from * p.a.row_stride +
                            thread % kRowVectors * (kVectorBytes / 2);
    }
  }

  // Rows are multiples of 16 bytes: a vector is inside or outside.
  __device__ __forceinline__ void fetch(const WgmmaArgs& args, int step) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      for (int h = 0; h < 2; ++h) {
        const int64_t offset = int64_t{step} * kRowCodes + h * kVectorBytes;
        held[i][h] =
            offset < args.gemm.k / 2 ? load_streaming(codes[i] + offset) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ void copy(const WgmmaArgs& args, uint32_t stage, int step,
                                       int thread) {
    const GroupedGemmParams& p = args.gemm;
    const int v = thread % kRowVectors;
    const bool in_row = int64_t{step} * kStepK + v * (kVectorBytes / 2) < p.k;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int m = (thread + i * kGroupThreads) / kRowVectors;
      const bool valid = in_row && a[i] != nullptr;
      copy_async(stage + static_cast<uint32_t>(m * kRowVectors + (v ^ (m & 7))) * kVectorBytes,
                 valid ? a[i] + int64_t{step} * kStepK : static_cast<const uint16_t*>(p.a.data),
                 valid ? kVectorBytes : 0);
    }
    const uint32_t code_stage = stage + kTileM * kStepK * 2;
    if (thread < kScaleBytes / kVectorBytes) {
      copy_async(code_stage + kCodeBytes + thread * kVectorBytes,
                 scale + int64_t{step} * kTileBytes, kVectorBytes);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint4 low = held[i][0], high = held[i][1];
      transpose_bytes(low);
      transpose_bytes(high);
      const uint4 halves[2] = {make_uint4(low.x, high.x, low.y, high.y),
                               make_uint4(low.z, high.z, low.w, high.w)};
      // Four rows of a quarter-warp write one half, four the other: all banks.
      const bool swap = thread & 4;
      const uint32_t row =
          code_stage + static_cast<uint32_t>(i * kGroupThreads + thread) * kRowCodes;
      store_shared(row + (swap ? kVectorBytes : 0), swap ? halves[1] : halves[0]);
      store_shared(row + (swap ? 0 : kVectorBytes), swap ? halves[0] : halves[1]);
    }
  }
};

template <int kTileM>
__device__ __forceinline__ void copy_tiles(const WgmmaArgs& args, ScheduleMemory* memory,
                                           uint32_t ring, int thread) {
  Schedule<kGroupThreads, kTileM, kTileN, NamedBarrier<kCopiers, kGroupThreads>> schedule(
      args.gemm, memory, thread);
  Copier<kTileM> copier;
  GroupedTile tile;
  int64_t issued = 0;
  int stage = 0, ready = 0;  // to be filled next, to be handed over next
  const auto next = [&](int s) { return s + 1 == args.stages ? 0 : s + 1; };
  const auto hand_over = [&] {
    fence_shared_for_wgmma();
    barrier_arrive(kFull + ready, kThreads);
    ready = next(ready);
  };
  for (int64_t item = blockIdx.x; schedule.find(item, tile); item += gridDim.x) {
    copier.start(args, tile, thread);
    copier.fetch(args, 0);
    for (int step = 0; step < args.steps; ++step) {
      if (issued >= args.stages) barrier_sync(kEmpty + stage, kThreads);
      copier.copy(args, ring + static_cast<uint32_t>(stage) * kStageBytes<kTileM>, step, thread);
      commit_copies();
      if (step + 1 < args.steps) copier.fetch(args, step + 1);
      if (issued >= kAhead) {
        wait_copies(kAhead);
        hand_over();
      }
      ++issued;
      stage = next(stage);
    }
  }
  wait_copies(0);
  for (int64_t i = min(issued, int64_t{kAhead}); i > 0; --i) hand_over();
  // Every hand-over has its answer: nobody waits, and no barrier is left half full.
  int oldest = issued < args.stages ? 0 : stage;
  for (int64_t i = min(issued, int64_t{args.stages}); i > 0; --i, oldest = next(oldest)) {
    barrier_sync(kEmpty + oldest, kThreads);
  }
  if (!args.gemm.scatter) {
    const GroupedGemmParams& p = args.gemm;
    zero_rows(p, schedule.rows_end(), kGroupThreads, thread, args.wide);
  }
}

// -------------------------------------------------------------------------------- the multipliers

template <typename Out>
__device__ __forceinline__ uint16_t bits16(float v) {
  return static_cast<uint16_t>(bits_of(from_float<Out>(v)));
}

// A warpgroup's 128 x kTileM sums to out. 16-bit results go through shared memory, so that what a
// row of out gets is consecutive; an FP32 sector is one fragment's eight rows already.
template <int kTileM>
__device__ __forceinline__ void finish(const WgmmaArgs& args, const GroupedTile& tile, int group,
                                       int thread, const float* gamma, uint16_t* staged,
                                       const float (&acc)[2][kTileM / 2]) {
  const GroupedGemmParams& p = args.gemm;
  const int warp = thread / kWarpSize, g = thread % kWarpSize / 4, t = thread % 4;
  const float alpha = group_alpha(p, tile.group);
  const int64_t n0 = tile.n + group * kGroupRows;
  const int first = warp * 8 + g;
  float bias[kRowsPerLane];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    const int64_t n = n0 + first + 32 * j;
    bias[j] = p.bias && n < p.n ? load_as_float(p.bias, p.bias_type, tile.group * p.n + n) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kTileM / 2; ++i) {
    const int m = i / 4 * 8 + 2 * t + i % 2, h = i / 2 % 2;
    const float factor = gamma[m];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int j = 2 * pair + h;
      const float v = factor * fma_rn(alpha, acc[pair][i] * (1.0f / kDecodedUnit), bias[j]);
      const int row = first + 32 * j;
      if (p.out_type == DType::kFloat32) {
        if (m >= tile.rows || n0 + row >= p.n) continue;
        const int64_t to = target_row(p, tile.row + m);
        const bool missing = source_row(p, tile.row + m) < 0;
        if (to >= 0) store_one(p.out, DType::kFloat32, to * p.n + n0 + row, missing ? 0.0f : v);
      } else {
        staged[m * kOutPitch + row] =
            p.out_type == DType::kBFloat16 ? bits16<__nv_bfloat16>(v) : bits16<__half>(v);
      }
    }
  }
  if (p.out_type == DType::kFloat32) return;
  barrier_sync(kOneMultiplier + group, kGroupThreads);
  constexpr int kEights = kGroupRows / 8;
  uint16_t* out = static_cast<uint16_t*>(p.out);
  for (int i = thread; i < tile.rows * kEights; i += kGroupThreads) {
    const int m = i / kEights, v = i % kEights;
    const int64_t n = n0 + v * 8, to = target_row(p, tile.row + m);
    if (to < 0 || n >= p.n) continue;
    const bool missing = source_row(p, tile.row + m) < 0;
    const uint16_t* from = staged + m * kOutPitch + v * 8;
    if (args.wide) {
      const uint4 eight = *reinterpret_cast<const uint4*>(from);
      *reinterpret_cast<uint4*>(out + to * p.n + n) = missing ? make_uint4(0, 0, 0, 0) : eight;
    } else {
      for (int e = 0; e < 8 && n + e < p.n; ++e) out[to * p.n + n + e] = missing ? 0 : from[e];
    }
  }
}

template <typename T, int kTileM>
__device__ __forceinline__ void multiply_tiles(const WgmmaArgs& args, Memory<kTileM>* memory,
                                               uint32_t ring, int thread) {
  const GroupedGemmParams& p = args.gemm;
  const int group = thread / kGroupThreads, in_group = thread % kGroupThreads;
  const int warp = in_group / kWarpSize, g = in_group % kWarpSize / 4, t = in_group % 4;
  const uint32_t my_codes = kTileM * kStepK * 2 +
                            static_cast<uint32_t>(group * kGroupRows + warp * 8 + g) * kRowCodes +
                            t * 8;
  const uint32_t my_scales = kTileM * kStepK * 2 + kCodeBytes + group * kTileBytes +
                             static_cast<uint32_t>(warp * 8 + g) * kVectorBytes;
  constexpr int kAll = kMultipliers * kGroupThreads;
  Schedule<kAll, kTileM, kTileN, NamedBarrier<kAllMultipliers, kAll>> schedule(
      p, &memory->multiplier, thread);
  GroupedTile tile;
  int stage = 0, before = 0;
  const auto next = [&](int s) { return s + 1 == args.stages ? 0 : s + 1; };
  for (int64_t item = blockIdx.x; schedule.find(item, tile); item += gridDim.x) {
    barrier_sync(kOneMultiplier + group, kGroupThreads);  // the tile before is stored
    if (in_group < kTileM) {
      memory->gamma[group][in_group] =
          p.gamma && in_group < tile.rows ? p.gamma[tile.row + in_group] : 1.0f;
    }
    float acc[2][kTileM / 2];
#pragma unroll
    for (int i = 0; i < kTileM / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
    uint32_t fragment[2][2][2][4];  // half of the step, pair of rows, 16 of k, registers
    for (int step = 0; step < args.steps; ++step) {
      const uint32_t base = ring + static_cast<uint32_t>(stage) * kStageBytes<kTileM>;
      barrier_sync(kFull + stage, kThreads);
      uint2 codes[kRowsPerLane];
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        codes[j] = load_shared_pair(base + my_codes + j * 32 * kRowCodes);
      }
      const uint4 scale_words = load_shared(base + my_scales);
      uint32_t scales[kRowsPerLane] = {scale_words.x, scale_words.y, scale_words.z, scale_words.w};
      const int64_t left = p.k / kBlockSize - int64_t{step} * kTileCols;
      if (left < kTileCols) {  // the row's end: padding counts as 0 whatever it is
        for (uint32_t& s : scales) s &= 0xFFFFFFFFu >> (8 * (kTileCols - static_cast<int>(left)));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kRowsPerLane; ++j) {
          uint32_t pairs[4];
          spread_pairs(half ? codes[j].y : codes[j].x, pairs);
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const uint32_t scale = scale_pair(
                e4m3_decode(static_cast<uint8_t>(scales[j] >> (8 * (2 * half + s)))), T{});
            for (int x = 0; x < 2; ++x) {
              fragment[half][j / 2][s][2 * x + j % 2] =
                  multiply_pair(place_pair(pairs[2 * s + x], T{}), scale, T{});
            }
          }
        }
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const uint64_t descriptor = wgmma_descriptor(base + (2 * half + s) * 32);
          wgmma(acc[0], fragment[half][0][s], descriptor, T{});
          wgmma(acc[1], fragment[half][1][s], descriptor, T{});
        }
        wgmma_commit();
        wgmma_wait<1>();  // the half before is done: its registers and, by now, its stage are free
        if (half == 0 && step > 0) barrier_arrive(kEmpty + before, kThreads);
      }
      before = stage;
      stage = next(stage);
    }
    wgmma_wait<0>();
    pin_registers(acc[0]);
    pin_registers(acc[1]);
    barrier_arrive(kEmpty + before, kThreads);
    finish<kTileM>(args, tile, group, in_group, memory->gamma[group], memory->out[group], acc);
  }
}

template <typename T, int kTileM>
__global__ void __launch_bounds__(kThreads, 1) grouped_wgmma_kernel(const WgmmaArgs args) {
#if NVFP4_WGMMA
  uint8_t* const shared = dynamic_shared();
  const uint32_t ring = (shared_address(shared) + 1023u) & ~1023u;
  auto* const memory =
      reinterpret_cast<Memory<kTileM>*>(shared + (ring - shared_address(shared)) +
                                        static_cast<uint32_t>(args.stages) * kStageBytes<kTileM>);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kGroupThreads) {
    give_registers<kCopierRegisters>();
    copy_tiles<kTileM>(args, &memory->copier, ring, thread);
  } else {
    take_registers<kMultiplierRegisters>();
    multiply_tiles<T, kTileM>(args, memory, ring, thread - kGroupThreads);
  }
#endif
}

// ------------------------------------------------------------------------------------------- host

using Kernel = void (*)(const WgmmaArgs);

template <int kTileM>
void run(const GroupedGemmParams& p, size_t per_block, Stream stream) {
  WgmmaArgs args = {};
  args.gemm = p;
  args.steps = static_cast<int>(ceil_div(p.k, kStepK));
  args.tiles_per_row = ceil_div(p.k / kBlockSize, kTileCols);
  args.scale_stack = ceil_div(p.n, kTileRows) * args.tiles_per_row * kTileBytes;
  args.wide = wide_stores(p);
  const size_t fixed = 1024 + sizeof(Memory<kTileM>);
  args.stages =
      static_cast<int>(std::min<size_t>(kMaxStages, (per_block - fixed) / kStageBytes<kTileM>));
  static_assert(kMinStages * kStageBytes<kTileM> + 1024 + sizeof(Memory<kTileM>) <= 227 * 1024);
  const Kernel kernel = p.a.type == DType::kFloat16 ? grouped_wgmma_kernel<__half, kTileM>
                                                    : grouped_wgmma_kernel<__nv_bfloat16, kTileM>;
  launch_persistent("grouped_gemm (wgmma)", kernel, most_items(p, kTileM, kTileN), kThreads,
                    fixed + args.stages * kStageBytes<kTileM>, 1, stream, args);
}

int attribute(cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, current_device().index), "cudaDeviceGetAttribute");
  return value;
}

// Whether what is loaded is the kernel: code for another target has an empty one in its place, and
// that needs next to no registers.
bool is_built() {
  cudaFuncAttributes found = {};
  const Kernel kernel = grouped_wgmma_kernel<__nv_bfloat16, 128>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)),
        "cudaFuncGetAttributes");
  return found.numRegs > 64;
}

}  // namespace

bool grouped_wgmma_available() { return current_device().cc_major == 9 && is_built(); }

void grouped_wgmma(const GroupedGemmParams& p, int64_t rows, Stream stream) {
  const auto per_block = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  grouped_zero(p, stream);
  if (rows <= 64) {
    run<64>(p, per_block, stream);
  } else {
    run<128>(p, per_block, stream);
  }
}

}  // namespace nvfp4::cuda
