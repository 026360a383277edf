// The fused GEMM for tens to hundreds of rows of A, on Hopper: weights decoded in registers, wgmma.
//
//   out (m, n) = T(fma(alpha, acc, bias)),  acc = sum_k A[m, k] B[n, k] in FP32
//
// - B's rows are the 64-row side of wgmma, which comes out of registers: a warp decodes the
// fragment
//   it feeds, and no decoded weight touches memory. Lane (g, t) holds 32 consecutive k of rows
//   128 tile + 8 (warp % 4) + g + 32 j, as in gemm_small_m.cu, whose order of k this shares.
// - A is the other side, out of shared memory. A small kernel ahead writes A's image: for each tile
//   of kN rows and chunk of 128 k, the bytes as shared memory wants them (128-byte swizzle),
//   decoded where A is packed. A block fetches a chunk's image by one bulk copy.
// - B comes through a pipeline that each thread has to itself, A through one with barriers.
// - Sums: warpgroups along k, then the blocks of a cluster, in a fixed order.
#include <mutex>

#include "common.cuh"
#include "decode.cuh"
#include "hopper.cuh"
#include "small_m_plan.h"

namespace nvfp4::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kBlockRows = 256;  // of B
constexpr int kLaneK = 32;
constexpr int kVectorBytes = 16;
constexpr int kSwizzleBytes = 1024;  // shared memory's alignment of a swizzled tile
constexpr int kTilePitch = kBlockRows + 4;

// How the four warpgroups split a block's 256 rows of B and its chunks of k, by rows of A.
template <int kN>
struct Split;
template <>
struct Split<64> {
  static constexpr int kAlongK = 2, kPairs = 2;  // a warp has all four j
  static constexpr int kBStages = 2, kAStages = 4;
};
template <>
struct Split<128> {
  static constexpr int kAlongK = 1, kPairs = 1;  // a warp has two of the four j
  static constexpr int kBStages = 3, kAStages = 4;
};

template <int kN>
struct Shared {
  static constexpr uint32_t kABytes = kN * kChunkK * 2;  // of a chunk
  static constexpr uint32_t kBBytes = kThreads * (2 * Split<kN>::kPairs + 1) * kVectorBytes;
  static constexpr uint32_t kB = Split<kN>::kAlongK * Split<kN>::kAStages * kABytes;
  static constexpr uint32_t kBarriers = kB + Split<kN>::kBStages * kBBytes;
  static constexpr uint32_t kLoop = kBarriers + Split<kN>::kAlongK * Split<kN>::kAStages * 16;
  static constexpr uint32_t kTile = kN * kTilePitch * 4;
  static constexpr uint32_t kBytes = (kLoop > kTile ? kLoop : kTile) + kSwizzleBytes;
};

struct MidMArgs {
  SmallMParams gemm;
  uint8_t* image;
  int cluster, chunks, total_chunks;
  float unit;
  int64_t tiles_per_row;
};

// --------------------------------------------------------------------------------------- A's image

