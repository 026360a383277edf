// The fused GEMM for few rows of A: reads the 4-bit operands once, decodes them in registers.
//
//   out (m, n) = T(fma(alpha, acc, bias)),  acc = sum_k A[m, k] B[n, k] in FP32, m <= 32
//
// Bound by the bandwidth of B's codes and scales, so everything serves that:
// - B goes from memory through a per-thread shared-memory pipeline (cp.async: a thread reads back
//   only what it copied itself) into registers, 16 bytes of codes a row at a time.
// - A warp multiplies 32 rows of B: n = 128 tile + 8 strip + g + 32 j for g < 8, j < 4. Those are
//   the rows whose scales for 64 elements of k are 16 consecutive bytes g of the 128x4 layout.
// - B is the 16-row side of mma.m16n8k16, A the 8-column side, so that few rows of A waste nothing.
//   Lane (g, t) holds 32 consecutive k of its rows; which k a slot of the instruction stands for is
//   free as long as A agrees, and A's lane reads the same k from shared memory.
// - Sums are FP32, added over warps, then over the blocks of a cluster, in a fixed order: the
//   same bytes in every run. A NaN scale of row n reaches row n of B's products only.
#include <mutex>

#include "common.cuh"
#include "decode.cuh"
#include "small_m_plan.h"

namespace nvfp4::cuda {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kLaneK = 32;              // consecutive k a lane holds of a chunk
constexpr int kLaneWords = kLaneK / 8;  // of eight codes
constexpr int kRowsPerLane = 4;         // j
constexpr int kChunkBytes = kChunkK / 2;
constexpr int kChunkTiles = kChunkK / kBlockSize / kTileCols;  // scale tiles along k
constexpr int kChunkVectors = kChunkK * 2 / kVectorBytes;      // of A's 16-bit values, a row
constexpr int kChunkVectorsLog2 = 4, kChunkBlocksLog2 = 3;
static_assert(1 << kChunkVectorsLog2 == kChunkVectors && kChunkVectors == 2 << kChunkBlocksLog2);
static_assert(kMaxStages - 2 <= 4, "wait_copies takes no more");
constexpr int kMaxUnits = kMaxPackedWork * kMTileRows * (kChunkK / kBlockSize) / kSmallMThreads;

struct SmallMArgs {
  SmallMParams gemm;
  int strips, k_warps, cluster, stages, iterations;
  int k_warps_log2;
  int64_t tiles_per_row;  // scale tiles along k
};

// 16 bytes to shared memory, those from `valid` on as zeros. kAligned: source is 16-byte aligned.
template <bool kAligned>
__device__ __forceinline__ void copy_vector(uint32_t target, const void* source, int valid) {
  if constexpr (kAligned) {
    copy_async(target, source, valid);
  } else {
    const uint8_t* p = static_cast<const uint8_t*>(source);
    uint32_t w[4] = {};
    for (int i = 0; i < kVectorBytes; ++i) {
      if (i < valid) w[i / 4] |= uint32_t{p[i]} << (8 * (i % 4));
    }
    store_shared(target, make_uint4(w[0], w[1], w[2], w[3]));
  }
}

// ------------------------------------------------------------------------------------- positions

// Where a thread stands: its warp's strip of B rows and share of k, its lane's (g, t).
struct Position {
  int warp, lane, g, t, strip, k_warp;

  __device__ explicit Position(int k_strips)
      : warp(static_cast<int>(threadIdx.x) / kWarpSize),
        lane(static_cast<int>(threadIdx.x) % kWarpSize),
        g(lane / 4),
        t(lane % 4),
        strip(warp % k_strips),
        k_warp(warp / k_strips) {}
};

// Vector v of A's row m in a stage whose rows have `pitch` vectors. The exclusive ors spread a
// quarter-warp's reads (two rows, four lanes 64 bytes apart) over all banks.
__device__ __forceinline__ int activation_slot(int m, int v, int pitch) {
  return m * pitch + (v ^ ((v >> 3) & 1) ^ ((m & 1) << 1));
}

// -------------------------------------------------------------------------------- B: the pipeline

// A thread's view of the rows of B that its lane decodes.
struct WeightSource {
  const uint8_t* codes;        // of row j = 0, at this lane's 16 bytes of chunk 0
  uint32_t row[kRowsPerLane];  // row j's distance from there
  const uint8_t* scale;        // 16 bytes of the scale tile that this lane uses in chunk 0
  int64_t bytes_left;          // of a row's codes, from there
  int64_t tiles_left;          // of a row's scale tiles, from there

