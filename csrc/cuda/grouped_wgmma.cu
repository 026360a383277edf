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
//   copying warpgroup rearranges nibbles on the way, so that a lane reads its eight bytes at once
//   and in the order that decodes with the fewest instructions. It brings the scales to 16 bits,
//   too: each is used by four lanes.
// - A is wgmma's shared operand, copied by cp.async row by row, so rows may come from anywhere.
// - Stages are handed over by named barriers; the copying side runs ahead across tiles. Codes and
//   scales pass through a ring of each copying thread's own, so that several steps of them are on
//   their way: that is what a few rows a group need, where the weights' bytes are the limit.
// - Sums are FP32 in a fixed order: the same bytes in every run. A NaN scale of row n reaches row n
//   of B's products only.
#include "common.cuh"
#include "decode.cuh"
#include "grouped_gemm.h"
#include "grouped_schedule.cuh"
#include "hopper.cuh"

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
// Of a stage: words for t = 0 ... 3 of every row for the first 32 of k, then for the others. The
// gap puts a row's two halves in different banks.
constexpr int kHalfBytes = kTileN * kVectorBytes, kHalfGap = 64;
constexpr int kRowScales = kTileCols * 2;  // bytes of a weight row, as 16-bit values
constexpr int kWeightBytes = (2 * kHalfBytes + kHalfGap + kTileN * kRowScales + 1023) / 1024 * 1024;
constexpr int kScalesAt = 2 * kHalfBytes + kHalfGap;
constexpr int kRawVectors = kCodeBytes / kVectorBytes / kGroupThreads;  // of codes, a thread
constexpr int kScaleThreads = kMultipliers * kTileBytes / kVectorBytes;
constexpr int kRawBytes = (kRawVectors * kGroupThreads + kScaleThreads) * kVectorBytes;
constexpr int kOutPitch = kGroupRows + 8;  // 16-bit results; spreads a fragment's rows over banks
constexpr int kQueue = 8;                  // tiles whose first codes are under way
constexpr int kMaxStages = 5;

// A tile of few rows is bound by memory: more of it under way.
template <int kTileM>
struct Depth {
  static constexpr int kStages = kTileM <= 64 ? 5 : 4;
  static constexpr int kAhead = kStages - 2;  // steps of A under way when the next one is issued
  static constexpr int kRaw = kAhead + 1;     // the same of codes and scales
  static_assert(kStages <= kMaxStages && kRaw < kQueue && kRaw - 1 <= 4);
};

// Registers a thread: 168 x 384 are handed out as these.
constexpr int kCopierRegisters = 88, kMultiplierRegisters = 208;

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
  GroupedTile queue[kQueue];
  bool queued[kQueue];  // false: there is no such tile, all are done
  float gamma[kMultipliers][kTileM];
  alignas(16) uint16_t out[kMultipliers][kTileM * kOutPitch];
  alignas(16) uint8_t raw[Depth<kTileM>::kRaw][kRawBytes];
};

template <int kTileM>
constexpr uint32_t kStageBytes = kTileM * kStepK * 2 + kWeightBytes;

struct WgmmaArgs {
  GroupedGemmParams gemm;
  int steps;
  int64_t tiles_per_row;  // of B's scales
  int64_t scale_stack;    // bytes of one group's scales
  bool wide;
};

// ------------------------------------------------------------------------------------ the copiers

// 32 codes in order -> words for lanes t = 0 ... 3: nibbles i and i + 4 of word t are elements
// 8 i + 2 t and 8 i + 2 t + 1.
__device__ __forceinline__ uint4 arrange(uint4 v) {
  constexpr uint32_t kLow = 0x0F0F0F0Fu;
  const uint32_t even01 = bit_select(kLow, v.x, v.y << 4), odd01 = bit_select(kLow, v.x >> 4, v.y);
  const uint32_t even23 = bit_select(kLow, v.z, v.w << 4), odd23 = bit_select(kLow, v.z >> 4, v.w);
  // Bytes t of the four, in word t.
  const uint32_t even_low = permute_bytes(even01, even23, 0x5140);
  const uint32_t even_high = permute_bytes(even01, even23, 0x7362);
  const uint32_t odd_low = permute_bytes(odd01, odd23, 0x5140);
  const uint32_t odd_high = permute_bytes(odd01, odd23, 0x7362);
  return make_uint4(
      permute_bytes(even_low, odd_low, 0x5410), permute_bytes(even_low, odd_low, 0x7632),
      permute_bytes(even_high, odd_high, 0x5410), permute_bytes(even_high, odd_high, 0x7632));
}

