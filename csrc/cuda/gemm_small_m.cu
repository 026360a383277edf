// The fused GEMM for few rows of A: reads the 4-bit operands once, decodes them in registers.
//
//   out (m, n) = T(fma(alpha, acc, bias)),  acc = sum_k A[m, k] B[n, k] in FP32, m <= 32
//
// Bound by the bandwidth of B's codes and scales as long as no more than about 25 instructions are
// spent on eight codes, so everything serves that:
// - A's values are laid out once in shared memory, in the order in which lanes read them: a lane's
//   eight values of k are one 16-byte read at a constant offset.
// - B goes from memory through a pipeline in shared memory that each thread has to itself
//   (cp.async: a thread reads back only what it copied), so the loop over k has no barrier.
// - A warp multiplies 32 rows of B: n = 128 tile + 8 strip + g + 32 j for g < 8, j < 4. Those are
//   the rows whose scales for 64 elements of k are 16 consecutive bytes g of the 128x4 layout.
// - B is the 16-row side of mma.m16n8k16, A the 8-column side, so that few rows of A waste nothing.
//   Lane (g, t) holds 32 consecutive k of its rows; which k a slot of the instruction stands for is
//   free as long as A agrees. A pair of slots is k and k + 4 of eight: as they lie in a word of
//   codes, see decode8_split.
// - Sums are FP32, added over warps, then over the blocks of a cluster, in a fixed order: the
//   same bytes in every run. A NaN scale of row n reaches row n of B's products only.
#include <mutex>

#include "../recent.h"
#include "common.cuh"
#include "decode.cuh"
#include "explicit_tile.h"
#include "small_m_plan.h"

namespace nvfp4::cuda {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kLaneK = 32;              // consecutive k a lane holds of a chunk
constexpr int kLaneWords = kLaneK / 8;  // of eight codes
constexpr int kRowsPerLane = 4;         // j
constexpr int kChunkBytes = kChunkK / 2;
constexpr int kChunkTiles = kChunkK / kBlockSize / kTileCols;  // scale tiles along k
constexpr uint32_t kNoSlot = 0xFFFFFFFFu;
constexpr int kLaneVectors = kRowsPerLane + 1;  // of B: four rows' codes, scales
static_assert(kLaneVectors * kVectorBytes == kThreadStageBytes);

struct SmallMArgs {
  SmallMParams gemm;
  int strips, k_warps, cluster;
  int chunks;                  // of a block
  int segment;                 // chunks of A in shared memory at a time: a multiple of k_warps
  int total_chunks;            // of k
  int share;                   // sums that a block of the cluster adds up
  uint32_t a_offset, a_bytes;  // of a segment of A in shared memory
  int64_t tiles_per_row;       // scale tiles along k
};

__device__ __forceinline__ int threads_of(const SmallMArgs& a) {
  return a.strips * a.k_warps * kWarpSize;
}

// 16 bytes to shared memory, those from `valid` on as zeros. kAligned: source is 16-byte aligned.
template <bool kAligned>
__device__ __forceinline__ void copy_vector(uint32_t target, const void* source, int valid) {
  if constexpr (kAligned) {
    copy_async_ahead(target, source, valid);
  } else {
    const uint8_t* p = static_cast<const uint8_t*>(source);
    uint32_t w[4] = {};
    for (int i = 0; i < kVectorBytes; ++i) {
      if (i < valid) w[i / 4] |= uint32_t{p[i]} << (8 * (i % 4));
    }
    store_shared(target, make_uint4(w[0], w[1], w[2], w[3]));
  }
}

// Where a thread stands: its block's rows of B and share of k, its warp's, its lane's.
struct Position {
  int lane, g, t, strip, k_warp, rank;
  int64_t tile;       // of 128 rows of B
  int in_tile;        // of this lane's rows: row j is 128 tile + in_tile + 32 j
  int first, chunks;  // of this block: [first, first + chunks) of k

  __device__ explicit Position(const SmallMArgs& a) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    lane = static_cast<int>(threadIdx.x) % kWarpSize;
    g = lane / 4;
    t = lane % 4;
    strip = warp % a.strips;
    k_warp = warp / a.strips;
    rank = a.cluster > 1 ? cluster_rank() : 0;
    // Counted in strips of 32 rows: `strips` of them a block, kTileStrips a tile.
    const int64_t strip_of_all = int64_t{blockIdx.x / a.cluster} * a.strips + strip;
    tile = strip_of_all / kTileStrips;
    in_tile = static_cast<int>(strip_of_all % kTileStrips) * 8 + g;
    first = rank * a.chunks;
    chunks = min(a.chunks, a.total_chunks - first);
  }
};