// A thread's share: eight of each lane's 32 k, of one row and chunk. Rows past m are zeros.
template <typename T, bool kPackedA, int kN>
__global__ void __launch_bounds__(256) image_kernel(const MidMArgs a, int64_t rows) {
  const SmallMParams& q = a.gemm;
  const int per_row = a.total_chunks * 4;
  const int64_t id = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (id >= rows * per_row) return;
  const int64_t m = id / per_row;
  const int rest = static_cast<int>(id - m * per_row), c = rest / 4, w = rest % 4;
  uint32_t pairs[4][4] = {};  // of lane t: elements i, i + 4
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int64_t k = int64_t{c} * kChunkK + kLaneK * t + 8 * w;
    if (m >= q.m || k >= q.k) continue;
    if constexpr (kPackedA) {
      const uint32_t word =
          *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(q.a) + (m * q.k + k) / 2);
      uint32_t scale[2];
      scale_pairs(q.a_scale[swizzled_offset(m, k / kBlockSize, a.tiles_per_row)], scale, T{});
      decode8_split<T>(word, scale[0], pairs[t]);
    } else {
      const uint4 v = load_cached(static_cast<const uint16_t*>(q.a) + m * q.a_row_stride + k);
      pairs[t][0] = permute_bytes(v.x, v.z, 0x5410);
      pairs[t][1] = permute_bytes(v.x, v.z, 0x7632);
      pairs[t][2] = permute_bytes(v.y, v.w, 0x5410);
      pairs[t][3] = permute_bytes(v.y, v.w, 0x7632);
    }
  }
  // Two halves of a chunk, each kN rows of 128 bytes: slots of four steps of 16.
  const int r = static_cast<int>(m % kN);
  uint8_t* out = a.image + (m / kN * a.total_chunks + c) * Shared<kN>::kABytes +
                 (w / 2) * (kN * 128) + r * 128;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int unit = ((w % 2) * 4 + i) ^ (r % 8);
    *reinterpret_cast<uint4*>(out + unit * kVectorBytes) =
        make_uint4(pairs[0][i], pairs[1][i], pairs[2][i], pairs[3][i]);
  }
}

