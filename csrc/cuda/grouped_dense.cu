// Grouped GEMM of dense operands for many rows a group, on Hopper: both sides from shared memory.
//
//   out = T(gamma * fma(alpha, acc, bias)),  acc = sum_k A[m, k] B[n, k]
//
// - A cluster of two blocks makes tiles of 256 rows x 256 columns, 64 along k at a time: each block
//   128 rows of its own, and the columns that both need are fetched by halves and sent to both.
// - In a block one warp starts the copies; two warpgroups multiply 64 x 256 each. A tile reaches
//   beyond its group: those rows and columns are computed and dropped.
// - While one warpgroup writes its sums the other goes on multiplying: they are some steps apart
//   from the first tile on.
// - Sums are FP32 in a fixed order: the same bytes in every run.
#include "common.cuh"
#include "grouped_gemm.h"
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
constexpr int kPartN = kTileN / kCluster;  // columns that a block fetches
constexpr int kABytes = kBlockRows * kBoxBytes, kPartBytes = kPartN * kBoxBytes;
constexpr int kStageBytes = kABytes + kCluster * kPartBytes;
constexpr int kStages = 4;
constexpr int kApart = 2;  // steps between the warpgroups at the start
// Tiles at work at the same time are about 8 x 8: that many rows of A and of B.
constexpr int kStrip = 8;

// Registers a thread: 168 x 384 are handed out as these.
constexpr int kCopierRegisters = 56, kMultiplierRegisters = 224;

// Named barriers; 0 is __syncthreads.
constexpr int kCopier = 1, kAllMultipliers = 2, kOneMultiplier = 3;

struct Memory {
  ScheduleMemory<kWarpSize> copier;
  ScheduleMemory<kMultipliers * kGroupThreads> multiplier;
  uint64_t full[kStages], empty[kStages];
  float2 bias[kMultipliers][kTileN / 2];
};

struct DenseArgs {
  CUtensorMap a, b;
  GroupedGemmParams gemm;  // of the part's groups, of out's columns: pointers are there already
  GroupedPart part;
  bool a_of_part;
  int64_t out_pitch;
  int steps;
  bool wide;
};