// A copying thread's codes and scales of a tile: half a step of rows thread / 2 + 64 i, so that two
// lanes read 32 consecutive bytes; and for half the threads the scales of four rows.
struct WeightSource {
  const uint8_t* codes[kRawVectors];
  const uint8_t* scale;

  __device__ void start(const WgmmaArgs& args, const GroupedTile& tile, int thread) {
    const GroupedGemmParams& p = args.gemm;
#pragma unroll
    for (int i = 0; i < kRawVectors; ++i) {
      // A row past the end is read as the last one, and its result dropped.
      const int64_t n = min(tile.n + thread / 2 + i * (kGroupThreads / 2), p.n - 1);
      codes[i] = static_cast<const uint8_t*>(p.b.data) + (tile.group * p.n + n) * (p.k / 2) +
                 thread % 2 * kVectorBytes;
    }
    constexpr int kEach = kTileBytes / kVectorBytes;
    const int64_t scale_tile =
        min(tile.n / kTileRows + thread / kEach % kMultipliers, (p.n - 1) / kTileRows);
    scale = p.b.scale + tile.group * args.scale_stack +
            scale_tile * args.tiles_per_row * kTileBytes + thread % kEach * kVectorBytes;
  }

  __device__ __forceinline__ void copy(const WgmmaArgs& args, uint32_t raw, int step,
                                       int thread) const {
    // Rows are multiples of 16 bytes: a vector is inside or outside. Where it is outside nothing is
    // read; the address stays inside the row all the same.
    const int64_t offset = int64_t{step} * kRowCodes;
    const bool inside = offset + thread % 2 * kVectorBytes < args.gemm.k / 2;
#pragma unroll
    for (int i = 0; i < kRawVectors; ++i) {
      copy_async(raw + static_cast<uint32_t>(i * kGroupThreads + thread) * kVectorBytes,
                 codes[i] + (inside ? offset : 0), inside ? kVectorBytes : 0);
    }
    if (thread < kScaleThreads) {
      copy_async(raw + static_cast<uint32_t>(kRawVectors * kGroupThreads + thread) * kVectorBytes,
                 scale + int64_t{step} * kTileBytes, kVectorBytes);
    }
  }
};

// What has arrived in the thread's ring, as the multipliers want it.
template <typename T>
__device__ __forceinline__ void arrange_weights(const WgmmaArgs& args, uint32_t raw,
                                                uint32_t weights, int step, int thread) {
#pragma unroll
  for (int i = 0; i < kRawVectors; ++i) {
    const uint4 v =
        load_shared(raw + static_cast<uint32_t>(i * kGroupThreads + thread) * kVectorBytes);
    const int row = thread / 2 + i * (kGroupThreads / 2);
    store_shared(
        weights + thread % 2 * (kHalfBytes + kHalfGap) + static_cast<uint32_t>(row) * kVectorBytes,
        arrange(v));
  }
  if (thread >= kScaleThreads) return;
  const uint4 v =
      load_shared(raw + static_cast<uint32_t>(kRawVectors * kGroupThreads + thread) * kVectorBytes);
  uint32_t rows[kRowsPerLane] = {v.x, v.y, v.z, v.w};
  const int64_t left = args.gemm.k / kBlockSize - int64_t{step} * kTileCols;
  uint32_t out[2 * kRowsPerLane];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    // The row's end: padding counts as 0 whatever it is.
    if (left < kTileCols) rows[j] &= 0xFFFFFFFFu >> (8 * (kTileCols - static_cast<int>(left)));
    for (int h = 0; h < 2; ++h) {
      uint32_t pairs[2];
      scale_pairs(rows[j] >> (16 * h), pairs, T{});
      out[2 * j + h] = permute_bytes(pairs[0], pairs[1], 0x5410);
    }
  }
  const uint32_t to =
      weights + kScalesAt + static_cast<uint32_t>(thread) * kRowsPerLane * kRowScales;
  store_shared(to, make_uint4(out[0], out[1], out[2], out[3]));
  store_shared(to + kVectorBytes, make_uint4(out[4], out[5], out[6], out[7]));
}

// A copying thread's part of A's rows of a tile.
template <int kTileM>
struct RowSource {
  static constexpr int kEach = kTileM * kRowVectors / kGroupThreads;
  const uint16_t* a[kEach];  // null: this row is zero