// ------------------------------------------------------------------------- A in shared memory
//
// chunk, w < 4, tile of eight rows, lane (g, t): 16 bytes, A[8 tile + g][128 chunk + 32 t + 8 w +
// i] for i = 0 4 1 5 2 6 3 7. Rows past m are left as they are: their sums are dropped. A thread
// has several loads under way: one at a time, their latency would be most of the kernel's time.

template <int kMTiles>
__device__ __forceinline__ uint32_t activation_slot(int chunk, int w, int m, int t) {
  return ((chunk * kLaneWords + w) * kMTiles + m / kMTileRows) * kSlotBytes +
         ((m % kMTileRows) * 4 + t) * kVectorBytes;
}

template <bool kAligned>
__device__ __forceinline__ uint4 load_vector(const uint8_t* p) {
  if constexpr (kAligned) {
    return load_cached(p);
  } else {
    uint32_t w[4] = {};
    for (int i = 0; i < kVectorBytes; ++i) w[i / 4] |= uint32_t{p[i]} << (8 * (i % 4));
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// Counts i = begin, begin + step, ... as (i / width, i % width) without a division each.
struct Counter {
  int outer, inner, outer_step, inner_step, width;

  __device__ Counter(int begin, int step, int w)
      : outer(begin / w), inner(begin % w), outer_step(step / w), inner_step(step % w), width(w) {}

  __device__ __forceinline__ void next() {
    outer += outer_step;
    inner += inner_step;
    if (inner >= width) {
      inner -= width;
      ++outer;
    }
  }
};

// Lanes take four t, two rows, four w: their reads fill whole sectors, their writes all banks.
template <int kMTiles, bool kAligned>
__device__ __forceinline__ void stage_dense(const SmallMArgs& a, const Position& p, uint32_t base,
                                            int chunk, int chunks) {
  constexpr int kBatch = kAligned ? 8 : 1;
  const SmallMParams& q = a.gemm;
  const int w = p.lane / 8, odd = p.lane / 4 % 2;
  const int m = static_cast<int>(q.m);
  const int64_t lane_k = int64_t{chunk} * kChunkK + p.t * kLaneK + w * 8;
  const uint8_t* source =
      static_cast<const uint8_t*>(q.a) + (q.a_row_begin * q.a_row_stride + lane_k) * 2;
  Counter at(p.k_warp * a.strips + p.strip, a.strips * a.k_warps, (m + 1) / 2);
  while (at.outer < chunks) {
    uint4 v[kBatch];
    uint32_t slot[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = at.outer, row = at.inner * 2 + odd;
      const bool wanted = c < chunks && row < m;
      slot[i] = wanted ? activation_slot<kMTiles>(c, w, row, p.t) : kNoSlot;
      v[i] = make_uint4(0, 0, 0, 0);
      if (wanted && lane_k + int64_t{c} * kChunkK < q.k) {
        v[i] = load_vector<kAligned>(source + (row * q.a_row_stride + int64_t{c} * kChunkK) * 2);
      }
      at.next();
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (slot[i] == kNoSlot) continue;
      store_shared(
          base + slot[i],
          make_uint4(permute_bytes(v[i].x, v[i].z, 0x5410), permute_bytes(v[i].x, v[i].z, 0x7632),
                     permute_bytes(v[i].y, v[i].w, 0x5410), permute_bytes(v[i].y, v[i].w, 0x7632)));
    }
  }
}

// Two blocks of packed A: what a lane reads of a row and chunk.
struct PackedVector {
  uint4 codes;
  uint32_t scales;

  // left: elements of k from here to the end of the row.
  template <bool kAligned>
  __device__ __forceinline__ void load(const SmallMArgs& a, int64_t row, int64_t k, int64_t left) {
    const SmallMParams& q = a.gemm;
    const uint8_t* p = static_cast<const uint8_t*>(q.a) + (row * q.k + k) / 2;
    const uint8_t* s = q.a_scale + swizzled_offset(row, k / kBlockSize, a.tiles_per_row);
    codes = make_uint4(0, 0, 0, 0);
    scales = 0;
    if (left >= kLaneK) {
      codes = load_vector<kAligned>(p);
      scales = s[0] | s[1] << 8;
    } else if (left > 0) {  // one block of the two; not where everything is aligned
      for (int i = 0; i < 4; ++i) {
        codes.x |= uint32_t{p[i]} << (8 * i);
        codes.y |= uint32_t{p[4 + i]} << (8 * i);
      }
      scales = s[0];
    }
  }
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <typename T, int kMTiles, bool kAligned>
__device__ __forceinline__ void stage_packed(const SmallMArgs& a, uint32_t base, int chunk,
                                             int chunks) {
  constexpr int kBatch = kAligned ? 4 : 1;
  const int m = static_cast<int>(a.gemm.m);
  Counter at(static_cast<int>(threadIdx.x), threads_of(a), chunks * 4);
  while (at.outer < m) {
    PackedVector v[kBatch];
    uint32_t slot[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t k = int64_t{chunk} * kChunkK + at.inner * kLaneK;
      const bool wanted = at.outer < m;
      slot[i] =
          wanted ? activation_slot<kMTiles>(at.inner / 4, 0, at.outer, at.inner % 4) : kNoSlot;
      v[i].template load<kAligned>(a, a.gemm.a_row_begin + at.outer, k, wanted ? a.gemm.k - k : 0);
      at.next();
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (slot[i] == kNoSlot) continue;
      uint32_t s[2];
      scale_pairs(v[i].scales, s, T{});
#pragma unroll
      for (int w = 0; w < kLaneWords; ++w) {
        uint32_t r[4];
        decode8_split<T>(word(v[i].codes, w), s[w / 2], r);
        store_shared(base + slot[i] + w * kMTiles * kSlotBytes, make_uint4(r[0], r[1], r[2], r[3]));
      }
    }
  }
}

// -------------------------------------------------------------------------------- B: the pipeline

// A thread's view of the rows of B that its lane decodes, at its warp's next chunk.
struct WeightSource {
  const uint8_t* row[kRowsPerLane];  // this lane's 16 bytes of codes
  const uint8_t* scale;              // the 16 bytes of the scale tile that this lane uses
  int row_step, scale_step;          // bytes from one chunk of this warp's to its next
  int chunks;  // of this lane's that are not past the end of a row; the last may be half of it
  int tail;    // bytes of the last

  __device__ WeightSource(const SmallMArgs& a, const Position& p) {
    const SmallMParams& q = a.gemm;
    const int64_t chunk = p.first + p.k_warp;
    const int64_t pitch = q.k / 2;
    const int64_t tile = min(p.tile, (q.n - 1) / kTileRows);  // past the end: as the last, dropped
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) {
      const int64_t n = min(p.tile * kTileRows + p.in_tile + 32 * j, q.n - 1);
      row[j] = q.b + n * pitch + chunk * kChunkBytes + p.t * kVectorBytes;
    }
    scale = q.b_scale + (tile * a.tiles_per_row + chunk * kChunkTiles + p.t / 2) * kTileBytes +
            p.in_tile * 16;
    row_step = a.k_warps * kChunkBytes;
    scale_step = a.k_warps * kChunkTiles * kTileBytes;
    const int64_t left = q.k - chunk * kChunkK - p.t * kLaneK, step = int64_t{a.k_warps} * kChunkK;
    chunks = left > 0 ? static_cast<int>((left + step - 1) / step) : 0;
    tail = static_cast<int>(min(left - (chunks - 1) * step, int64_t{kLaneK})) / 2;
  }

  // Nothing is read past the end of a row: zeros there, with zero scales.
  template <bool kAligned>
  __device__ __forceinline__ void copy(uint32_t target, uint32_t pitch) const {
    const int valid = chunks <= 0 ? 0 : kAligned || chunks > 1 ? kVectorBytes : tail;
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) {
      copy_vector<kAligned>(target + j * pitch, row[j], valid);
    }
    copy_vector<kAligned>(target + kRowsPerLane * pitch, scale, chunks > 0 ? kVectorBytes : 0);
  }

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) row[j] += row_step;
    scale += scale_step;
    --chunks;
  }
};