__device__ __forceinline__ void copy_tiles(const DenseArgs& args, Memory* memory, uint32_t ring,
                                           const RowWindow& window, int lane) {
  Schedule<kWarpSize, kTileM, kTileN, NamedBarrier<kCopier, kWarpSize>, kStrip> schedule(
      args.gemm, &memory->copier, lane, window);
  const uint32_t full = shared_address(memory->full), empty = shared_address(memory->empty);
  const int rank = cluster_rank();
  const int64_t a_origin = args.a_of_part ? window.begin : 0;
  Place<kStages> place;
  GroupedTile tile;
  for (int64_t item = blockIdx.x / kCluster; schedule.find(item, tile);
       item += gridDim.x / kCluster) {
    if (lane != 0) continue;
    const bool has_rows = tile.rows > rank * kBlockRows;
    const int row = static_cast<int>(tile.row - a_origin) + rank * kBlockRows;
    const int column = static_cast<int>(tile.group * args.gemm.n + tile.n) + rank * kPartN;
    for (int step = 0; step < args.steps; ++step) {
      const uint32_t stage = ring + static_cast<uint32_t>(place.stage) * kStageBytes;
      const uint32_t arrived = full + place.stage * 8;
      barrier_wait(empty + place.stage * 8, place.parity ^ 1);
      barrier_expect(arrived, has_rows ? kStageBytes : kStageBytes - kABytes);
      if (has_rows) copy_box(stage, args.a, step * kStepK, row, arrived);
      copy_box_to((1u << kCluster) - 1, stage + kABytes + rank * kPartBytes, args.b, step * kStepK,
                  column, arrived);
      place.next();
    }
  }
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

// A pair as two 16-bit results.
template <typename Out>
__device__ __forceinline__ uint32_t round_two(float low, float high) {
  if (low != low || high != high) {  // NaN has bytes of its own
    return bits_of(from_float<Out>(low)) | bits_of(from_float<Out>(high)) << 16;
  }
  return round_pair<Out>(low, high);
}

// A warp's 16 x 256 sums to out. Lane (g, t) has rows g and g + 8 and columns 8 i + 2 t, + 1; four
// lanes exchange theirs, so that each has 16 bytes of out.
template <typename Out>
__device__ __forceinline__ void finish_wide(const DenseArgs& args, const GroupedTile& tile, int m,
                                            int t, const float2* bias,
                                            const float (&acc)[kTileN / 2]) {
  const GroupedGemmParams& p = args.gemm;
  const float alpha = group_alpha(p, tile.group);
  const Target targets[2] = {Target(p, tile, m), Target(p, tile, m + 8)};
  Out* rows[2];
  for (int h = 0; h < 2; ++h) {
    rows[h] = static_cast<Out*>(p.out) + targets[h].row * args.out_pitch + tile.n + 8 * t;
  }
  const int columns = static_cast<int>(min(p.n - tile.n, int64_t{kTileN})) - 8 * t;
#pragma unroll
  for (int q = 0; q < kTileN / 32; ++q) {
    uint32_t words[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 b = bias[16 * q + 4 * j + t];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* sums = &acc[16 * q + 4 * j + 2 * h];
        const float gamma = targets[h].gamma;
        words[h][j] = round_two<Out>(gamma * fma_rn(alpha, sums[0], b.x),
                                     gamma * fma_rn(alpha, sums[1], b.y));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      transpose_four<1>(words[h], t);
      if (targets[h].row < 0 || 32 * q >= columns) continue;
      uint4 eight = make_uint4(words[h][0], words[h][1], words[h][2], words[h][3]);
      if (targets[h].missing) eight = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(rows[h] + 32 * q) = eight;
    }
  }
}

// The same for any type and alignment.
__device__ __forceinline__ void finish_any(const DenseArgs& args, const GroupedTile& tile, int m,
                                           int t, const float2* bias,
                                           const float (&acc)[kTileN / 2]) {
  const GroupedGemmParams& p = args.gemm;
  const float alpha = group_alpha(p, tile.group);
  const Target targets[2] = {Target(p, tile, m), Target(p, tile, m + 8)};
#pragma unroll
  for (int i = 0; i < kTileN / 8; ++i) {
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

template <typename T>
__device__ __forceinline__ void multiply_tiles(const DenseArgs& args, Memory* memory, uint32_t ring,
                                               const RowWindow& window, int thread) {
  const GroupedGemmParams& p = args.gemm;
  constexpr int kAll = kMultipliers * kGroupThreads;
  Schedule<kAll, kTileM, kTileN, NamedBarrier<kAllMultipliers, kAll>, kStrip> schedule(
      p, &memory->multiplier, thread, window);
  const uint32_t full = shared_address(memory->full), empty = shared_address(memory->empty);
  const int group = thread / kGroupThreads, warp = thread % kGroupThreads / kWarpSize;
  const int lane = thread % kWarpSize;
  const int first_row = cluster_rank() * kBlockRows + group * kGroupRows;  // of the tile
  Place<kStages> place;
  GroupedTile tile;
  bool apart = group == 0 || args.steps <= kApart;
  for (int64_t item = blockIdx.x / kCluster; schedule.find(item, tile);
       item += gridDim.x / kCluster) {
    if (!apart) barrier_wait(full + kApart * 8, 0);
    apart = true;
    // All warps of all blocks that read a stage say so, to whoever fills it.
    const auto release = [&](int stage) {
      if (lane < kCluster) barrier_arrive_cluster(empty + stage * 8, lane);
    };
    if (tile.rows <= first_row) {
      for (int step = 0; step < args.steps; ++step) {
        barrier_wait(full + place.stage * 8, place.parity);
        release(place.stage);
        place.next();
      }
      continue;
    }
    float2* const bias = memory->bias[group];
    {
      const int64_t n = tile.n + 2 * (thread % kGroupThreads), at = tile.group * args.out_pitch + n;
      const auto one = [&](int c) {
        return p.bias && n + c < p.n ? load_as_float(p.bias, p.bias_type, at + c) : 0.0f;
      };
      bias[thread % kGroupThreads] = {one(0), one(1)};
    }
    barrier_sync(kOneMultiplier + group, kGroupThreads);
    float acc[kTileN / 2];
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) acc[i] = 0.0f;
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
      if (step > 0) release(before);
      before = place.stage;
      place.next();
    }
    wgmma_wait<0>();
    pin_registers(acc);
    if (args.steps > 0) release(before);
    const int m = first_row + warp * 16 + lane / 4, t = lane % 4;
    if (!args.wide || p.out_type == DType::kFloat32) {
      finish_any(args, tile, m, t, bias, acc);
    } else if (p.out_type == DType::kBFloat16) {
      finish_wide<__nv_bfloat16>(args, tile, m, t, bias, acc);
    } else {
      finish_wide<__half>(args, tile, m, t, bias, acc);
    }
    barrier_sync(kOneMultiplier + group, kGroupThreads);  // `bias` is free again
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_dense_kernel(const __grid_constant__ DenseArgs args) {
  if (NVFP4_WGMMA) {  // else an empty kernel: see grouped_hopper_available
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
      fence_barrier_init();
    }
    cluster_sync();
    const RowWindow window = window_of(args.part);
    if (thread < kGroupThreads) {
      give_registers<kCopierRegisters>();
      if (thread < kWarpSize) copy_tiles(args, memory, ring, window, thread);
    } else {
      take_registers<kMultiplierRegisters>();
      multiply_tiles<T>(args, memory, ring, window, thread - kGroupThreads);
    }
    cluster_sync();  // the other block may still write to this one's memory
  }
}

}  // namespace

void grouped_dense(const GroupedGemmParams& p, const GroupedPart& part, const DenseSides& sides,
                   Stream stream) {
  DenseArgs args = {};
  args.a = tensor_map(sides.a, 2, sides.a_rows, p.k, sides.a_pitch * 2, kBlockRows);
  args.b = tensor_map(sides.b, 2, part.groups * sides.n, p.k, sides.b_pitch * 2, kPartN);
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
  args.wide = wide_stores(p) && sides.n_begin % 8 == 0 && sides.n % 8 == 0;
  constexpr size_t kBytes = 1024 + kStages * kStageBytes + sizeof(Memory);
  static_assert(kBytes <= 227 * 1024);
  const int64_t rows = std::min(part.rows, p.m), tiles_n = ceil_div(sides.n, kTileN);
  const int64_t items = (rows / kTileM + std::min(part.groups, rows)) * tiles_n;
  launch_persistent("grouped_gemm (dense)",
                    sides.type == DType::kFloat16 ? grouped_dense_kernel<__half>
                                                  : grouped_dense_kernel<__nv_bfloat16>,
                    items, kThreads, kBytes, 1, stream, args, kCluster);
}

}  // namespace nvfp4::cuda