  __device__ WeightSource(const SmallMArgs& a, const Position& p, int64_t tile, int first_strip) {
    const SmallMParams& q = a.gemm;
    const int in_tile = (first_strip + p.strip) * 8 + p.g;
    const int64_t pitch = q.k / 2;
    // A row past the end is read as the last one and its result dropped.
    const int64_t n = min(tile * kTileRows + in_tile, q.n - 1);
    codes = q.b + n * pitch + p.t * kVectorBytes;
    for (int j = 0; j < kRowsPerLane; ++j) {
      row[j] = static_cast<uint32_t>(min(int64_t{32} * j, q.n - 1 - n) * pitch);
    }
    scale = q.b_scale + (tile * a.tiles_per_row + p.t / 2) * kTileBytes + in_tile * 16;
    bytes_left = pitch - p.t * kVectorBytes;
    tiles_left = a.tiles_per_row - p.t / 2;
  }

  template <bool kAligned>
  __device__ __forceinline__ void copy(uint32_t stage, int64_t chunk) const {
    const int64_t offset = chunk * kChunkBytes;
    const int64_t left = bytes_left - offset;
    const int valid = left >= kVectorBytes ? kVectorBytes : left > 0 ? static_cast<int>(left) : 0;
    const uint32_t target = stage + threadIdx.x * kVectorBytes;
    // Where nothing is valid nothing is read; the address stays inside the row all the same.
    const int64_t safe = valid > 0 ? offset : 0;
    for (int j = 0; j < kRowsPerLane; ++j) {
      copy_vector<kAligned>(target + j * kSmallMThreads * kVectorBytes, codes + row[j] + safe,
                            valid);
    }
    const int64_t tile = chunk * kChunkTiles;
    const bool inside = tile < tiles_left;
    copy_vector<kAligned>(target + kRowsPerLane * kSmallMThreads * kVectorBytes,
                          scale + (inside ? tile * kTileBytes : 0), inside ? kVectorBytes : 0);
  }
};

// --------------------------------------------------------------------------- A: dense, and packed

// Copies step `it`'s 16-bit values into a stage.
template <int kMTiles, bool kAligned>
__device__ __forceinline__ void copy_dense(const SmallMArgs& a, uint32_t stage, int64_t k_begin) {
  const SmallMParams& q = a.gemm;
  const int pitch_log2 = kChunkVectorsLog2 + a.k_warps_log2;
  const int pitch = 1 << pitch_log2;
  const uint16_t* base = static_cast<const uint16_t*>(q.a) + q.a_row_begin * q.a_row_stride;
  for (int i = static_cast<int>(threadIdx.x); i < kMTiles * kMTileRows * pitch;
       i += kSmallMThreads) {
    const int m = i >> pitch_log2;
    const int v = i & (pitch - 1);
    const int64_t k = k_begin + v * (kVectorBytes / 2);
    const int64_t left = m < q.m ? (q.k - k) * 2 : 0;
    const int valid = left >= kVectorBytes ? kVectorBytes : left > 0 ? static_cast<int>(left) : 0;
    const uint16_t* source = valid > 0 ? base + m * q.a_row_stride + k : base;
    copy_vector<kAligned>(stage + activation_slot(m, v, pitch) * kVectorBytes, source, valid);
  }
}

// The blocks of packed A that a thread decodes for one step.
struct PackedUnits {
  uint2 codes[kMaxUnits];
  uint32_t scale[kMaxUnits];