  __device__ void start(const WgmmaArgs& args, const GroupedTile& tile, int thread) {
    const GroupedGemmParams& p = args.gemm;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int m = (thread + i * kGroupThreads) / kRowVectors;
      const int64_t from = m < tile.rows ? source_row(p, tile.row + m) : -1;
      a[i] = from < 0 ? nullptr
                      : static_cast<const uint16_t*>(p.a.data) + from * p.a.row_stride +
                            thread % kRowVectors * (kVectorBytes / 2);
    }
  }

  __device__ __forceinline__ void copy(const WgmmaArgs& args, uint32_t stage, int step,
                                       int thread) const {
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
  }
};

template <int kCount>
__device__ __forceinline__ int next_of(int slot) {
  return slot + 1 == kCount ? 0 : slot + 1;
}

template <typename T, int kTileM>
__device__ __forceinline__ void copy_tiles(const WgmmaArgs& args, Memory<kTileM>* memory,
                                           uint32_t ring, int thread) {
  using D = Depth<kTileM>;
  Schedule<kGroupThreads, kTileM, kTileN, NamedBarrier<kCopiers, kGroupThreads>> schedule(
      args.gemm, &memory->copier, thread);
  const uint32_t raw_ring = shared_address(memory->raw[0]);

  // Codes and scales, D::kRaw steps ahead of A.
  WeightSource weights;
  int64_t item = blockIdx.x;
  int raw_step = 0, raw_tile = 0, raw_slot = 0;
  bool more = true;
  const auto copy_weights = [&] {
    if (raw_step == 0 && more) {
      GroupedTile tile;
      more = schedule.find(item, tile);
      item += gridDim.x;
      if (more) weights.start(args, tile, thread);
      if (thread == 0) {
        if (more) memory->queue[raw_tile % kQueue] = tile;
        memory->queued[raw_tile % kQueue] = more;
      }
      ++raw_tile;
    }
    if (!more) return;
    weights.copy(args, raw_ring + static_cast<uint32_t>(raw_slot) * kRawBytes, raw_step, thread);
    raw_step = raw_step + 1 == args.steps ? 0 : raw_step + 1;
    raw_slot = next_of<D::kRaw>(raw_slot);
  };
  for (int i = 0; i < D::kRaw; ++i) {
    copy_weights();
    commit_copies();
  }

  RowSource<kTileM> rows;
  int64_t issued = 0;
  int stage = 0, ready = 0, slot = 0;  // to be filled, to be handed over, of codes: next
  const auto hand_over = [&] {
    fence_shared_for_wgmma();
    barrier_arrive(kFull + ready, kThreads);
    ready = next_of<D::kStages>(ready);
  };
  for (int done = 0;; ++done) {
    barrier_sync(kCopiers, kGroupThreads);  // the queue's entry is written
    if (!memory->queued[done % kQueue]) break;
    rows.start(args, memory->queue[done % kQueue], thread);
    for (int step = 0; step < args.steps; ++step) {
      const uint32_t target = ring + static_cast<uint32_t>(stage) * kStageBytes<kTileM>;
      if (issued >= D::kStages) barrier_sync(kEmpty + stage, kThreads);
      wait_copies(D::kRaw - 1);
      arrange_weights<T>(args, raw_ring + static_cast<uint32_t>(slot) * kRawBytes,
                         target + kTileM * kStepK * 2, step, thread);
      slot = next_of<D::kRaw>(slot);
      rows.copy(args, target, step, thread);
      copy_weights();
      commit_copies();  // an empty group keeps the count
      if (issued >= D::kAhead) {
        wait_copies(D::kAhead);
        hand_over();
      }
      ++issued;
      stage = next_of<D::kStages>(stage);
    }
  }
  wait_copies(0);
  for (int64_t i = min(issued, int64_t{D::kAhead}); i > 0; --i) hand_over();
  // Every hand-over has its answer: nobody waits, and no barrier is left half full.
  int oldest = issued < D::kStages ? 0 : stage;
  for (int64_t i = min(issued, int64_t{D::kStages}); i > 0; --i) {
    barrier_sync(kEmpty + oldest, kThreads);
    oldest = next_of<D::kStages>(oldest);
  }
  if (!args.gemm.scatter) {
    zero_rows(args.gemm, schedule.rows_end(), kGroupThreads, thread, args.wide);
  }
}

// -------------------------------------------------------------------------------- the multipliers

template <typename Out>
__device__ __forceinline__ uint16_t bits16(float v) {
  return static_cast<uint16_t>(bits_of(from_float<Out>(v)));
}

