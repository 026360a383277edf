// Grouped GEMM for few rows a group and packed weights: reads the 4-bit weights once, decodes them
// in registers. A is dense, or has been decoded (grouped_gemm.cpp).
//
// Bound by the bandwidth of B's codes and scales, as gemm_small_m is, and built like it:
// - B goes from memory through a per-thread shared-memory pipeline (cp.async: a thread reads back
//   only what it copied itself) into registers, 16 bytes of codes a row at a time.
// - A warp multiplies 32 rows of B: n = 128 tile + 8 strip + g + 32 j for g < 8, j < 4. Those are
//   the rows whose scales for 64 elements of k are 16 consecutive bytes g of the 128x4 layout.
// - B is the 16-row side of mma.m16n8k16, A the 8-column side. Lane (g, t) holds 32 consecutive k
// of
//   its rows; A's lane reads the same k from shared memory.
// - A warp goes through all of k alone, so nothing is added up between warps. What keeps memory
// busy
//   is the pipeline, which runs across tiles: while one is finished, the next one's weights come.
#include "common.cuh"
#include "decode.cuh"
#include "grouped_gemm.h"
#include "grouped_schedule.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kStepK = 128;
constexpr int kStepBytes = kStepK / 2;  // of a row's codes
constexpr int kStepTiles = kStepK / kBlockSize / kTileCols;
constexpr int kRowVectors = kStepK * 2 / kVectorBytes;  // of A's 16-bit values, a row
constexpr int kLaneWords = 4;                           // of eight codes, consecutive k
constexpr int kRowsPerLane = 4;                         // j
constexpr int kStripsPerTile = kTileRows / 32;
constexpr int kQueue = 8;                      // tiles whose first step is under way
constexpr int kMinStages = 3, kMaxStages = 6;  // wait_copies takes up to 4 pending
static_assert(kMaxStages - 2 <= 4 && kMaxStages <= kQueue);

template <int kThreads>
struct Memory {
  ScheduleMemory<kThreads> schedule;
  GroupedTile queue[kQueue];
  bool queued[kQueue];  // false: there is no such tile, all are done
};

struct SmallArgs {
  GroupedGemmParams gemm;
  int stages, steps;
  int64_t tiles_per_row;  // of B's scales
  int64_t scale_stack;    // bytes of one group's scales
};

// Vector v of A's row m in a stage. The exclusive ors spread a quarter-warp's reads (two rows, four
// lanes 64 bytes apart) over all banks.
__device__ __forceinline__ uint32_t activation_slot(int m, int v) {
  return static_cast<uint32_t>(m * kRowVectors + (v ^ ((v >> 3) & 1) ^ ((m & 1) << 1))) *
         kVectorBytes;
}

// One tile as its copies need it: this thread's rows of B and of A.
template <int kWarps, int kMTiles>
struct Source {
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kEach = kMTiles * 8 * kRowVectors / kThreads;  // vectors of A a thread
  static_assert(kEach * kThreads == kMTiles * 8 * kRowVectors);

  const uint8_t* codes;        // of row j = 0, at this lane's 16 bytes of step 0
  uint32_t row[kRowsPerLane];  // row j's distance from there
  const uint8_t* scale;        // 16 bytes of the scale tile that this lane uses in step 0
  const uint16_t* a[kEach];    // null: this row is zero