// -------------------------------------------------------------------------------------- main loop

template <int kMTiles>
struct Accumulators {
  float c[kRowsPerLane / 2][kMTiles][4];  // pairs of rows (j, j + 1), tiles of A, mma's four
};

// This lane's codes and scales of one chunk, out of the pipeline.
struct Weights {
  uint4 codes[kRowsPerLane];
  uint4 scales;

  __device__ __forceinline__ void load(uint32_t stage, uint32_t pitch) {
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) codes[j] = load_shared(stage + j * pitch);
    scales = load_shared(stage + kRowsPerLane * pitch);
  }
};

// activations: this lane's slot of the chunk. half: only the first block of this lane's two exists.
template <typename T, int kMTiles, bool kAligned>
__device__ __forceinline__ void multiply_chunk(const Weights& b, uint32_t activations, int t,
                                               bool half, Accumulators<kMTiles>& acc) {
  // Two blocks of 16 in this lane's 32 k; their scales are two bytes of each row's four.
  uint32_t scale[kRowsPerLane][2];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    uint32_t two = word(b.scales, j) >> (16 * (t & 1));
    if constexpr (!kAligned) {  // the row's end: padding counts as 0 whatever it is
      if (half) two &= 0x00FFu;
    }
    scale_pairs(two, scale[j], T{});
  }
