// Rows of grouped operands as dense BF16 or FP16 in a workspace, exactly: packed ones decoded,
// gathered ones in the problem's order. For kernels that copy boxes of a matrix.
#include "common.cuh"
#include "decode.cuh"
#include "grouped_gemm.h"
#include "grouped_ring.cuh"
#include "grouped_schedule.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kLaneElements = 8;
constexpr int kChunkElements = kWarpSize * kLaneElements;
constexpr int kChunks = 4;  // loads in flight
constexpr int kStepElements = kChunks * kChunkElements;
constexpr int kBlocksPerSm = 8;  // all that fit: they stride over the rest

struct UnpackArgs {
  GroupedGemmParams gemm;
  GroupedPart part;
  Operand source;
  bool weights;        // else rows of A
  int64_t n_begin, n;  // of the weights
  int64_t rows, pitch;
  uint32_t steps_per_row;  // rows * steps_per_row < 2^31: a workspace holds no more
  int64_t tiles_per_row;   // of swizzled scales
  void* out;
};

// Where row `i` of the result comes from.
struct SourceRow {
  int64_t row;        // among all of the operand's, -1: it is zero
  int64_t scale_row;  // among the rows that the scales have, padding included
  int64_t group;      // of weights
};

__device__ __forceinline__ SourceRow find_row(const UnpackArgs& args, const RowWindow& window,
                                              uint32_t i) {
  if (!args.weights) {
    const int64_t from = source_row(args.gemm, window.begin + i);
    return {from, from, 0};
  }
  const uint32_t of_part = i / static_cast<uint32_t>(args.n);
  const int64_t group = args.part.first_group + of_part;
  const int64_t n = args.n_begin + i - int64_t{of_part} * args.n;
  const int64_t of_scales = (args.gemm.n + kTileRows - 1) / kTileRows * kTileRows;
  return {group * args.gemm.n + n, group * (args.source.swizzled ? of_scales : args.gemm.n) + n,
          group};
}

// Eight elements as loaded.
template <bool kPacked>
struct Raw {
  uint4 dense;
  uint32_t word, scale;
};

// Eight elements in order, or where kArranged: elements i and i + 4 in words[i].
template <typename T, bool kPacked, KOrder kOrder>
__device__ __forceinline__ void decode_raw(const Raw<kPacked>& raw, uint32_t (&words)[4]) {
  if constexpr (kPacked && kOrder == KOrder::kArranged) {
    uint32_t scales[2];
    scale_pairs(raw.scale, scales, T{});
    decode8_split<T>(raw.word, scales[0], words);
    const uint32_t unit = round_pair<T>(1.0f / kSplitUnit<T>, 1.0f / kSplitUnit<T>);
    for (int i = 0; i < 4; ++i) words[i] = multiply_pair(words[i], unit, T{});
  } else if constexpr (kPacked) {
    decode8<T>(raw.word, scale_pair(e4m3_decode(static_cast<uint8_t>(raw.scale)), T{}), words);
    const uint32_t unit = round_pair<T>(1.0f / kDecodedUnit, 1.0f / kDecodedUnit);
    for (int i = 0; i < 4; ++i) words[i] = multiply_pair(words[i], unit, T{});
  } else if constexpr (kOrder == KOrder::kArranged) {
    words[0] = permute_bytes(raw.dense.x, raw.dense.z, 0x5410);
    words[1] = permute_bytes(raw.dense.x, raw.dense.z, 0x7632);
    words[2] = permute_bytes(raw.dense.y, raw.dense.w, 0x5410);
    words[3] = permute_bytes(raw.dense.y, raw.dense.w, 0x7632);
  } else {
    words[0] = raw.dense.x;
    words[1] = raw.dense.y;
    words[2] = raw.dense.z;
    words[3] = raw.dense.w;
  }
}

