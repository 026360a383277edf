// Grouped GEMM for any operands: both sides become BF16 (FP16 where a dense side is FP16) in shared
// memory, exactly, and mma.sync multiplies them with FP32 sums.
//
//   out = T(gamma * fma(alpha, acc, bias)),  acc = sum_k A[m, k] B[n, k]
//
// - A block of 128 threads makes tiles of 128 x 128 along k, 64 at a time, in a ring of two or
//   three stages (grouped_general_plan.h). Dense rows come by cp.async; packed ones by way of
//   registers, where they are decoded: a thread has one row, 32 bytes of codes and four scales a
//   step.
// - Ragged K starts at the multiple of 64 below the slice. Blocks of 16 outside it count as zero:
//   dense ones are zeroed, packed ones get scale zero.
// - A NaN scale makes its row's products NaN and no other's. Sums have one fixed order.
#include "common.cuh"
#include "decode.cuh"
#include "explicit_tile.h"
#include "grouped_gemm.h"
#include "grouped_schedule.cuh"
#include "hopper.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kZeroThreads = 256;
constexpr int kTile = kGeneralTile;
constexpr int kStepK = kGeneralStepK;
constexpr int kVectorBytes = 16;
constexpr int kVectorK = 8;
constexpr int kRowVectors = kStepK / kVectorK;
constexpr int kSideBytes = kTile * kStepK * 2;
constexpr int kStageBytes = 2 * kSideBytes;
static_assert(kStageBytes == kGeneralStageBytes);
constexpr int kWarpTile = 64;              // a warp's part of the tile, both ways
constexpr int kTilePitch = kGeneralPitch;  // floats; spreads a fragment's rows over the banks
constexpr int kMTiles = kWarpTile / 16, kNTiles = kWarpTile / 8;
static_assert(kThreads == kTile, "a packed row a thread");

struct Memory {
  ScheduleMemory<kThreads> schedule;
  int source[kTile], target[kTile];  // rows of A and of out, -1 for none
};
constexpr size_t kMemoryBytes = (sizeof(Memory) + 127) / 128 * 128;
static_assert(kMemoryBytes == kGeneralFixedBytes);

struct GroupedArgs {
  GroupedGemmParams gemm;
  int stages;
  bool a_aligned, b_aligned;              // 16-byte loads of data
  bool a_scale_aligned, b_scale_aligned;  // 4-byte loads of scales
  bool wide;                              // 16-byte stores
};

// Vector v of a row. Eight rows' vectors of one k, which is what is read (ldmatrix) and written
// (decode) at a time, reach all banks.
__device__ __forceinline__ uint32_t slot(int row, int v) {
  return static_cast<uint32_t>(row * kRowVectors + (v ^ (row & 7))) * kVectorBytes;
}

// Rows of one side of a tile.
struct Rows {
  const int* table;  // of A: where row r is, -1 for none. Null for B, where they are consecutive:
  int64_t begin, count;

  __device__ __forceinline__ int64_t at(int r) const {
    if (table) return table[r];
    return r < count ? begin + r : -1;
  }
};

template <typename T, bool kPacked>
class Side;

// Dense: 16 bytes at a time, asynchronously, into the stage of its step.
template <typename T>
class Side<T, false> {
  static constexpr int kEach = kTile * kRowVectors / kThreads;