#pragma unroll
  for (int w = 0; w < kLaneWords; ++w) {
    uint4 x[kMTiles];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
      x[i] = load_shared(activations + (w * kMTiles + i) * kSlotBytes);
    }
#pragma unroll
    for (int r = 0; r < kRowsPerLane / 2; ++r) {
      uint32_t b0[4], b1[4];
      decode8_split<T>(word(b.codes[2 * r], w), scale[2 * r][w / 2], b0);
      decode8_split<T>(word(b.codes[2 * r + 1], w), scale[2 * r + 1][w / 2], b1);
      const uint32_t first[4] = {b0[0], b1[0], b0[1], b1[1]};
      const uint32_t second[4] = {b0[2], b1[2], b0[3], b1[3]};
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) {
        mma(acc.c[r][i], first, x[i].x, x[i].y, T{});
        mma(acc.c[r][i], second, x[i].z, x[i].w, T{});
      }
    }
  }
}

// ------------------------------------------------------------------------------------ reduction
//
// Sum e of a block: row e / (32 strips) of A; its rows of B in the order j, strip, g. Block r of
// the cluster adds up the sums [r share, (r + 1) share); every warp along k in the cluster sends
// its own there, into a set of its own.

template <int kMTiles>
__device__ __forceinline__ void send_sums(const SmallMArgs& a, const Position& p, uint32_t sums,
                                          const Accumulators<kMTiles>& acc) {
  const uint32_t share = static_cast<uint32_t>(a.share);
  const int rows = a.strips * kStripRows;
  const uint32_t set = sums + (p.rank * a.k_warps + p.k_warp) * share * 4;
#pragma unroll
  for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int m = i * kMTileRows + 2 * p.t + c % 2;
      if (m >= static_cast<int>(a.gemm.m)) continue;
#pragma unroll
      for (int r = 0; r < kRowsPerLane / 2; ++r) {
        const int j = 2 * r + c / 2;
        const uint32_t e = m * rows + (j * a.strips + p.strip) * 8 + p.g;
        const uint32_t target = a.cluster > 1 ? e / share : 0;
        store_cluster(set + (e - target * share) * 4, static_cast<int>(target), acc.c[r][i][c]);
      }
    }
  }
}

// Adds the sets in ascending order of k's owner, applies the epilogue, stores.
__device__ __forceinline__ void finish(const SmallMArgs& a, const Position& p, float unit,
                                       const float* sums) {
  const SmallMParams& q = a.gemm;
  const float alpha = load_scalar(q.alpha);
  const int rows = kStripRows * a.strips, run = 8 * a.strips, sets = a.cluster * a.k_warps;
  const int first = p.rank * a.share;
  const int count = min(a.share, static_cast<int>(q.m) * rows - first);
  const int64_t first_strip = int64_t{blockIdx.x / a.cluster} * a.strips;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads_of(a)) {
    const int m = (first + i) / rows, row = first + i - m * rows;
    const int j = row / run, in_run = row - j * run;
    const int64_t strip = first_strip + in_run / 8;
    const int64_t n =
        strip / kTileStrips * kTileRows + j * 32 + strip % kTileStrips * 8 + in_run % 8;
    if (n >= q.n) continue;
    float acc = sums[i];
    for (int s = 1; s < sets; ++s) acc += sums[s * a.share + i];
    const float bias = q.bias ? load_as_float(q.bias, q.bias_type, n) : 0.0f;
    store_one(q.out, q.out_type, m * q.n + n, fma_rn(alpha, acc * unit, bias));
  }
}