// A warpgroup's 128 x kTileM sums to out. 16-bit results go through shared memory, so that what a
// row of out gets is consecutive; an FP32 sector is one fragment's eight rows already.
template <typename T, int kTileM>
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
      const float v = factor * fma_rn(alpha, acc[pair][i] * (1.0f / kSplitUnit<T>), bias[j]);
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
  const uint32_t my_codes =
      kTileM * kStepK * 2 +
      static_cast<uint32_t>(group * kGroupRows + warp * 8 + g) * kVectorBytes + t * 4;
  const uint32_t my_scales =
      kTileM * kStepK * 2 + kScalesAt +
      static_cast<uint32_t>(group * kGroupRows + (warp * 8 + g) * 4) * kRowScales;
  constexpr int kAll = kMultipliers * kGroupThreads;
  Schedule<kAll, kTileM, kTileN, NamedBarrier<kAllMultipliers, kAll>> schedule(
      p, &memory->multiplier, thread);
  GroupedTile tile;
  int stage = 0, before = 0;
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
      uint32_t codes[kRowsPerLane][2];
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        for (int h = 0; h < 2; ++h) {
          codes[j][h] = load_shared_word(base + my_codes + h * (kHalfBytes + kHalfGap) +
                                         j * 32 * kVectorBytes);
        }
      }
      const uint4 scales01 = load_shared(base + my_scales);  // of rows j = 0 and 1
      const uint4 scales23 = load_shared(base + my_scales + kVectorBytes);
      const uint32_t scales[kRowsPerLane][2] = {{scales01.x, scales01.y},
                                                {scales01.z, scales01.w},
                                                {scales23.x, scales23.y},
                                                {scales23.z, scales23.w}};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kRowsPerLane; ++j) {
          uint32_t pairs[4];
          place_split(codes[j][half], pairs, T{});
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const uint32_t scale = permute_bytes(scales[j][half], 0, s ? 0x3232 : 0x1010);
            for (int x = 0; x < 2; ++x) {
              fragment[half][j / 2][s][2 * x + j % 2] = multiply_pair(pairs[2 * s + x], scale, T{});
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
      stage = next_of<Depth<kTileM>::kStages>(stage);
    }
    wgmma_wait<0>();
    pin_registers(acc[0]);
    pin_registers(acc[1]);
    barrier_arrive(kEmpty + before, kThreads);
    finish<T, kTileM>(args, tile, group, in_group, memory->gamma[group], memory->out[group], acc);
  }
}

template <typename T, int kTileM>
__global__ void __launch_bounds__(kThreads, 1) grouped_wgmma_kernel(const WgmmaArgs args) {
  if (NVFP4_WGMMA) {  // else an empty kernel, see is_built
    uint8_t* const shared = dynamic_shared();
    const uint32_t ring = (shared_address(shared) + 1023u) & ~1023u;
    auto* const memory = reinterpret_cast<Memory<kTileM>*>(
        shared + (ring - shared_address(shared)) + Depth<kTileM>::kStages * kStageBytes<kTileM>);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kGroupThreads) {
      give_registers<kCopierRegisters>();
      copy_tiles<T, kTileM>(args, memory, ring, thread);
    } else {
      take_registers<kMultiplierRegisters>();
      multiply_tiles<T, kTileM>(args, memory, ring, thread - kGroupThreads);
    }
  }
}

// ------------------------------------------------------------------------------------------- host

using Kernel = void (*)(const WgmmaArgs);

template <int kTileM>
void run(const GroupedGemmParams& p, Stream stream) {
  WgmmaArgs args = {};
  args.gemm = p;
  args.steps = static_cast<int>(ceil_div(p.k, kStepK));
  args.tiles_per_row = ceil_div(p.k / kBlockSize, kTileCols);
  args.scale_stack = ceil_div(p.n, kTileRows) * args.tiles_per_row * kTileBytes;
  args.wide = wide_stores(p);
  constexpr size_t kBytes =
      1024 + Depth<kTileM>::kStages * kStageBytes<kTileM> + sizeof(Memory<kTileM>);
  static_assert(kBytes <= 227 * 1024);
  const Kernel kernel = p.a.type == DType::kFloat16 ? grouped_wgmma_kernel<__half, kTileM>
                                                    : grouped_wgmma_kernel<__nv_bfloat16, kTileM>;
  launch_persistent("grouped_gemm (wgmma)", kernel, most_items(p, kTileM, kTileN), kThreads, kBytes,
                    1, stream, args);
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
  grouped_zero(p, stream);
  if (rows <= 64) {
    run<64>(p, stream);
  } else {
    run<128>(p, stream);
  }
}

}  // namespace nvfp4::cuda