 public:
  __device__ Side(const Operand& operand, int64_t stack_offset, const Rows& rows, int64_t,
                  const GroupedTile& tile, bool aligned, bool)
      : k_begin_(tile.k_begin), k_end_(tile.k_end), aligned_(aligned) {
    const auto* data =
        static_cast<const uint16_t*>(operand.data) + stack_offset * operand.row_stride;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t row = rows.at(static_cast<int>(threadIdx.x) / kRowVectors + j * kRowsApart);
      inside_ |= static_cast<unsigned>(row >= 0) << j;
      // A row that is none is not read; the address stays inside all the same.
      row_[j] = data + max(row, int64_t{0}) * operand.row_stride +
                static_cast<int>(threadIdx.x) % kRowVectors * kVectorK;
    }
  }

  __device__ __forceinline__ void issue(uint32_t stage, int64_t k0) const {
    const int r = static_cast<int>(threadIdx.x) / kRowVectors;
    const int v = static_cast<int>(threadIdx.x) % kRowVectors;
    const int64_t k = k0 + v * kVectorK;
    const bool in_slice = k >= k_begin_ && k < k_end_;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool valid = in_slice && (inside_ >> j & 1);
      const uint16_t* source = row_[j] + (in_slice ? k0 : 0);
      const uint32_t target = stage + slot(r + j * kRowsApart, v);
      if (aligned_) {
        copy_async(target, source, valid ? kVectorBytes : 0);
      } else {
        copy_unaligned(target, source, valid);
      }
    }
  }
  __device__ __forceinline__ void fetch(int64_t) {}
  __device__ __forceinline__ void decode(uint32_t) const {}

 private:
  static constexpr int kRowsApart = kThreads / kRowVectors;

  __device__ __noinline__ static void copy_unaligned(uint32_t target, const uint16_t* source,
                                                     bool valid) {
    uint32_t w[4] = {};
    for (int h = 0; h < kVectorK; ++h) {
      if (valid) w[h / 2] |= uint32_t{source[h]} << (16 * (h % 2));
    }
    store_shared(target, make_uint4(w[0], w[1], w[2], w[3]));
  }

  const uint16_t* row_[kEach];
  unsigned inside_ = 0;  // bit j: row j is one
  int64_t k_begin_, k_end_;
  bool aligned_;
};

// Packed: `fetch` loads a step into registers, `decode` stores it decoded.
template <typename T>
class Side<T, true> {
 public:
  __device__ Side(const Operand& operand, int64_t stack_offset, const Rows& rows, int64_t group,
                  const GroupedTile& tile, bool aligned, bool scale_aligned)
      : first_block_(tile.k_begin / kBlockSize),
        end_block_(tile.k_end / kBlockSize),
        aligned_(aligned),
        scale_aligned_(scale_aligned) {
    const int64_t row = rows.at(static_cast<int>(threadIdx.x));
    inside_ = row >= 0;
    const int64_t safe = inside_ ? row : 0;
    const int64_t k = operand.row_stride;  // launch() puts the row's length there
    pitch_ = k / 2;
    codes_ = static_cast<const uint8_t*>(operand.data) + (stack_offset + safe) * pitch_;
    const int64_t cols = k / kBlockSize;
    if (operand.swizzled) {
      const int64_t tiles_per_row = (cols + kTileCols - 1) / kTileCols;
      const int64_t stack_tiles =
          (rows.table ? 0 : group) * ((rows_of_stack(rows) + kTileRows - 1) / kTileRows);
      scale_ = operand.scale + stack_tiles * tiles_per_row * kTileBytes +
               swizzled_offset(safe, 0, tiles_per_row);
      scale_step_ = kTileBytes;
    } else {
      scale_ = operand.scale + (stack_offset + safe) * cols;
      scale_step_ = kTileCols;
    }
  }

  __device__ __forceinline__ void issue(uint32_t, int64_t) const {}