// A lane has eight consecutive elements of k. Arranged, a block of 128 of k has element
// 32 t + 8 w + 4 e + i in place 32 w + 8 i + 2 t + e: what lane t of a fragment decodes from its 16
// bytes w = 0 ... 3, i = 0 ... 3 is where wgmma takes it from.
template <typename T, bool kPacked, KOrder kOrder>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const UnpackArgs args) {
  let_next_kernel_start();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const RowWindow window = args.weights ? RowWindow{0, args.rows} : window_of(args.part);
  const Operand& source = args.source;
  const int64_t k = args.gemm.k;
  const uint32_t warps = gridDim.x * kWarps;
  const uint32_t steps = static_cast<uint32_t>(window.end - window.begin) * args.steps_per_row;
  for (uint32_t step = blockIdx.x * kWarps + threadIdx.x / kWarpSize; step < steps; step += warps) {
    const uint32_t i = step / args.steps_per_row;  // 32 bits: a division of 64 is a call
    const SourceRow from = find_row(args, window, i);
    const int64_t first = int64_t{step - i * args.steps_per_row} * kStepElements;
    Raw<kPacked> raw[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      raw[c].dense = make_uint4(0, 0, 0, 0);
      raw[c].word = raw[c].scale = 0;
      const int64_t element = first + c * kChunkElements + lane * kLaneElements;
      if (element >= k || from.row < 0) continue;
      if constexpr (kPacked) {
        const int64_t column = element / kBlockSize;
        raw[c].word = __ldg(reinterpret_cast<const uint32_t*>(
            static_cast<const uint8_t*>(source.data) + from.row * (k / 2) + element / 2));
        raw[c].scale =
            __ldg(source.scale + (source.swizzled
                                      ? swizzled_offset(from.scale_row, column, args.tiles_per_row)
                                      : from.scale_row * (k / kBlockSize) + column));
      } else {
        raw[c].dense = load_streaming(static_cast<const uint16_t*>(source.data) +
                                      from.row * source.row_stride + element);
      }
    }
    // Only now: that it takes a trip to memory does not delay the loads.
    const int32_t* ends = args.part.ends;
    if (args.weights && ends && ends[from.group] == ends[from.group + 1]) continue;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint32_t words[4];
      decode_raw<T, kPacked, kOrder>(raw[c], words);
      int64_t element = first + c * kChunkElements + lane * kLaneElements;
      if constexpr (kOrder == KOrder::kArranged) {
        const int t = lane / 4 % 4, w = lane % 4;
        transpose_four<4>(words, t);
        element = first + c * kChunkElements + lane / 16 * 128 + 32 * w + 8 * t;
      }
      if (element >= args.pitch) continue;
      uint16_t* out = static_cast<uint16_t*>(args.out) + i * args.pitch + element;
      *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <typename T>
void launch_unpack(const UnpackArgs& args, KOrder order, Stream stream) {
  const bool packed = args.source.scale != nullptr;
  void (*kernel)(const UnpackArgs);
  if (order == KOrder::kArranged) {
    kernel = packed ? unpack_kernel<T, true, KOrder::kArranged>
                    : unpack_kernel<T, false, KOrder::kArranged>;
  } else {
    kernel =
        packed ? unpack_kernel<T, true, KOrder::kPlain> : unpack_kernel<T, false, KOrder::kPlain>;
  }
  const int64_t blocks = ceil_div(args.rows * args.steps_per_row, kWarps);
  if (blocks == 0) return;
  launch("grouped_gemm (unpack)", kernel,
         dim3(static_cast<unsigned>(
             std::min<int64_t>(blocks, int64_t{current_device().sm_count} * kBlocksPerSm))),
         kThreads, stream, args);
}

void launch_unpack(UnpackArgs& args, DType type, KOrder order, Stream stream) {
  args.tiles_per_row = ceil_div(args.gemm.k / kBlockSize, kTileCols);
  args.steps_per_row = static_cast<uint32_t>(ceil_div(args.pitch, kStepElements));
  if (type == DType::kFloat16) {
    launch_unpack<__half>(args, order, stream);
  } else {
    launch_unpack<__nv_bfloat16>(args, order, stream);
  }
}

// One block: each thread has consecutive groups.
__global__ void __launch_bounds__(kThreads) ends_kernel(const GroupedGemmParams p, int32_t* ends) {
  __shared__ int32_t largest[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t each = (p.groups + kThreads - 1) / kThreads;
  const int64_t begin = min(thread * each, p.groups), end = min(begin + each, p.groups);
  const auto inside = [&](int64_t e) {
    return static_cast<int32_t>(min(max(int64_t{p.offs[e]}, int64_t{0}), p.m));
  };
  int32_t running = 0;
  for (int64_t e = begin; e < end; ++e) running = max(running, inside(e));
  largest[thread] = running;
  __syncthreads();
  running = 0;
  for (int t = 0; t < thread; ++t) running = max(running, largest[t]);
  if (thread == 0) ends[0] = 0;
  for (int64_t e = begin; e < end; ++e) {
    running = max(running, inside(e));
    ends[e + 1] = running;
  }
}

}  // namespace

void grouped_ends(const GroupedGemmParams& p, int32_t* ends, Stream stream) {
  launch("grouped_gemm (ends)", ends_kernel, dim3(1), kThreads, stream, p, ends);
}

bool grouped_unpack_takes(const Operand& operand) {
  if (operand.scale) return is_aligned(operand.data, 4);
  return operand.type != DType::kFloat32 && is_aligned(operand.data, 16) &&
         operand.row_stride % 8 == 0;
}

void grouped_unpack_rows(const GroupedGemmParams& p, const GroupedPart& part, DType type,
                         KOrder order, int64_t pitch, void* out, Stream stream) {
  UnpackArgs args = {};
  args.gemm = p;
  args.part = part;
  args.source = p.a;
  args.rows = std::min(part.rows, p.m);
  args.pitch = pitch;
  args.out = out;
  launch_unpack(args, type, order, stream);
}

void grouped_unpack_weights(const GroupedGemmParams& p, const GroupedPart& part, int64_t n_begin,
                            int64_t n, DType type, int64_t pitch, void* out, Stream stream) {
  UnpackArgs args = {};
  args.gemm = p;
  args.part = part;
  args.source = p.b;
  args.weights = true;
  args.n_begin = n_begin;
  args.n = n;
  args.rows = part.groups * n;
  args.pitch = pitch;
  args.out = out;
  launch_unpack(args, type, KOrder::kPlain, stream);
}

}  // namespace nvfp4::cuda