  __device__ void start(const SmallArgs& args, const GroupedTile& tile) {
    const GroupedGemmParams& p = args.gemm;
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / kWarpSize, g = thread % kWarpSize / 4, t = thread % 4;
    const int64_t pitch = p.k / 2;
    // A row past the end is read as the last one, and its result dropped.
    const int64_t scale_tile =
        min(tile.n / kTileRows + warp / kStripsPerTile, (p.n - 1) / kTileRows);
    const int in_tile = warp % kStripsPerTile * 8 + g;
    const int64_t n = min(scale_tile * kTileRows + in_tile, p.n - 1);
    codes =
        static_cast<const uint8_t*>(p.b.data) + (tile.group * p.n + n) * pitch + t * kVectorBytes;
    for (int j = 0; j < kRowsPerLane; ++j) {
      row[j] = static_cast<uint32_t>(min(int64_t{32} * j, p.n - 1 - n) * pitch);
    }
    scale = p.b.scale + tile.group * args.scale_stack +
            (scale_tile * args.tiles_per_row + t / 2) * kTileBytes + in_tile * 16;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int m = (thread + i * kThreads) / kRowVectors;
      const int64_t from = m < tile.rows ? source_row(p, tile.row + m) : -1;
      a[i] = from < 0 ? nullptr
                      : static_cast<const uint16_t*>(p.a.data) + from * p.a.row_stride +
                            thread % kRowVectors * (kVectorBytes / 2);
    }
  }

  __device__ __forceinline__ void copy(const SmallArgs& args, uint32_t stage, int step) const {
    const GroupedGemmParams& p = args.gemm;
    const int thread = static_cast<int>(threadIdx.x), t = thread % 4;
    const int64_t offset = int64_t{step} * kStepBytes;
    // Rows are multiples of 16 bytes: a vector is inside or outside. Where it is outside nothing is
    // read; the address stays inside the row all the same.
    const bool inside = offset + t * kVectorBytes < p.k / 2;
    const uint32_t target = stage + thread * kVectorBytes;
    for (int j = 0; j < kRowsPerLane; ++j) {
      copy_async(target + j * kThreads * kVectorBytes, codes + row[j] + (inside ? offset : 0),
                 inside ? kVectorBytes : 0);
    }
    const int64_t tile = int64_t{step} * kStepTiles;
    const bool scaled = tile + t / 2 < args.tiles_per_row;
    copy_async(target + kRowsPerLane * kThreads * kVectorBytes,
               scale + (scaled ? tile * kTileBytes : 0), scaled ? kVectorBytes : 0);
    const uint32_t activations = stage + (kRowsPerLane + 1) * kThreads * kVectorBytes;
    const int v = thread % kRowVectors;
    const bool in_row = int64_t{step} * kStepK + v * (kVectorBytes / 2) < p.k;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int m = (thread + i * kThreads) / kRowVectors;
      const bool valid = in_row && a[i] != nullptr;
      copy_async(activations + activation_slot(m, v),
                 valid ? a[i] + int64_t{step} * kStepK : static_cast<const uint16_t*>(p.a.data),
                 valid ? kVectorBytes : 0);
    }
  }
};

template <int kMTiles>
struct Accumulators {
  float c[kRowsPerLane / 2][kMTiles][4];  // pairs of rows (j, j + 1), tiles of A, mma's four
};

// One step: this lane's codes and scales of a stage against A's values. m_tiles: how many have
// rows.
template <typename T, int kThreads, int kMTiles>
__device__ __forceinline__ void multiply_step(uint32_t stage, int blocks_left, int m_tiles, int g,
                                              int t, Accumulators<kMTiles>& acc) {
  constexpr uint32_t kRowStep = kThreads * kVectorBytes;
  const uint32_t mine = stage + threadIdx.x * kVectorBytes;
  const uint32_t activations = stage + (kRowsPerLane + 1) * kRowStep;
  uint32_t words[kRowsPerLane][kLaneWords];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    const uint4 v = load_shared(mine + j * kRowStep);
    words[j][0] = v.x;
    words[j][1] = v.y;
    words[j][2] = v.z;
    words[j][3] = v.w;
  }
  const uint4 scales = load_shared(mine + kRowsPerLane * kRowStep);
  const uint32_t rows[kRowsPerLane] = {scales.x, scales.y, scales.z, scales.w};
  // Two blocks of 16 in this lane's 32 k; their scales are two bytes of each row's four.
  uint32_t scale[kRowsPerLane][2];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    uint32_t two = rows[j] >> (16 * (t & 1));
    // The row's end: padding counts as 0 whatever it is.
    if (2 * t >= blocks_left) two &= 0xFF00u;
    if (2 * t + 1 >= blocks_left) two &= 0x00FFu;
    scale[j][0] = scale_pair(e4m3_decode(static_cast<uint8_t>(two)), T{});
    scale[j][1] = scale_pair(e4m3_decode(static_cast<uint8_t>(two >> 8)), T{});
  }
#pragma unroll
  for (int w = 0; w < kLaneWords; ++w) {
    uint32_t b[kRowsPerLane][4];
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) decode8<T>(words[j][w], scale[j][w / 2], b[j]);
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
      if (i >= m_tiles) break;
      const uint4 x = load_shared(activations + activation_slot(i * 8 + g, t * kLaneWords + w));
      // Two passes: an instruction's sums are not the next one's input.