  __device__ __forceinline__ void fetch(int64_t k0) {
    const int64_t block = k0 / kBlockSize;
    for (int h = 0; h < 2; ++h) codes16_[h] = make_uint4(0, 0, 0, 0);
    scales_ = 0;
    if (!inside_ || block >= end_block_) return;
    const uint8_t* p = codes_ + k0 / 2;
    const int64_t left = pitch_ - k0 / 2;
    if (aligned_) {
      for (int h = 0; h < 2; ++h) {
        if (h * kVectorBytes < left) codes16_[h] = reinterpret_cast<const uint4*>(p)[h];
      }
    } else {
      for (int h = 0; h < 2; ++h) {
        uint32_t w[4] = {};
        for (int i = 0; i < kVectorBytes; ++i) {
          if (h * kVectorBytes + i < left) {
            w[i / 4] |= uint32_t{p[h * kVectorBytes + i]} << (8 * (i % 4));
          }
        }
        codes16_[h] = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
    const uint8_t* s = scale_ + block / kTileCols * scale_step_;
    if (scale_aligned_) {
      scales_ = *reinterpret_cast<const uint32_t*>(s);
    } else {
      for (int i = 0; i < kTileCols; ++i) {
        if (block + i < end_block_) scales_ |= uint32_t{s[i]} << (8 * i);
      }
    }
    // Padding and other slices count as 0 whatever they are.
    for (int i = 0; i < kTileCols; ++i) {
      if (block + i < first_block_ || block + i >= end_block_) scales_ &= ~(0xFFu << (8 * i));
    }
  }

  __device__ __forceinline__ void decode(uint32_t stage) const {
    const int row = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t words[4] = {codes16_[h].x, codes16_[h].y, codes16_[h].z, codes16_[h].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int v = 4 * h + w;
        const uint32_t scale =
            scale_pair(e4m3_decode(static_cast<uint8_t>(scales_ >> (8 * (v / 2)))), T{});
        uint32_t r[4];
        decode8<T>(words[w], scale, r);
        store_shared(stage + slot(row, v), make_uint4(r[0], r[1], r[2], r[3]));
      }
    }
  }

 private:
  // B's rows in the stack's operand of one group.
  __device__ static int64_t rows_of_stack(const Rows& rows) { return rows.begin + rows.count; }

  const uint8_t *codes_, *scale_;
  int64_t pitch_, scale_step_;
  int64_t first_block_, end_block_;
  bool aligned_, scale_aligned_, inside_;
  uint4 codes16_[2];
  uint32_t scales_;
};

struct Accumulators {
  float c[kMTiles][kNTiles][4];
};

// One step of a warp's 64 x 64.
template <typename T>
__device__ __forceinline__ void multiply_step(uint32_t a_stage, uint32_t b_stage, int warp,
                                              int lane, Accumulators& acc) {
  // ldmatrix takes a row's address from each lane: A's four matrices are two of rows by two of k,
  // in mma's order; B's are two of k by two of rows.
  const int a_row = warp / 2 * kWarpTile + lane % 16, a_vector = lane / 16;
  const int b_row = warp % 2 * kWarpTile + lane / 16 * 8 + lane % 8, b_vector = lane / 8 % 2;
#pragma unroll
  for (int s = 0; s < kStepK / 16; ++s) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
      load_matrices(a[i], a_stage + slot(a_row + 16 * i, 2 * s + a_vector));
    }
#pragma unroll
    for (int j = 0; j < kNTiles; j += 2) {
      uint32_t b[4];
      load_matrices(b, b_stage + slot(b_row + 8 * j, 2 * s + b_vector));
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) {
        mma(acc.c[i][j], a[i], b[0], b[1], T{});
        mma(acc.c[i][j + 1], a[i], b[2], b[3], T{});
      }
    }
  }
}

// The tile through shared memory, so that what a row of out gets is consecutive.
__device__ __forceinline__ void finish(const GroupedArgs& args, const GroupedTile& tile,
                                       const Memory& memory, float unit, int warp, int g, int t,
                                       const Accumulators& acc, float* sums) {
  const GroupedGemmParams& p = args.gemm;
  const int m0 = warp / 2 * kWarpTile, n0 = warp % 2 * kWarpTile;
#pragma unroll
  for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      for (int r = 0; r < 2; ++r) {
        float* at = sums + (m0 + 16 * i + 8 * r + g) * kTilePitch + n0 + 8 * j + 2 * t;
        at[0] = acc.c[i][j][2 * r];
        at[1] = acc.c[i][j][2 * r + 1];
      }
    }
  }
  __syncthreads();
  const float alpha = group_alpha(p, tile.group);
  constexpr int kEights = kTile / 8;
  for (int i = static_cast<int>(threadIdx.x); i < tile.rows * kEights; i += kThreads) {
    const int r = i / kEights, v = i % kEights;
    const int64_t n = tile.n + v * 8;
    const int to = memory.target[r];
    if (to < 0 || n >= p.n) continue;
    const int count = static_cast<int>(min(int64_t{8}, p.n - n));
    const float* from = sums + r * kTilePitch + v * 8;
    float out[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float bias =
          p.bias && e < count ? load_as_float(p.bias, p.bias_type, tile.group * p.n + n + e) : 0.0f;
      out[e] = fma_rn(alpha, from[e] * unit, bias);
      if (p.gamma) out[e] *= p.gamma[tile.row + r];
      if (memory.source[r] < 0) out[e] = 0.0f;
    }
    const int64_t row = p.ragged_k ? tile.group * p.m + to : to;
    store_eight(p.out, p.out_type, row * p.n + n, out, count, args.wide);
  }
}