  template <int kMTiles>
  __device__ __forceinline__ void load(const SmallMArgs& a, int64_t k_begin) {
    const SmallMParams& q = a.gemm;
    const int row_log2 = kChunkBlocksLog2 + a.k_warps_log2;  // blocks a row of this step
#pragma unroll
    for (int u = 0; u < kMaxUnits; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kSmallMThreads;
      const int m = i >> row_log2;
      const int64_t column = k_begin / kBlockSize + (i & ((1 << row_log2) - 1));
      codes[u] = make_uint2(0, 0);
      scale[u] = 0;
      if (m < q.m && m < kMTiles * kMTileRows && column * kBlockSize < q.k) {
        const int64_t row = q.a_row_begin + m;
        const uint8_t* p =
            static_cast<const uint8_t*>(q.a) + row * (q.k / 2) + column * kBlockBytes;
        if (reinterpret_cast<uintptr_t>(p) % 8 == 0) {
          codes[u] = *reinterpret_cast<const uint2*>(p);
        } else {
          codes[u].x = p[0] | p[1] << 8 | p[2] << 16 | uint32_t{p[3]} << 24;
          codes[u].y = p[4] | p[5] << 8 | p[6] << 16 | uint32_t{p[7]} << 24;
        }
        scale[u] = q.a_scale[swizzled_offset(row, column, a.tiles_per_row)];
      }
    }
  }

  template <int kMTiles>
  __device__ __forceinline__ void decode(const SmallMArgs& a, uint32_t buffer) const {
    const int row_log2 = kChunkBlocksLog2 + a.k_warps_log2;
    const int pitch = kChunkVectors << a.k_warps_log2;
#pragma unroll
    for (int u = 0; u < kMaxUnits; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kSmallMThreads;
      const int m = i >> row_log2;
      if (m >= kMTiles * kMTileRows) break;
      const int v = (i & ((1 << row_log2) - 1)) * 2;
      const uint32_t s = scale_pair(e4m3_decode(static_cast<uint8_t>(scale[u])), __nv_bfloat16{});
      const uint32_t words[2] = {codes[u].x, codes[u].y};
      for (int h = 0; h < 2; ++h) {
        uint32_t r[4];
        decode8<__nv_bfloat16>(words[h], s, r);
        store_shared(buffer + activation_slot(m, v + h, pitch) * kVectorBytes,
                     make_uint4(r[0], r[1], r[2], r[3]));
      }
    }
  }
};

// -------------------------------------------------------------------------------------- main loop

template <int kMTiles>
struct Accumulators {
  float c[kRowsPerLane / 2][kMTiles][4];  // pairs of rows (j, j + 1), tiles of A, mma's four
};

// One chunk of k: this lane's codes and scales of a stage against A's values in `activations`.
template <typename T, int kMTiles>
__device__ __forceinline__ void multiply_chunk(uint32_t weights, uint32_t activations, int pitch,
                                               const Position& p, int columns_left,
                                               Accumulators<kMTiles>& acc) {
  const uint32_t mine = weights + threadIdx.x * kVectorBytes;
  constexpr uint32_t kRowStep = kSmallMThreads * kVectorBytes;
  uint32_t words[kRowsPerLane][kLaneWords];
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
  for (int j = 0; j < kRowsPerLane; ++j) {
    uint32_t two = rows[j] >> (16 * (p.t & 1));
    if (columns_left < kChunkK / kBlockSize) {  // the row's end: padding counts as 0 whatever it is
      if (2 * p.t >= columns_left) two &= 0xFF00u;
      if (2 * p.t + 1 >= columns_left) two &= 0x00FFu;
    }
    scale[j][0] = scale_pair(e4m3_decode(static_cast<uint8_t>(two)), T{});
    scale[j][1] = scale_pair(e4m3_decode(static_cast<uint8_t>(two >> 8)), T{});
  }
#pragma unroll
  for (int w = 0; w < kLaneWords; ++w) {
    uint32_t b[kRowsPerLane][4];
    for (int j = 0; j < kRowsPerLane; ++j) decode8<T>(words[j][w], scale[j][w / 2], b[j]);
    const int vector = p.k_warp * kChunkVectors + p.t * kLaneWords + w;
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
      const uint4 x = load_shared(
          activations + activation_slot(i * kMTileRows + p.g, vector, pitch) * kVectorBytes);
      for (int r = 0; r < kRowsPerLane / 2; ++r) {
        const uint32_t first[4] = {b[2 * r][0], b[2 * r + 1][0], b[2 * r][1], b[2 * r + 1][1]};
        const uint32_t second[4] = {b[2 * r][2], b[2 * r + 1][2], b[2 * r][3], b[2 * r + 1][3]};
        mma(acc.c[r][i], first, x.x, x.y, T{});
        mma(acc.c[r][i], second, x.z, x.w, T{});
      }
    }
  }
}