// -------------------------------------------------------------------------------------- main loop

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <typename T, int kN>
__global__ void __launch_bounds__(kThreads, 1) mid_m_kernel(const MidMArgs a) {
  using S = Split<kN>;
  using Layout = Shared<kN>;
  constexpr int kRows = 2 * S::kPairs;  // of B, a lane
  constexpr int kAcc = kN / 2;
  const SmallMParams& q = a.gemm;
  const uint32_t start = shared_address(dynamic_shared());
  const uint32_t base = (start + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, g = lane / 4, t = lane % 4;
  const int warpgroup = warp / 4;
  const int along_k = S::kAlongK == 2 ? warpgroup / 2 : 0;
  const int side = S::kAlongK == 2 ? warpgroup % 2 : warpgroup / 2;  // of the block's two tiles
  const int first_j = S::kAlongK == 2 ? 0 : warpgroup % 2 * 2;
  const int rank = a.cluster > 1 ? cluster_rank() : 0;
  const int64_t block = blockIdx.x / a.cluster;
  const int64_t tile = block * 2 + side;
  const int in_tile = warp % 4 * 8 + g;
  const int first = rank * a.chunks + along_k;
  const int chunks = min(a.chunks, a.total_chunks - rank * a.chunks);
  const int steps = (chunks - along_k + S::kAlongK - 1) / S::kAlongK;

  // B: this thread's pipeline.
  const int64_t pitch = q.k / 2;
  const uint8_t* row[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int64_t n = min(tile * kTileRows + in_tile + 32 * (first_j + j), q.n - 1);
    row[j] = q.b + n * pitch + t * kVectorBytes + int64_t{first} * (kChunkK / 2);
  }
  const uint8_t* scale =
      q.b_scale +
      (min(tile, (q.n - 1) / kTileRows) * a.tiles_per_row + t / 2 + int64_t{first} * 2) *
          kTileBytes +
      in_tile * 16;
  const int64_t left = q.k - int64_t{first} * kChunkK - t * kLaneK;
  constexpr int kStepK = S::kAlongK * kChunkK;
  int to_issue = steps,
      valid_steps = static_cast<int>(max((left + kStepK - 1) / kStepK, int64_t{0}));
  const uint32_t mine = base + Layout::kB + threadIdx.x * kVectorBytes;
  int filling = 0;
  const auto issue = [&] {
    if (to_issue-- > 0) {
      const int valid = valid_steps-- > 0 ? kVectorBytes : 0;
      const uint32_t target = mine + filling * Layout::kBBytes;
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        copy_async(target + j * kThreads * kVectorBytes, row[j], valid);
        row[j] += kStepK / 2;
      }
      copy_async(target + kRows * kThreads * kVectorBytes, scale, valid);
      scale += kStepK / kBlockSize / kTileCols * kTileBytes;
    }
    commit_copies();
    if (++filling == S::kBStages) filling = 0;
  };
#pragma unroll
  for (int s = 0; s < S::kBStages - 1; ++s) issue();

  // A: one thread of those that share a chunk fetches it. Barriers: full, empty.
  const uint32_t barriers = base + Layout::kBarriers + along_k * S::kAStages * 16;
  const uint32_t ring = base + along_k * S::kAStages * Layout::kABytes;
  const bool fetches = threadIdx.x == along_k * (kThreads / 2);
  const uint8_t* image = a.image + (int64_t{blockIdx.y} * a.total_chunks + first) * Layout::kABytes;
  const auto fetch = [&](int step) {
    const uint32_t stage = step % S::kAStages;
    barrier_expect(barriers + stage * 16, Layout::kABytes);
    copy_bulk(ring + stage * Layout::kABytes, image + int64_t{step} * S::kAlongK * Layout::kABytes,
              Layout::kABytes, barriers + stage * 16);
  };
  if (fetches) {
    for (int s = 0; s < S::kAStages; ++s) {
      barrier_init(barriers + s * 16, 1);
      barrier_init(barriers + s * 16 + 8, kThreads / kWarpSize / S::kAlongK);
    }
    fence_barrier_init();
    for (int step = 0; step < min(S::kAStages, steps); ++step) fetch(step);
  }
  __syncthreads();

  float acc[S::kPairs][kAcc];
#pragma unroll
  for (int p = 0; p < S::kPairs; ++p) {
#pragma unroll
    for (int i = 0; i < kAcc; ++i) acc[p][i] = 0.0f;
  }
  int stage = 0, b_stage = 0;
  uint32_t parity = 0;
  for (int step = 0; step < steps; ++step) {
    wait_copies<S::kBStages - 2>();
    const uint32_t source = mine + b_stage * Layout::kBBytes;
    uint4 codes[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) codes[j] = load_shared(source + j * kThreads * kVectorBytes);
    const uint4 scales = load_shared(source + kRows * kThreads * kVectorBytes);
    if (++b_stage == S::kBStages) b_stage = 0;
    issue();
    uint32_t factors[kRows][2];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const uint32_t four =
          S::kPairs == 2 || first_j == 0 ? word(scales, j) : word(scales, (j + 2) % 4);
      scale_pairs(four >> (16 * (t % 2)), factors[j], T{});
    }
    barrier_wait(barriers + stage * 16, parity);
    const uint64_t operand = wgmma_descriptor(ring + stage * Layout::kABytes);
    // Fragments alternate between two sets: a product reads one while the other is decoded.
    uint32_t fragment[2][2][4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
      for (int p = 0; p < S::kPairs; ++p) {
        auto& f = fragment[(w * S::kPairs + p) % 2];
        wgmma_wait<1>();
        uint32_t low[4], high[4];
        decode8_split<T>(word(codes[2 * p], w), factors[2 * p][w / 2], low);
        decode8_split<T>(word(codes[2 * p + 1], w), factors[2 * p + 1][w / 2], high);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          f[h][0] = low[2 * h];
          f[h][1] = high[2 * h];
          f[h][2] = low[2 * h + 1];
          f[h][3] = high[2 * h + 1];
        }
        const uint64_t slots = operand + (w / 2) * (kN * 128 / 16) + (w % 2) * 4;
        wgmma_fence();
        wgmma(acc[p], f[0], slots, T{});
        wgmma(acc[p], f[1], slots + 2, T{});
        wgmma_commit();
      }
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(barriers + stage * 16 + 8);
    if (++stage == S::kAStages) {
      stage = 0;
      parity ^= 1;
    }
    // Refill the stage of a step ago: the others are done with it by now, or nearly.
    if (fetches && step >= 1 && step - 1 + S::kAStages < steps) {
      barrier_wait(barriers + (step - 1) % S::kAStages * 16 + 8, (step - 1) / S::kAStages & 1);
      fetch(step - 1 + S::kAStages);
    }
    __syncwarp();
  }
  wait_copies<0>();
  __syncthreads();

  float* sums = reinterpret_cast<float*>(dynamic_shared());  // [row of A][row of B]