#pragma unroll
      for (int r = 0; r < kRowsPerLane / 2; ++r) {
        const uint32_t first[4] = {b[2 * r][0], b[2 * r + 1][0], b[2 * r][1], b[2 * r + 1][1]};
        mma(acc.c[r][i], first, x.x, x.y, T{});
      }
#pragma unroll
      for (int r = 0; r < kRowsPerLane / 2; ++r) {
        const uint32_t second[4] = {b[2 * r][2], b[2 * r + 1][2], b[2 * r][3], b[2 * r + 1][3]};
        mma(acc.c[r][i], second, x.z, x.w, T{});
      }
    }
  }
}

template <int kMTiles>
__device__ __forceinline__ void finish(const SmallArgs& args, const GroupedTile& tile, int warp,
                                       int g, int t, const Accumulators<kMTiles>& acc) {
  const GroupedGemmParams& p = args.gemm;
  const float alpha = group_alpha(p, tile.group);
  const int64_t n0 = tile.n + warp / kStripsPerTile * kTileRows + warp % kStripsPerTile * 8 + g;
  float bias[kRowsPerLane];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    const int64_t n = n0 + 32 * j;
    bias[j] = p.bias && n < p.n ? load_as_float(p.bias, p.bias_type, tile.group * p.n + n) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int m = i * 8 + 2 * t + c;
      if (m >= tile.rows) continue;
      const int64_t problem_row = tile.row + m;
      const int64_t to = target_row(p, problem_row);
      if (to < 0) continue;
      const bool missing = source_row(p, problem_row) < 0;
      const float gamma = p.gamma ? p.gamma[problem_row] : 1.0f;
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        const int64_t n = n0 + 32 * j;
        if (n >= p.n) continue;
        const float sum = acc.c[j / 2][i][2 * (j % 2) + c] * (1.0f / kDecodedUnit);
        const float v = gamma * fma_rn(alpha, sum, bias[j]);
        store_one(p.out, p.out_type, to * p.n + n, missing ? 0.0f : v);
      }
    }
  }
}

template <typename T, int kWarps, int kMTiles, int kBlocks>
__global__ void __launch_bounds__(kWarps* kWarpSize, kBlocks)
    grouped_small_kernel(const SmallArgs args) {
  constexpr int kThreads = kWarps * kWarpSize;
  const GroupedGemmParams& p = args.gemm;
  uint8_t* const shared = dynamic_shared();
  auto* const memory = reinterpret_cast<Memory<kThreads>*>(shared);
  constexpr uint32_t kStage =
      (kRowsPerLane + 1) * kThreads * kVectorBytes + kMTiles * 8 * kStepK * 2;
  const uint32_t ring =
      shared_address(shared) + static_cast<uint32_t>((sizeof(Memory<kThreads>) + 127) / 128 * 128);
  const uint32_t ring_end = ring + static_cast<uint32_t>(args.stages) * kStage;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int g = static_cast<int>(threadIdx.x) % kWarpSize / 4,
            t = static_cast<int>(threadIdx.x) % 4;

  Schedule<kThreads, kMTiles * 8, kWarps * 32> schedule(p, &memory->schedule,
                                                        static_cast<int>(threadIdx.x));
  const auto advance = [&](uint32_t& stage) {
    stage += kStage;
    if (stage == ring_end) stage = ring;
  };

  // The copying side: `stages - 1` steps ahead of the multiplying one, and perhaps a tile or more.
  Source<kWarps, kMTiles> source;
  int64_t item = blockIdx.x;
  int copied_step = 0, copied_tile = 0;
  bool more = true;
  uint32_t filling = ring;
  const auto issue = [&] {
    if (copied_step == 0 && more) {
      GroupedTile tile;
      more = schedule.find(item, tile);
      item += gridDim.x;
      if (more) source.start(args, tile);
      if (threadIdx.x == 0) {
        memory->queue[copied_tile % kQueue] = tile;
        memory->queued[copied_tile % kQueue] = more;
      }
      ++copied_tile;
    }
    if (more) {
      source.copy(args, filling, copied_step);
      copied_step = copied_step + 1 == args.steps ? 0 : copied_step + 1;
    }
    advance(filling);
    commit_copies();  // an empty group keeps the count
  };
  for (int i = 0; i < args.stages - 1; ++i) issue();
  __syncthreads();

  uint32_t stage = ring;
  // At least two steps lie between a tile's entry in the queue and its reading: a barrier is
  // between them.
  for (int done = 0; memory->queued[done % kQueue]; ++done) {
    const GroupedTile& tile = memory->queue[done % kQueue];  // in use for longer than registers are
    const int m_tiles = (tile.rows + 7) / 8;
    Accumulators<kMTiles> acc = {};
    for (int step = 0; step < args.steps; ++step) {
      wait_copies(args.stages - 2);
      __syncthreads();  // step `step` is complete, and everyone is done with the one before
      issue();
      const int64_t left = p.k / kBlockSize - int64_t{step} * (kStepK / kBlockSize);
      multiply_step<T, kThreads, kMTiles>(stage, static_cast<int>(min(left, int64_t{8})), m_tiles,
                                          g, t, acc);
      advance(stage);
    }
    finish<kMTiles>(args, tile, warp, g, t, acc);
  }
  wait_copies(0);
  if (!p.scatter)
    zero_rows(p, schedule.rows_end(), p.m, kThreads, static_cast<int>(threadIdx.x), wide_stores(p));
}