template <typename T, bool kPackedA, bool kPackedB>
__global__ void __launch_bounds__(kThreads, 2) grouped_kernel(const GroupedArgs args) {
  const GroupedGemmParams& p = args.gemm;
  uint8_t* const shared = dynamic_shared();
  Memory* const memory = reinterpret_cast<Memory*>(shared);
  float* const sums = reinterpret_cast<float*>(shared + kMemoryBytes);
  const uint32_t ring = shared_address(shared) + static_cast<uint32_t>(kMemoryBytes);
  const uint32_t ring_end = ring + static_cast<uint32_t>(args.stages) * kStageBytes;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarpSize, g = thread % kWarpSize / 4, t = thread % 4;
  constexpr float kUnit =
      (kPackedA ? 1.0f / kDecodedUnit : 1.0f) * (kPackedB ? 1.0f / kDecodedUnit : 1.0f);

  Schedule<kThreads, kTile, kTile> schedule(p, &memory->schedule, static_cast<int>(threadIdx.x));
  GroupedTile tile;
  for (int64_t item = blockIdx.x; schedule.find(item, tile); item += gridDim.x) {
    __syncthreads();  // the tile before is stored
    {
      const bool inside = thread < tile.rows;
      memory->source[thread] = inside ? static_cast<int>(source_row(p, tile.row + thread)) : -1;
      memory->target[thread] = inside ? static_cast<int>(target_row(p, tile.row + thread)) : -1;
    }
    __syncthreads();
    const Rows a_rows{memory->source, 0, 0};
    const Rows b_rows{nullptr, tile.n, p.n - tile.n};
    const int64_t stack = p.ragged_k ? 0 : tile.group;
    Side<T, kPackedA> a(p.a, 0, a_rows, 0, tile, args.a_aligned, args.a_scale_aligned);
    Side<T, kPackedB> b(p.b, stack * p.n, b_rows, stack, tile, args.b_aligned,
                        args.b_scale_aligned);
    const int64_t k0 = tile.k_begin / kStepK * kStepK;
    const int64_t steps = tile.k_end > tile.k_begin ? (tile.k_end - k0 + kStepK - 1) / kStepK : 0;

    const auto advance = [&](uint32_t& stage) {
      stage += kStageBytes;
      if (stage == ring_end) stage = ring;
    };
    const auto issue = [&](int64_t step, uint32_t stage) {
      if (step < steps) {
        a.issue(stage, k0 + step * kStepK);
        b.issue(stage + kSideBytes, k0 + step * kStepK);
      }
      commit_copies();  // an empty group keeps the count
    };
    uint32_t stage = ring, decoding = ring, filling = ring;
    for (int i = 0; i < args.stages - 1; ++i, advance(filling)) issue(i, filling);
    a.fetch(k0);
    b.fetch(k0);
    a.decode(decoding);
    b.decode(decoding + kSideBytes);
    advance(decoding);
    a.fetch(k0 + kStepK);
    b.fetch(k0 + kStepK);

    Accumulators acc = {};
    for (int64_t step = 0; step < steps; ++step) {
      wait_copies(args.stages - 2);
      __syncthreads();  // step `step` is complete, and everyone is done with the one before
      issue(step + args.stages - 1, filling);
      advance(filling);
      if (step + 1 < steps) {
        a.decode(decoding);
        b.decode(decoding + kSideBytes);
        advance(decoding);
        a.fetch(k0 + (step + 2) * kStepK);
        b.fetch(k0 + (step + 2) * kStepK);
      }
      multiply_step<T>(stage, stage + kSideBytes, warp, thread % kWarpSize, acc);
      advance(stage);
    }
    wait_copies(0);
    __syncthreads();
    finish(args, tile, *memory, kUnit, warp, g, t, acc, sums);
  }
  if (!p.ragged_k && !p.scatter)
    zero_rows(p, schedule.rows_end(), p.m, kThreads, thread, args.wide);
}