#pragma unroll
  for (int turn = 0; turn < S::kAlongK; ++turn) {
    if (along_k == turn) {
#pragma unroll
      for (int p = 0; p < S::kPairs; ++p) {
#pragma unroll
        for (int i = 0; i < kAcc; ++i) {
          const int m = i / 4 * 8 + 2 * t + i % 2;
          const int j = first_j + 2 * p + i % 4 / 2;
          float& sum = sums[m * kTilePitch + side * kTileRows + 32 * j + in_tile];
          sum = turn == 0 ? acc[p][i] : sum + acc[p][i];
        }
      }
    }
    __syncthreads();
  }
  if (a.cluster > 1) cluster_sync();
  const float alpha = load_scalar(q.alpha);
  const int rows = static_cast<int>(min(int64_t{kN}, q.m - int64_t{blockIdx.y} * kN));
  for (int e = rank * kThreads + static_cast<int>(threadIdx.x); e < rows * kBlockRows;
       e += a.cluster * kThreads) {
    const int m = e / kBlockRows, in_block = e % kBlockRows;
    const int64_t n = block * kBlockRows + in_block;
    if (n >= q.n) continue;
    const float* at = sums + m * kTilePitch + in_block;
    float sum = *at;
    if (a.cluster > 1) {
      float parts[kMaxCluster];
#pragma unroll
      for (int r = 0; r < kMaxCluster; ++r) {
        parts[r] = r < a.cluster ? load_cluster(shared_address(at), r) : 0.0f;
      }
      sum = parts[0];
#pragma unroll
      for (int r = 1; r < kMaxCluster; ++r) {
        if (r < a.cluster) sum += parts[r];
      }
    }
    const float bias = q.bias ? load_as_float(q.bias, q.bias_type, n) : 0.0f;
    const int64_t index = (int64_t{blockIdx.y} * kN + m) * q.n + n;
    const float v = fma_rn(alpha, sum * a.unit, bias);
    switch (q.out_type) {
      case DType::kFloat32:
        static_cast<float*>(q.out)[index] = from_float<float>(v);
        break;
      case DType::kBFloat16:
        static_cast<__nv_bfloat16*>(q.out)[index] = from_float<__nv_bfloat16>(v);
        break;
      default:
        static_cast<__half*>(q.out)[index] = from_float<__half>(v);
    }
  }
  if (a.cluster > 1) cluster_sync();  // a block's sums outlive their last reader
}

// ------------------------------------------------------------------------------------------- host

using Kernel = void (*)(const MidMArgs);

struct MidMDevice {
  int resident[kMaxCluster + 1];  // blocks at once, in clusters of c
};

template <typename T, int kN>
void allow_shared() {
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(mid_m_kernel<T, kN>),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, Shared<kN>::kBytes),
        "cudaFuncSetAttribute");
}

cudaLaunchConfig_t launch_config(dim3 grid, uint32_t shared_bytes, int cluster, Stream stream,
                                 cudaLaunchAttribute& attribute) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = as_stream(stream);
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return config;
}

const MidMDevice& mid_m_device(const Device& device) {
  constexpr int kMaxDevices = 64;
  static std::once_flag once[kMaxDevices];
  static MidMDevice devices[kMaxDevices];
  MidMDevice& d = devices[device.index];
  std::call_once(once[device.index], [&] {
    allow_shared<__nv_bfloat16, 64>();
    allow_shared<__nv_bfloat16, 128>();
    allow_shared<__half, 64>();
    allow_shared<__half, 128>();
    // Compiled for another target the kernel is a husk without wgmma: few registers give it away.
    cudaFuncAttributes attributes = {};
    check(cudaFuncGetAttributes(&attributes, mid_m_kernel<__nv_bfloat16, 128>),
          "cudaFuncGetAttributes");
    if (attributes.numRegs < 100) {
      throw std::runtime_error(
          "gemm_mid_m was not compiled for sm_90a: build with 90a in NVFP4_CUDA_ARCHS");
    }
    d.resident[1] = device.sm_count;
    for (int c = 2; c <= kMaxCluster; ++c) {
      cudaLaunchAttribute attribute = {};
      const auto config =
          launch_config(dim3(static_cast<unsigned>(c)), Shared<128>::kBytes, c, nullptr, attribute);
      int clusters = 0;
      if (cudaOccupancyMaxActiveClusters(&clusters, mid_m_kernel<__nv_bfloat16, 128>, &config) !=
          cudaSuccess) {
        cudaGetLastError();
        clusters = 0;
      }
      d.resident[c] = clusters * c;
    }
  });
  return d;
}