// ------------------------------------------------------------------------------------------- host

struct Choice {
  void (*kernel)(const SmallArgs);
  int warps, m_tiles, blocks;  // blocks an SM that the kernel's registers allow
};

template <typename T>
Choice choose(int64_t rows) {
  if (rows <= 8) return {grouped_small_kernel<T, 4, 1, 4>, 4, 1, 4};
  if (rows <= 16) return {grouped_small_kernel<T, 4, 2, 4>, 4, 2, 4};
  if (rows <= 32) return {grouped_small_kernel<T, 8, 4, 2>, 8, 4, 2};
  return {grouped_small_kernel<T, 8, 8, 2>, 8, 8, 2};
}

int attribute(cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, current_device().index), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

bool grouped_small_m_weights(const GroupedGemmParams& p) {
  return !p.ragged_k && p.groups > 0 && p.m > 0 && p.n > 0 && p.k > 0 && p.k % 32 == 0 &&
         p.b.scale && p.b.swizzled && is_aligned(p.b.data, kVectorBytes) &&
         is_aligned(p.b.scale, kVectorBytes);
}

bool grouped_small_m_takes(const GroupedGemmParams& p) {
  return grouped_small_m_weights(p) && !p.a.scale && p.a.type != DType::kFloat32 &&
         is_aligned(p.a.data, kVectorBytes) && p.a.row_stride % 8 == 0;
}

void grouped_small_m(const GroupedGemmParams& p, int64_t rows, Stream stream) {
  const Choice choice =
      p.a.type == DType::kFloat16 ? choose<__half>(rows) : choose<__nv_bfloat16>(rows);
  SmallArgs args = {};
  args.gemm = p;
  args.steps = static_cast<int>(ceil_div(p.k, kStepK));
  args.tiles_per_row = ceil_div(p.k / kBlockSize, kTileCols);
  args.scale_stack = ceil_div(p.n, kTileRows) * args.tiles_per_row * kTileBytes;
  const size_t memory =
      choice.warps == 4 ? sizeof(Memory<4 * kWarpSize>) : sizeof(Memory<8 * kWarpSize>);
  const size_t fixed = (memory + 127) / 128 * 128;
  const size_t stage = size_t(choice.warps) * kWarpSize * (kRowsPerLane + 1) * kVectorBytes +
                       size_t(choice.m_tiles) * 8 * kStepK * 2;
  const auto per_block = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  const auto per_sm = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
  // As many blocks an SM as can have the fewest stages, and then as many stages as fit.
  int blocks = choice.blocks;
  const auto room = [&] { return std::min(per_block, per_sm / blocks - 1024); };
  while (blocks > 1 && fixed + kMinStages * stage > room()) --blocks;
  args.stages = static_cast<int>(std::min<size_t>(kMaxStages, (room() - fixed) / stage));
  if (args.stages < kMinStages) {
    throw std::runtime_error("grouped_gemm: no stages fit this GPU's " + std::to_string(per_block) +
                             " bytes of shared memory");
  }
  grouped_zero(p, stream);
  launch_persistent("grouped_gemm (few rows)", choice.kernel,
                    most_items(p, choice.m_tiles * 8, choice.warps * 32), choice.warps * kWarpSize,
                    fixed + args.stages * stage, blocks, stream, args);
}

}  // namespace nvfp4::cuda