// begin: null for 0.
__global__ void __launch_bounds__(kZeroThreads)
    zero_kernel(const GroupedGemmParams p, const int32_t* begin, bool wide) {
  zero_rows(p, begin ? *begin : 0, p.m, kZeroThreads, static_cast<int>(threadIdx.x), wide);
}

// ------------------------------------------------------------------------------------------- host

using Kernel = void (*)(const GroupedArgs);

template <typename T>
Kernel pick_kernel(bool packed_a, bool packed_b) {
  if (packed_a) return grouped_kernel<T, true, false>;
  return packed_b ? grouped_kernel<T, false, true> : grouped_kernel<T, false, false>;
}

Kernel pick_kernel(const GroupedGemmParams& p) {
  const bool packed_a = p.a.scale != nullptr, packed_b = p.b.scale != nullptr;
  if (packed_a && packed_b) return grouped_kernel<__nv_bfloat16, true, true>;
  const DType type = packed_a ? p.b.type : p.a.type;
  return type == DType::kFloat16 ? pick_kernel<__half>(packed_a, packed_b)
                                 : pick_kernel<__nv_bfloat16>(packed_a, packed_b);
}

// 16-byte loads of the data: where every row starts on 16 bytes.
bool data_aligned(const Operand& o) {
  const int64_t pitch = o.scale ? o.row_stride / 2 : o.row_stride * 2;
  return is_aligned(o.data, kVectorBytes) && pitch % kVectorBytes == 0;
}

bool scale_aligned(const Operand& o) {
  return is_aligned(o.scale, kTileCols) &&
         (o.swizzled || o.row_stride / kBlockSize % kTileCols == 0);
}

GeneralDevice general_device() {
  int per_block = 0, per_sm = 0;
  const int device = current_device().index;
  check(cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
        "cudaDeviceGetAttribute");
  return {static_cast<size_t>(per_block), static_cast<size_t>(per_sm)};
}

void launch_zero(const GroupedGemmParams& p, const int32_t* begin, Stream stream) {
  const int64_t blocks = std::min(ceil_div(p.m * ceil_div(p.n, 8), kZeroThreads),
                                  int64_t{current_device().sm_count} * 4);
  launch("grouped_gemm", zero_kernel, dim3(static_cast<unsigned>(blocks)), kZeroThreads, stream, p,
         begin, wide_stores(p));
}

}  // namespace

void grouped_zero(const GroupedGemmParams& p, Stream stream) {
  if (!p.ragged_k && p.scatter) launch_zero(p, nullptr, stream);
}

void grouped_zero_rest(const GroupedGemmParams& p, const int32_t* begin, Stream stream) {
  if (!p.scatter) launch_zero(p, begin, stream);
}

void grouped_general(const GroupedGemmParams& p, Stream stream) {
  GroupedArgs args = {};
  args.gemm = p;
  if (p.a.scale) args.gemm.a.row_stride = p.k;
  if (p.b.scale) args.gemm.b.row_stride = p.k;
  args.a_aligned = data_aligned(args.gemm.a);
  args.b_aligned = data_aligned(args.gemm.b);
  args.a_scale_aligned = scale_aligned(args.gemm.a);
  args.b_scale_aligned = scale_aligned(args.gemm.b);
  args.wide = wide_stores(p);
  const GeneralPlan plan = choose_general(general_device());
  args.stages = plan.stages;
  grouped_zero(p, stream);
  launch_persistent("grouped_gemm", pick_kernel(p), most_items(p, kTile, kTile), kThreads,
                    plan.shared_bytes, plan.blocks_per_sm, stream, args);
}

}  // namespace nvfp4::cuda