// The block's sums, warps along k in ascending order, as FP32 tile[m][row] in shared memory.
// row = (8 strips) j + 8 strip + g.
template <int kMTiles>
__device__ __forceinline__ void reduce_warps(const SmallMArgs& a, const Position& p,
                                             const Accumulators<kMTiles>& acc, float* sums,
                                             float* tile) {
  constexpr int kValues = kRowsPerLane / 2 * kMTiles * 4;
  const float* mine = &acc.c[0][0][0];
  if (p.k_warp > 0) {
    float* target = sums + ((p.k_warp - 1) * a.strips + p.strip) * kValues * kWarpSize + p.lane;
#pragma unroll
    for (int i = 0; i < kValues; ++i) target[i * kWarpSize] = mine[i];
  }
  __syncthreads();
  if (p.k_warp == 0) {
    const int pitch = tile_pitch(a.strips);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      float v = mine[i];
      for (int w = 1; w < a.k_warps; ++w) {
        v += sums[(((w - 1) * a.strips + p.strip) * kValues + i) * kWarpSize + p.lane];
      }
      const int r = i / (4 * kMTiles), m_tile = i / 4 % kMTiles, c = i % 4;
      const int m = m_tile * kMTileRows + 2 * p.t + c % 2;
      const int j = 2 * r + c / 2;
      tile[m * pitch + j * 8 * a.strips + p.strip * 8 + p.g] = v;
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void store_as(void* out, DType type, int64_t index, float v) {
  switch (type) {
    case DType::kFloat32:
      static_cast<float*>(out)[index] = from_float<float>(v);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(out)[index] = from_float<__nv_bfloat16>(v);
      break;
    default:
      static_cast<__half*>(out)[index] = from_float<__half>(v);
  }
}

// Adds the cluster's tiles in ascending order of rank, applies the epilogue, stores.
template <int kMTiles>
__device__ __forceinline__ void finish(const SmallMArgs& a, int64_t n_tile, int first_strip,
                                       int rank, float unit, const float* tile) {
  const SmallMParams& q = a.gemm;
  const float alpha = load_scalar(q.alpha);
  const int rows = kStripRows * a.strips;
  const int run = 8 * a.strips;  // consecutive n
  for (int e = rank * kSmallMThreads + static_cast<int>(threadIdx.x);
       e < kMTiles * kMTileRows * rows; e += a.cluster * kSmallMThreads) {
    const int m = e / rows;
    const int row = e - m * rows;
    const int64_t n = n_tile * kTileRows + 32 * (row / run) + 8 * first_strip + row % run;
    if (m >= q.m || n >= q.n) continue;
    const float* at = tile + m * tile_pitch(a.strips) + row;
    float acc;
    if (a.cluster == 1) {
      acc = *at;
    } else {
      float parts[kMaxCluster];
#pragma unroll
      for (int r = 0; r < kMaxCluster; ++r) {
        parts[r] = r < a.cluster ? load_cluster(shared_address(at), r) : 0.0f;
      }
      acc = parts[0];
#pragma unroll
      for (int r = 1; r < kMaxCluster; ++r) {
        if (r < a.cluster) acc += parts[r];
      }
    }
    const float bias = q.bias ? load_as_float(q.bias, q.bias_type, n) : 0.0f;
    store_as(q.out, q.out_type, m * q.n + n, fma_rn(alpha, acc * unit, bias));
  }
}

template <typename T, bool kPackedA, int kMTiles, bool kAligned>
__global__ void __launch_bounds__(kSmallMThreads, 2) small_m_kernel(const SmallMArgs a) {
  uint8_t* const shared = dynamic_shared();
  const Position p(a.strips);
  const int rank = a.cluster > 1 ? cluster_rank() : 0;
  const int64_t block = blockIdx.x / a.cluster;
  const int groups = kTileRows / kStripRows / a.strips;  // blocks a 128-row tile
  const int64_t n_tile = block / groups;
  const int first_strip = static_cast<int>(block % groups) * a.strips;

  const uint32_t activation_bytes = 2u * kMTiles * kMTileRows * a.k_warps * kChunkK;
  const uint32_t stage_bytes =
      static_cast<uint32_t>(kWeightStageBytes) + (kPackedA ? 0 : activation_bytes);
  const uint32_t base = shared_address(shared);
  const uint32_t pipeline = base + (kPackedA ? 2 * activation_bytes : 0);
  const int64_t first_chunk = int64_t{rank} * a.iterations * a.k_warps;
  const int pitch = kChunkVectors << a.k_warps_log2;

  const WeightSource weights(a, p, n_tile, first_strip);
  const uint32_t pipeline_end = pipeline + a.stages * stage_bytes;
  const auto advance = [&](uint32_t& stage) {
    stage += stage_bytes;
    if (stage == pipeline_end) stage = pipeline;
  };
  const auto issue = [&](int it, uint32_t stage) {
    if (it < a.iterations) {
      const int64_t chunk = first_chunk + int64_t{it} * a.k_warps;
      weights.copy<kAligned>(stage, chunk + p.k_warp);
      if constexpr (!kPackedA) {
        copy_dense<kMTiles, kAligned>(a, stage + kWeightStageBytes, chunk * kChunkK);
      }
    }
    commit_copies();  // an empty group keeps the count
  };
  uint32_t filling = pipeline, stage = pipeline;
  for (int it = 0; it < a.stages - 1; ++it, advance(filling)) issue(it, filling);

  [[maybe_unused]] PackedUnits units;
  if constexpr (kPackedA) {
    units.load<kMTiles>(a, first_chunk * kChunkK);
    units.decode<kMTiles>(a, base);
    units.load<kMTiles>(a, (first_chunk + a.k_warps) * kChunkK);
  }

  Accumulators<kMTiles> acc = {};
  for (int it = 0; it < a.iterations; ++it) {
    wait_copies(a.stages - 2);
    __syncthreads();  // step `it` of A is complete, and everyone is done with step it - 1
    issue(it + a.stages - 1, filling);
    advance(filling);
    uint32_t activations = stage + static_cast<uint32_t>(kWeightStageBytes);
    const int64_t chunk = first_chunk + int64_t{it} * a.k_warps;
    if constexpr (kPackedA) {
      activations = base + (it & 1) * activation_bytes;
      if (it + 1 < a.iterations) units.decode<kMTiles>(a, base + ((it + 1) & 1) * activation_bytes);
      units.load<kMTiles>(a, (chunk + 2 * a.k_warps) * kChunkK);
    }
    const int64_t left = a.gemm.k / kBlockSize - (chunk + p.k_warp) * (kChunkK / kBlockSize);
    if (left > 0) {
      multiply_chunk<T, kMTiles>(stage, activations, pitch, p,
                                 static_cast<int>(min(left, int64_t{kChunkK / kBlockSize})), acc);
    }
    advance(stage);
  }
  wait_copies(0);
  __syncthreads();

  float* sums = reinterpret_cast<float*>(shared);
  float* tile = sums + (a.k_warps - 1) * a.strips * kStripRows * kMTiles * kMTileRows;
  reduce_warps<kMTiles>(a, p, acc, sums, tile);
  if (a.cluster > 1) cluster_sync();
  constexpr float kUnit = (1.0f / kDecodedUnit) * (kPackedA ? 1.0f / kDecodedUnit : 1.0f);
  finish<kMTiles>(a, n_tile, first_strip, rank, kUnit, tile);
  if (a.cluster > 1) cluster_sync();  // a block's tile outlives its last reader
}

// ------------------------------------------------------------------------------------------- host

using Kernel = void (*)(const SmallMArgs);

template <typename T, bool kPackedA>
Kernel pick_kernel(int m_tiles, bool aligned) {
  // One unaligned form is enough: it is slow anyway, and right for fewer rows too.
  if (!aligned) return small_m_kernel<T, kPackedA, 4, false>;
  switch (m_tiles) {
    case 1:
      return small_m_kernel<T, kPackedA, 1, true>;
    case 2:
      return small_m_kernel<T, kPackedA, 2, true>;
    default:
      return small_m_kernel<T, kPackedA, 4, true>;
  }
}

Kernel pick_kernel(const SmallMParams& p, int m_tiles, bool aligned) {
  if (p.a_scale) return pick_kernel<__nv_bfloat16, true>(m_tiles, aligned);
  if (p.a_type == DType::kBFloat16) return pick_kernel<__nv_bfloat16, false>(m_tiles, aligned);
  if (p.a_type == DType::kFloat16) return pick_kernel<__half, false>(m_tiles, aligned);
  throw std::runtime_error("gemm_small_m: A must be packed NVFP4, bfloat16 or float16");
}

cudaLaunchConfig_t launch_config(const SmallMPlan& plan, cudaStream_t stream,
                                 cudaLaunchAttribute& attribute) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(kSmallMThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  if (plan.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(plan.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return config;
}

void allow_shared(Kernel kernel, size_t bytes) {
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
}

int device_attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

SmallMDevice describe_device(const Device& device) {
  SmallMDevice d = {};
  d.sm_count = device.sm_count;
  d.shared_per_sm = static_cast<size_t>(
      device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.index));
  d.shared_per_block =
      static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index));
  d.max_cluster = device.cc_major >= 9 ? kMaxCluster : 1;
  // How clusters pack into the GPU's groups of SMs is the driver's to say.
  const Kernel kernel = small_m_kernel<__nv_bfloat16, false, 1, true>;
  SmallMPlan probe;
  probe.shared_bytes = std::min(d.shared_per_block, d.shared_per_sm / 2 - 1024);
  allow_shared(kernel, d.shared_per_block);
  for (int c = 2; c <= d.max_cluster; ++c) {
    probe.cluster = c;
    probe.blocks = c;
    cudaLaunchAttribute attribute = {};
    const cudaLaunchConfig_t config = launch_config(probe, nullptr, attribute);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess ||
        clusters == 0) {
      cudaGetLastError();
      d.max_cluster = c - 1;
      break;
    }
    d.resident[c] = clusters * c;
  }
  return d;
}