int rows_per_tile(int64_t m) { return m <= 64 ? 64 : 128; }

// Blocks of one wave take as long as their chunks, and a while to start and to add up.
int pick_cluster(int64_t m, int64_t n, int64_t total_chunks, const MidMDevice& device) {
  constexpr int64_t kOverheadChunks = 4;
  const int64_t tiles = ceil_div(n, kBlockRows) * ceil_div(m, rows_per_tile(m));
  int best = 1;
  int64_t best_cost = 0;
  for (int c = 1; c <= kMaxCluster; ++c) {
    if (device.resident[c] == 0) continue;
    const int64_t chunks = ceil_div(total_chunks, c);
    if (c > 1 && chunks * (c - 1) >= total_chunks) continue;
    const int64_t cost = ceil_div(tiles * c, device.resident[c]) * (chunks + kOverheadChunks);
    if (best_cost == 0 || cost < best_cost) {
      best = c;
      best_cost = cost;
    }
  }
  return best;
}

template <typename T, int kN>
void launch_mid_m(MidMArgs& a, bool packed, Stream stream) {
  const int64_t m_tiles = ceil_div(a.gemm.m, kN), rows = m_tiles * kN;
  const dim3 image_grid(static_cast<unsigned>(ceil_div(rows * a.total_chunks * 4, 256)));
  launch("gemm_mid_m, A's image", packed ? image_kernel<T, true, kN> : image_kernel<T, false, kN>,
         image_grid, 256, stream, a, rows);
  cudaLaunchAttribute attribute = {};
  const dim3 grid(static_cast<unsigned>(ceil_div(a.gemm.n, kBlockRows) * a.cluster),
                  static_cast<unsigned>(m_tiles));
  const auto config = launch_config(grid, Shared<kN>::kBytes, a.cluster, stream, attribute);
  check(cudaLaunchKernelEx(&config, mid_m_kernel<T, kN>, static_cast<const MidMArgs&>(a)),
        "gemm_mid_m");
}

}  // namespace

void gemm_mid_m(const SmallMParams& p, void* workspace, Stream stream) {
  if (p.m == 0 || p.n == 0) return;
  const bool packed = p.a_scale != nullptr;
  const MidMDevice& device = mid_m_device(current_device());
  MidMArgs a = {};
  a.gemm = p;
  a.image = static_cast<uint8_t*>(workspace);
  a.total_chunks = static_cast<int>(ceil_div(p.k, kChunkK));
  a.cluster = pick_cluster(p.m, p.n, a.total_chunks, device);
  a.chunks = static_cast<int>(ceil_div(a.total_chunks, a.cluster));
  a.tiles_per_row = ceil_div(p.k / kBlockSize, kTileCols);
  const bool half = packed || p.a_type == DType::kFloat16;
  const float unit = half ? 1.0f / kSplitUnit<__half> : 1.0f / kSplitUnit<__nv_bfloat16>;
  a.unit = packed ? unit * unit : unit;
  if (rows_per_tile(p.m) == 64) {
    half ? launch_mid_m<__half, 64>(a, packed, stream)
         : launch_mid_m<__nv_bfloat16, 64>(a, packed, stream);
  } else {
    half ? launch_mid_m<__half, 128>(a, packed, stream)
         : launch_mid_m<__nv_bfloat16, 128>(a, packed, stream);
  }
}

}  // namespace nvfp4::cuda
