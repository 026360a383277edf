// Grouped GEMM of dense operands for many rows a group, on Hopper: both sides from shared memory.
//
//   out = T(gamma * fma(alpha, acc, bias)),  acc = sum_k A[m, k] B[n, k]
//
// - A cluster of two blocks makes tiles of 256 rows x 256 columns, 64 along k at a time: each block
//   128 rows of its own, and the columns that both need are fetched by halves and sent to both.
// - In a block one warp finds the tiles and starts the copies; two warpgroups multiply 64 x 256
//   each. A tile reaches beyond its group: those rows and columns are computed and dropped.
// - Rows that are packed or gathered are unpacked to the workspace meanwhile, by the other warps of
//   the copier's warpgroup, and by the multipliers while the copies wait for rows.
// - While one warpgroup writes its sums the other goes on multiplying: they are some steps apart
//   from the first tile on.
// - Sums are FP32 in a fixed order: the same bytes in every run.
#include <limits>

#include "common.cuh"
#include "grouped_gemm.h"
#include "grouped_pieces.cuh"
#include "grouped_ring.cuh"
#include "grouped_schedule.cuh"
#include "hopper.cuh"
#include "tensor_copy.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kStepK = 64;
constexpr int kCluster = 2;
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kMultipliers = 2;     // warpgroups
constexpr int kThreads = (1 + kMultipliers) * kGroupThreads;
constexpr int kGroupRows = 64;
constexpr int kBlockRows = kMultipliers * kGroupRows;
constexpr int kTileM = kCluster * kBlockRows, kTileN = 256;
// Tiles left for a last round that occupies less than half of the clusters are cut along n, which
// makes two shorter rounds at most.
constexpr int kSliceN = 64, kSlices = kTileN / kSliceN, kSliceRounds = 2;
constexpr int kABytes = kBlockRows * kBoxBytes;
constexpr int kStageBytes = kABytes + kTileN * kBoxBytes;
constexpr int kStages = 4;
constexpr int kApart = 2;  // steps between the warpgroups at the start
// Tiles at work at the same time are about 8 x 8: that many rows of A and of B.
constexpr int kStrip = 8;

// Registers a thread: 168 x 384 are handed out as these.
constexpr int kCopierRegisters = 88, kMultiplierRegisters = 208;

// Named barriers; 0 is __syncthreads.
constexpr int kCopier = 1, kOneMultiplier = 2;

enum class Work : int { kTile, kSlice, kNone };

struct Memory {
  ScheduleMemory<kWarpSize> copier;
  uint64_t full[kStages], empty[kStages];
  // What begins with a stage: who waits for the stage reads it before it gives the stage back.
  GroupedTile tile[kStages];
  Work work[kStages];
  float2 bias[2][kMultipliers][kTileN / 2];
  unsigned
      starved;  // the copies wait for rows: said and asked by atomics, in no order with the rest
};

struct DenseArgs {
  CUtensorMap a, b, b_slice;
  GroupedGemmParams gemm;  // of the part's groups, of out's columns: pointers are there already
  GroupedPart part;
  bool a_of_part;
  int64_t out_pitch;
  int steps;
  bool wide;
  UnpackArgs unpack;
};

// The tiles, the last ones in slices where that is sooner done.
class DenseSchedule {
 public:
  __device__ DenseSchedule(const GroupedGemmParams& p, ScheduleMemory<kWarpSize>* memory, int lane,
                           RowWindow window)
      : schedule_(p, memory, lane, window) {
    const int64_t clusters = gridDim.x / kCluster,
                  total = schedule_.one_window() ? schedule_.items() : -1;
    const int64_t rest = total < 0 ? 0 : total % clusters;
    whole_ = rest > 0 && rest * kSlices <= kSliceRounds * clusters
                 ? total - rest
                 : std::numeric_limits<int64_t>::max();
  }

  __device__ Work find(int64_t item, GroupedTile& tile) {
    if (item < whole_) return schedule_.find(item, tile) ? Work::kTile : Work::kNone;
    if (!schedule_.find(whole_ + (item - whole_) / kSlices, tile)) return Work::kNone;
    tile.n += (item - whole_) % kSlices * kSliceN;
    return Work::kSlice;
  }

 private:
  Schedule<kWarpSize, kTileM, kTileN, NamedBarrier<kCopier, kWarpSize>, kStrip> schedule_;
  int64_t whole_;  // items before the slices
};