template <typename T, bool kPackedA, int kMTiles, bool kAligned>
__global__ void __launch_bounds__(kMaxSmallMThreads, 1) small_m_kernel(const SmallMArgs a) {
  uint8_t* const shared = dynamic_shared();
  // The others run: waited for before anything is sent.
  if (a.cluster > 1 && a.a_offset > 0) cluster_arrive();
  const Position p(a);
  // Shared memory: sums, A, B's pipeline; sums take the others' place where a_offset is 0. In the
  // pipeline neighbours' vectors are neighbours, so that what a copy fetches is stored in one
  // piece.
  const uint32_t sums = shared_address(shared), base = sums + a.a_offset;
  const uint32_t pitch = threads_of(a) * static_cast<uint32_t>(kVectorBytes);
  const uint32_t stage_bytes = kLaneVectors * pitch;
  const uint32_t pipeline = base + a.a_bytes + threadIdx.x * static_cast<uint32_t>(kVectorBytes);
  const uint32_t pipeline_end = pipeline + kStages * stage_bytes;

  WeightSource source(a, p);
  uint32_t filling = pipeline;
  int to_issue = (p.chunks - p.k_warp + a.k_warps - 1) / a.k_warps;
  const auto issue = [&] {
    if (to_issue-- > 0) source.copy<kAligned>(filling, pitch);
    source.advance();
    commit_copies();  // an empty group keeps the count
    filling = filling + stage_bytes == pipeline_end ? pipeline : filling + stage_bytes;
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) issue();

  Accumulators<kMTiles> acc = {};
  uint32_t stage = pipeline;
  const uint32_t step_bytes = a.k_warps * kLaneWords * kMTiles * kSlotBytes;
  for (int begin = 0; begin < p.chunks; begin += a.segment) {
    const int chunks = min(a.segment, p.chunks - begin);
    if (begin > 0) __syncthreads();  // everyone is done with the segment before
    if constexpr (kPackedA) {
      stage_packed<T, kMTiles, kAligned>(a, base, p.first + begin, chunks);
    } else {
      stage_dense<kMTiles, kAligned>(a, p, base, p.first + begin, chunks);
    }
    __syncthreads();
    uint32_t activations =
        base + p.k_warp * (kLaneWords * kMTiles * kSlotBytes) + p.lane * kVectorBytes;
    for (int c = p.k_warp; c < chunks; c += a.k_warps) {
      wait_copies<kStages - 2>();
      Weights b;
      b.load(stage, pitch);
      stage = stage + stage_bytes == pipeline_end ? pipeline : stage + stage_bytes;
      issue();
      bool half = false;
      if constexpr (!kAligned) {
        half = a.gemm.k - int64_t{p.first + begin + c} * kChunkK - p.t * kLaneK < kLaneK;
      }
      multiply_chunk<T, kMTiles, kAligned>(b, activations, p.t, half, acc);
      activations += step_bytes;
    }
  }
  wait_copies<0>();

  if (a.a_offset == 0) {  // A and the pipeline are done with, here and where the sums go
    if (a.cluster > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
  } else if (a.cluster > 1) {
    cluster_wait();
  }
  send_sums<kMTiles>(a, p, sums, acc);
  if (a.cluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  constexpr float kUnit = (1.0f / kSplitUnit<T>)*(kPackedA ? 1.0f / kSplitUnit<T> : 1.0f);
  finish(a, p, kUnit, reinterpret_cast<const float*>(shared));
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

// Packed A is decoded to FP16 too: its products are exact there as well, and it takes fewer
// instructions.
Kernel pick_kernel(const SmallMParams& p, int m_tiles, bool aligned) {
  if (p.a_scale) return pick_kernel<__half, true>(m_tiles, aligned);
  if (p.a_type == DType::kBFloat16) return pick_kernel<__nv_bfloat16, false>(m_tiles, aligned);
  if (p.a_type == DType::kFloat16) return pick_kernel<__half, false>(m_tiles, aligned);
  throw std::runtime_error("gemm_small_m: A must be packed NVFP4, bfloat16 or float16");
}

cudaLaunchConfig_t launch_config(const SmallMPlan& plan, cudaStream_t stream,
                                 cudaLaunchAttribute& attribute) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads()));
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

constexpr int kMaxDevices = 64;

// Once for each kernel and device: all the shared memory a block may have.
void allow_shared(Kernel kernel, size_t bytes, int device) {
  constexpr int kKernels = 16;
  static thread_local Kernel allowed[kMaxDevices][kKernels];
  Kernel* slot = allowed[device];
  while (*slot != nullptr && *slot != kernel) ++slot;  // there are 12 of them
  if (*slot == kernel) return;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
  *slot = kernel;
}

int device_attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

SmallMDevice describe_device(const Device& device) {
  SmallMDevice d = {};
  d.sm_count = device.sm_count;
  d.shared_per_block =
      static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index));
  d.max_cluster = device.cc_major >= 9 ? kMaxCluster : 1;
  // How clusters pack into the GPU's groups of SMs is the driver's to say.
  const Kernel kernel = small_m_kernel<__nv_bfloat16, false, 1, true>;
  SmallMPlan probe;
  probe.shared_bytes = d.shared_per_block;
  probe.strips = kMaxSmallMWarps;
  probe.k_warps = 1;
  allow_shared(kernel, d.shared_per_block, device.index);
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