const SmallMDevice& small_m_device() {
  constexpr int kMaxDevices = 64;
  static std::once_flag once[kMaxDevices];
  static SmallMDevice devices[kMaxDevices];
  const Device device = current_device();
  std::call_once(once[device.index], [&] { devices[device.index] = describe_device(device); });
  return devices[device.index];
}

}  // namespace

void gemm_small_m(const SmallMParams& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return;
  if (p.m > kSmallMMax) throw std::runtime_error("gemm_small_m takes at most 32 rows");
  const bool packed = p.a_scale != nullptr;
  const bool aligned = is_aligned(p.b, kVectorBytes) && p.k / 2 % kVectorBytes == 0 &&
                       is_aligned(p.b_scale, kVectorBytes) &&
                       (packed || (is_aligned(p.a, kVectorBytes) && p.a_row_stride % 8 == 0));
  const SmallMDevice& device = small_m_device();
  const SmallMPlan plan = plan_small_m(aligned ? p.m : kSmallMMax, p.n, p.k, packed, device);
  if (!plan.ok()) {
    throw std::runtime_error("gemm_small_m: no tile fits this GPU's " +
                             std::to_string(device.shared_per_block) + " bytes of shared memory");
  }
  SmallMArgs a = {};
  a.gemm = p;
  a.strips = plan.strips;
  a.k_warps = plan.k_warps;
  while (1 << a.k_warps_log2 < a.k_warps) ++a.k_warps_log2;
  a.cluster = plan.cluster;
  a.stages = plan.stages;
  a.iterations = plan.iterations;
  a.tiles_per_row = ceil_div(p.k / kBlockSize, kTileCols);
  const Kernel kernel = pick_kernel(p, plan.m_tiles, aligned);
  allow_shared(kernel, plan.shared_bytes);
  cudaLaunchAttribute attribute = {};
  const cudaLaunchConfig_t config = launch_config(plan, as_stream(stream), attribute);
  check(cudaLaunchKernelEx(&config, kernel, a), "gemm_small_m");
}

}  // namespace nvfp4::cuda