// Whether the rows that a block fetches for a tile are in the workspaces.
__device__ __forceinline__ bool rows_done(const DenseArgs& args, const GroupedTile& tile, int rank,
                                          int64_t n, int64_t a_origin) {
  const int64_t rows = tile.rows - rank * kBlockRows;
  if (args.unpack.a.out && rows > 0) {
    const int64_t row = tile.row - a_origin + rank * kBlockRows;
    if (!strip_done(args.unpack.a.done + a_strip(row, tile.group), rows)) return false;
  }
  if (args.unpack.b.out && n < args.gemm.n) {
    const int64_t first = n / kStripRows * kStripRows;
    return strip_done(args.unpack.b.done + b_strip(n, tile.group, args.gemm.n),
                      args.gemm.n - first);
  }
  return true;
}

// Until they are, for copies to see; the multipliers may help.
__device__ __forceinline__ void wait_for_rows(const DenseArgs& args, Memory* memory,
                                              const GroupedTile& tile, int rank, int64_t n,
                                              int64_t a_origin) {
  if (!rows_done(args, tile, rank, n, a_origin)) {
    atomicExch(&memory->starved, 1u);
    while (!rows_done(args, tile, rank, n, a_origin)) {
    }
  }
  atomicExch(&memory->starved, 0u);
  fence_async_proxy();
}
// For a warp.
__device__ __forceinline__ bool starved(Memory* memory, int lane) {
  const unsigned said = lane == 0 ? atomicAdd(&memory->starved, 0u) : 0;
  return __shfl_sync(kFullWarp, said, 0);
}

template <int kN>
__device__ __forceinline__ void copy_tile(const DenseArgs& args, Memory* memory, uint32_t ring,
                                          const GroupedTile& tile, int64_t a_origin,
                                          Place<kStages>& place) {
  constexpr int kPartN = kN / kCluster;  // columns that a block fetches
  const uint32_t full = shared_address(memory->full), empty = shared_address(memory->empty);
  const int rank = cluster_rank();
  const bool has_rows = tile.rows > rank * kBlockRows;
  const int row = static_cast<int>(tile.row - a_origin) + rank * kBlockRows;
  const int64_t n = tile.n + rank * kPartN;
  const int column = static_cast<int>(tile.group * args.gemm.n + n);
  if (args.unpack.next) wait_for_rows(args, memory, tile, rank, n, a_origin);
  for (int step = 0; step < args.steps; ++step) {
    const uint32_t stage = ring + static_cast<uint32_t>(place.stage) * kStageBytes;
    const uint32_t arrived = full + place.stage * 8;
    barrier_wait(empty + place.stage * 8, place.parity ^ 1);
    if (step == 0) {
      memory->tile[place.stage] = tile;
      memory->work[place.stage] = kN == kTileN ? Work::kTile : Work::kSlice;
    }
    barrier_expect(arrived, (has_rows ? kABytes : 0) + kN * kBoxBytes);
    if (has_rows) copy_box(stage, args.a, step * kStepK, row, arrived);
    copy_box_to((1u << kCluster) - 1, stage + kABytes + rank * kPartN * kBoxBytes,
                kN == kTileN ? args.b : args.b_slice, step * kStepK, column, arrived);
    place.next();
  }
}

__device__ __forceinline__ void copy_tiles(const DenseArgs& args, Memory* memory, uint32_t ring,
                                           const RowWindow& window, int lane) {
  DenseSchedule schedule(args.gemm, &memory->copier, lane, window);
  const int64_t a_origin = args.a_of_part ? window.begin : 0;
  Place<kStages> place;
  for (int64_t item = blockIdx.x / kCluster;; item += gridDim.x / kCluster) {
    GroupedTile tile;
    const Work work = schedule.find(item, tile);
    if (lane == 0 && work == Work::kTile) {
      copy_tile<kTileN>(args, memory, ring, tile, a_origin, place);
    } else if (lane == 0 && work == Work::kSlice) {
      copy_tile<kSliceN>(args, memory, ring, tile, a_origin, place);
    }
    if (work == Work::kNone) break;
  }
  if (lane != 0) return;
  barrier_wait(shared_address(memory->empty + place.stage), place.parity ^ 1);
  memory->work[place.stage] = Work::kNone;
  barrier_arrive(shared_address(memory->full + place.stage));
}

// Where one of a lane's two rows goes, and what it is multiplied with.
struct Target {
  int64_t row;  // -1: nowhere
  float gamma;
  bool missing;  // the row is zero

  __device__ Target(const GroupedGemmParams& p, const GroupedTile& tile, int m) {
    const bool inside = m < tile.rows;
    row = inside ? target_row(p, tile.row + m) : -1;
    missing = inside && source_row(p, tile.row + m) < 0;
    gamma = inside && p.gamma ? p.gamma[tile.row + m] : 1.0f;
  }
};