const SmallMDevice& small_m_device(const Device& device) {
  static std::once_flag once[kMaxDevices];
  static SmallMDevice devices[kMaxDevices];
  std::call_once(once[device.index], [&] { devices[device.index] = describe_device(device); });
  return devices[device.index];
}

const SmallMPlan& find_plan(int64_t m, int64_t n, int64_t k, const Device& device) {
  static thread_local Recent<4, SmallMPlan> found;
  return found.find({m, n, k, device.index},
                    [&] { return plan_small_m(m, n, k, small_m_device(device)); });
}

// What tests have the plan be; not ok() where they don't.
SmallMPlan plan_for_tests(int64_t m, int64_t n, int64_t k, const Device& device) {
  const ExplicitTile tile = explicit_tile.load(std::memory_order_relaxed);
  if (tile.strips) return explicit_small_m(m, n, k, tile, small_m_device(device));
  if (!has_fault(Fault::kPlannerUncapped)) return {};
  SmallMDevice endless = small_m_device(device);
  endless.shared_per_block = size_t{1} << 40;
  return plan_small_m(m, n, k, endless);
}

}  // namespace

void gemm_small_m(const SmallMParams& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return;
  if (p.m > kSmallMMax) throw std::runtime_error("gemm_small_m takes at most 32 rows");
  const bool packed = p.a_scale != nullptr;
  const bool aligned = is_aligned(p.b, kVectorBytes) && p.k / 2 % kVectorBytes == 0 &&
                       is_aligned(p.b_scale, kVectorBytes) && is_aligned(p.a, kVectorBytes) &&
                       (packed || p.a_row_stride % 8 == 0);
  const Device device = current_device();
  // The unaligned kernel has four tiles whatever m is.
  const int64_t rows = aligned ? p.m : kSmallMMax;
  const SmallMPlan forced = plan_for_tests(rows, p.n, p.k, device);
  const SmallMPlan& plan = forced.ok() ? forced : find_plan(rows, p.n, p.k, device);
  if (!plan.ok()) {
    throw std::runtime_error("gemm_small_m: no tile fits this GPU's " +
                             std::to_string(small_m_device(device).shared_per_block) +
                             " bytes of shared memory");
  }
  SmallMArgs a = {};
  a.gemm = p;
  a.strips = plan.strips;
  a.k_warps = plan.k_warps;
  a.cluster = plan.cluster;
  a.chunks = plan.chunks;
  a.segment = std::max(plan.segment, 1);
  a.total_chunks = static_cast<int>(ceil_div(p.k, kChunkK));
  a.share = static_cast<int>(share_of(p.m, plan.strips, plan.cluster));
  a.a_offset = static_cast<uint32_t>(plan.a_offset);
  a.a_bytes = static_cast<uint32_t>(plan.segment * chunk_bytes(plan.m_tiles));
  a.tiles_per_row = ceil_div(p.k / kBlockSize, kTileCols);
  const Kernel kernel = pick_kernel(p, plan.m_tiles, aligned);
  allow_shared(kernel, small_m_device(device).shared_per_block, device.index);
  cudaLaunchAttribute attribute = {};
  const cudaLaunchConfig_t config = launch_config(plan, as_stream(stream), attribute);
  check(cudaLaunchKernelEx(&config, kernel, a), "gemm_small_m");
}

}  // namespace nvfp4::cuda