// NaN has bytes of its own.
template <typename Out>
__device__ __forceinline__ uint32_t canonical_pair(uint32_t pair) {
  constexpr bool kBf16 = std::is_same_v<Out, __nv_bfloat16>;
  constexpr uint32_t kInfinity = kBf16 ? 0x7F80u : 0x7C00u,
                     kNan = kBf16 ? kNanBFloat16 : kNanFloat16;
  if ((pair & 0x7FFFu) > kInfinity) pair = (pair & 0xFFFF0000u) | kNan;
  if ((pair >> 16 & 0x7FFFu) > kInfinity) pair = (pair & 0xFFFFu) | kNan << 16;
  return pair;
}

// A warp's 16 x kN sums to out. Lane (g, t) has rows g and g + 8 and columns 8 i + 2 t, + 1; four
// lanes exchange theirs, so that each has 16 bytes of out.
template <typename Out, int kN>
__device__ __forceinline__ void finish_wide(const DenseArgs& args, const GroupedTile& tile, int m,
                                            int t, const float2* bias, const float (&acc)[kN / 2]) {
  const GroupedGemmParams& p = args.gemm;
  const float alpha = group_alpha(p, tile.group);
  const Target targets[2] = {Target(p, tile, m), Target(p, tile, m + 8)};
  Out* rows[2];
  for (int h = 0; h < 2; ++h) {
    rows[h] = static_cast<Out*>(p.out) + targets[h].row * args.out_pitch + tile.n + 8 * t;
  }
  const int columns = static_cast<int>(min(p.n - tile.n, int64_t{kN})) - 8 * t;
  constexpr int kParts = kN / 32;
  uint32_t words[kParts][2][4];
  bool nan = false;
#pragma unroll
  for (int i = 0; i < kParts * 4; ++i) {
    const float2 b = bias[4 * i + t];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float gamma = targets[h].gamma;
      const float low = gamma * fma_rn(alpha, acc[4 * i + 2 * h], b.x);
      const float high = gamma * fma_rn(alpha, acc[4 * i + 2 * h + 1], b.y);
      words[i / 4][h][i % 4] = round_pair<Out>(low, high);
      nan |= low != low || high != high;
    }
  }
  if (nan) {
#pragma unroll
    for (int i = 0; i < kParts * 8; ++i) {
      uint32_t& word = words[i / 8][i / 4 % 2][i % 4];
      word = canonical_pair<Out>(word);
    }
  }
#pragma unroll
  for (int q = 0; q < kParts; ++q) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t (&four)[4] = words[q][h];
      transpose_four<1>(four, t);
      if (targets[h].row < 0 || 32 * q >= columns) continue;
      uint4 eight = make_uint4(four[0], four[1], four[2], four[3]);
      if (targets[h].missing) eight = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(rows[h] + 32 * q) = eight;
    }
  }
}

// The same for any type and alignment.
template <int kN>
__device__ __forceinline__ void finish_any(const DenseArgs& args, const GroupedTile& tile, int m,
                                           int t, const float2* bias, const float (&acc)[kN / 2]) {
  const GroupedGemmParams& p = args.gemm;
  const float alpha = group_alpha(p, tile.group);
  const Target targets[2] = {Target(p, tile, m), Target(p, tile, m + 8)};
#pragma unroll
  for (int i = 0; i < kN / 8; ++i) {
    const float2 b = bias[4 * i + t];
    const int64_t n = tile.n + 8 * i + 2 * t;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (targets[h].row < 0) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (n + c >= p.n) continue;
        const float v =
            targets[h].gamma * fma_rn(alpha, acc[4 * i + 2 * h + c], c == 0 ? b.x : b.y);
        store_one(p.out, p.out_type, targets[h].row * args.out_pitch + n + c,
                  targets[h].missing ? 0.0f : v);
      }
    }
  }
}

// All warps of all blocks that read a stage say so, to whoever fills it.
__device__ __forceinline__ void release_stage(Memory* memory, int stage, int lane) {
  if (lane < kCluster) barrier_arrive_cluster(shared_address(memory->empty) + stage * 8, lane);
}

// A warpgroup's 64 rows from the tile's row `first_row` on.
template <typename T, int kN>
__device__ __forceinline__ void multiply_tile(const DenseArgs& args, Memory* memory, uint32_t ring,
                                              const GroupedTile& tile, int group, int thread,
                                              int first_row, float2* bias, Place<kStages>& place) {
  const GroupedGemmParams& p = args.gemm;
  const uint32_t full = shared_address(memory->full);
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  float2 two;  // of bias, for the end
  {
    const int64_t n = tile.n + 2 * thread, at = tile.group * args.out_pitch + n;
    const auto one = [&](int c) {
      return p.bias && n + c < p.n ? load_as_float(p.bias, p.bias_type, at + c) : 0.0f;
    };
    two = {one(0), one(1)};
  }
  float acc[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[i] = 0.0f;
  int before = 0;
  for (int step = 0; step < args.steps; ++step) {
    const uint32_t stage = ring + static_cast<uint32_t>(place.stage) * kStageBytes;
    const uint32_t a = wgmma_descriptor_low(stage + group * kGroupRows * kBoxBytes);
    const uint32_t b = wgmma_descriptor_low(stage + kABytes);
    barrier_wait(full + place.stage * 8, place.parity);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kStepK / 16; ++s) {
      wgmma(acc, wgmma_descriptor_of(a + s * 2), wgmma_descriptor_of(b + s * 2), T{});
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release_stage(memory, before, lane);
    before = place.stage;
    place.next();
  }
  wgmma_wait<0>();
  pin_registers(acc);
  release_stage(memory, before, lane);
  bias[thread] = two;
  barrier_sync(kOneMultiplier + group, kGroupThreads);
  const int m = first_row + warp * 16 + lane / 4, t = lane % 4;
  if (!args.wide || p.out_type == DType::kFloat32) {
    finish_any<kN>(args, tile, m, t, bias, acc);
  } else if (p.out_type == DType::kBFloat16) {
    finish_wide<__nv_bfloat16, kN>(args, tile, m, t, bias, acc);
  } else {
    finish_wide<__half, kN>(args, tile, m, t, bias, acc);
  }
}

// Unpacks until a stage is full, for as long as the copies lack rows.
template <typename T>
__device__ __forceinline__ void help_until(const DenseArgs& args, Memory* memory,
                                           const RowWindow& window, uint32_t full, uint32_t parity,
                                           int lane) {
  PieceList list(args.gemm, args.unpack, window, lane);
  for (;;) {
    if (__all_sync(kFullWarp, barrier_try_wait(full, parity))) return;
    if (!starved(memory, lane)) continue;
    if (!unpack_next<T>(list, args.gemm, args.unpack, window, lane)) return;
  }
}

template <typename T>
__device__ __forceinline__ void multiply_tiles(const DenseArgs& args, Memory* memory, uint32_t ring,
                                               const RowWindow& window, int thread) {
  const uint32_t full = shared_address(memory->full);
  const int group = thread / kGroupThreads, of_group = thread % kGroupThreads;
  const int first_row = cluster_rank() * kBlockRows + group * kGroupRows;  // of the tile
  Place<kStages> place;
  bool apart = group == 0 || args.steps <= kApart;
  for (int turn = 0;;) {
    const uint32_t arrived = full + place.stage * 8;
    if (args.unpack.next && starved(memory, thread % kWarpSize)) {
      help_until<T>(args, memory, window, arrived, place.parity, thread % kWarpSize);
    }
    barrier_wait(arrived, place.parity);
    const Work work = memory->work[place.stage];
    if (work == Work::kNone) return;
    const GroupedTile tile = memory->tile[place.stage];
    if (!apart) barrier_wait(full + kApart * 8, 0);
    apart = true;
    if (tile.rows <= first_row) {
      for (int step = 0; step < args.steps; ++step) {
        barrier_wait(full + place.stage * 8, place.parity);
        __syncwarp();  // once two lanes have released the last stage, a phase may go by
        release_stage(memory, place.stage, thread % kWarpSize);
        place.next();
      }
      continue;
    }
    // A barrier is between the readers of one side and its next writers.
    float2* const bias = memory->bias[turn][group];
    turn ^= 1;
    if (work == Work::kSlice) {
      multiply_tile<T, kSliceN>(args, memory, ring, tile, group, of_group, first_row, bias, place);
    } else {
      multiply_tile<T, kTileN>(args, memory, ring, tile, group, of_group, first_row, bias, place);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_dense_kernel(const __grid_constant__ DenseArgs args) {
  if (NVFP4_WGMMA) {  // else an empty kernel: see kHasHopperKernels
    uint8_t* const shared = dynamic_shared();
    const uint32_t ring = (shared_address(shared) + 1023u) & ~1023u;
    Memory* const memory =
        reinterpret_cast<Memory*>(shared + (ring - shared_address(shared)) + kStages * kStageBytes);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(shared_address(&memory->full[i]), 1);
        barrier_init(shared_address(&memory->empty[i]),
                     kCluster * kMultipliers * kGroupThreads / kWarpSize);
      }
      memory->starved = args.unpack.next != nullptr;
      fence_barrier_init();
    }
    cluster_sync();
    const RowWindow window = window_of(args.part);
    if (thread < kGroupThreads) {
      give_registers<kCopierRegisters>();
      if (thread < kWarpSize) {
        copy_tiles(args, memory, ring, window, thread);
      } else if (args.unpack.next) {
        PieceList list(args.gemm, args.unpack, window, thread % kWarpSize);
        while (unpack_next<T>(list, args.gemm, args.unpack, window, thread % kWarpSize)) {
        }
      }
    } else {
      take_registers<kMultiplierRegisters>();
      multiply_tiles<T>(args, memory, ring, window, thread - kGroupThreads);
    }
    cluster_sync();  // the other block may still write to this one's memory
  }
}

UnpackArgs unpack_args(const GroupedGemmParams& p, const GroupedPart& part,
                       const DenseSides& sides) {
  UnpackArgs args = {};
  args.next = sides.counters;
  args.scale_tiles = ceil_div(p.k / kBlockSize, kTileCols);
  args.pitch = sides.unpack_a ? sides.a_pitch : sides.b_pitch;
  args.b.done = sides.counters + 1;
  args.a.done = args.b.done + part.groups * strips_of(sides.n);
  args.a.source = p.a;
  args.a.out = sides.unpack_a;
  if (sides.unpack_b == nullptr) return args;
  UnpackSide& b = args.b;
  b.out = sides.unpack_b;
  b.source = p.b;
  b.group_rows = p.n;
  b.group_scale_rows = p.b.swizzled ? round_up(p.n, kTileRows) : p.n;
  const int64_t row = part.first_group * b.group_rows + sides.n_begin;
  const int64_t scale_row = part.first_group * b.group_scale_rows + sides.n_begin;
  b.source.data = static_cast<const uint8_t*>(p.b.data) + row * (p.k / 2);
  b.source.scale += p.b.swizzled ? swizzled_offset(scale_row, 0, args.scale_tiles)
                                 : scale_row * (p.k / kBlockSize);
  return args;
}

}  // namespace

int64_t grouped_dense_counters(const GroupedPart& part, int64_t n) {
  return 1 + part.groups * strips_of(n) + a_strips(part.rows, part.groups);
}

void grouped_dense(const GroupedGemmParams& p, const GroupedPart& part, const DenseSides& sides,
                   Stream stream) {
  DenseArgs args = {};
  args.a = tensor_map(sides.a, 2, sides.a_rows, p.k, sides.a_pitch * 2, kBlockRows);
  args.b = tensor_map(sides.b, 2, part.groups * sides.n, p.k, sides.b_pitch * 2, kTileN / kCluster);
  args.b_slice =
      tensor_map(sides.b, 2, part.groups * sides.n, p.k, sides.b_pitch * 2, kSliceN / kCluster);
  args.part = part;
  args.a_of_part = sides.a_of_part;
  args.out_pitch = p.n;
  args.steps = static_cast<int>(ceil_div(p.k, kStepK));
  GroupedGemmParams& g = args.gemm;
  g = p;
  g.groups = part.groups;
  g.n = sides.n;
  g.offs = part.ends + part.first_group + 1;
  g.out = static_cast<uint8_t*>(p.out) + sides.n_begin * size_of(p.out_type);
  if (p.group_alpha) g.group_alpha = p.group_alpha + part.first_group;
  if (p.bias) {
    g.bias = static_cast<const uint8_t*>(p.bias) +
             (part.first_group * p.n + sides.n_begin) * size_of(p.bias_type);
  }
  if (sides.unpack_a || sides.unpack_b) args.unpack = unpack_args(p, part, sides);
  args.wide = wide_stores(p) && sides.n_begin % 8 == 0 && sides.n % 8 == 0;
  constexpr size_t kBytes = 1024 + kStages * kStageBytes + sizeof(Memory);
  static_assert(kBytes <= 227 * 1024);
  const int64_t rows = std::min(part.rows, p.m), tiles_n = ceil_div(sides.n, kTileN);
  int64_t items = (rows / kTileM + std::min(part.groups, rows)) * tiles_n;
  // Blocks without a tile unpack too.
  if (args.unpack.next) items = std::numeric_limits<int32_t>::max();
  launch_persistent("grouped_gemm (dense)",
                    sides.type == DType::kFloat16 ? grouped_dense_kernel<__half>
                                                  : grouped_dense_kernel<__nv_bfloat16>,
                    items, kThreads, kBytes, 1, stream, args, kCluster);
}

}  // namespace nvfp4::cuda
