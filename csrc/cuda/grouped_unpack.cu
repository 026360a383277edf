// What others make for grouped_wgmma and grouped_dense: rows of A as dense BF16 or FP16 in a
// workspace, exactly, beside grouped_wgmma or ahead of it; and the groups' ends.
#include "common.cuh"
#include "decode.cuh"
#include "grouped_gemm.h"
#include "grouped_ring.cuh"
#include "grouped_schedule.cuh"

namespace nvfp4::cuda {
namespace {

// One block a multiprocessor, beside one of grouped_wgmma's, which leaves it 128 x 56 registers; or
// all that fit, ahead of it.
constexpr int kThreads = 128;
constexpr int kBlocksPerSm = 9;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kLaneElements = 8;
constexpr int kChunkElements = kWarpSize * kLaneElements;
constexpr int kChunks = 8;  // loads in flight
constexpr int kStepElements = kChunks * kChunkElements;

struct UnpackArgs {
  GroupedGemmParams gemm;
  GroupedPart part;
  ArrangedA to;
  int64_t tiles_per_row;  // of swizzled scales
};

// Eight elements as loaded.
template <bool kPacked>
struct Raw {
  uint4 dense;
  uint32_t word, scale;
};

// Elements i and i + 4 in words[i].
template <typename T, bool kPacked>
__device__ __forceinline__ void decode_raw(const Raw<kPacked>& raw, uint32_t (&words)[4]) {
  if constexpr (kPacked) {
    uint32_t scales[2];
    scale_pairs(raw.scale, scales, T{});
    decode8_split<T>(raw.word, scales[0], words);
    const uint32_t unit = round_pair<T>(1.0f / kSplitUnit<T>, 1.0f / kSplitUnit<T>);
    for (int i = 0; i < 4; ++i) words[i] = multiply_pair(words[i], unit, T{});
  } else {
    words[0] = permute_bytes(raw.dense.x, raw.dense.z, 0x5410);
    words[1] = permute_bytes(raw.dense.x, raw.dense.z, 0x7632);
    words[2] = permute_bytes(raw.dense.y, raw.dense.w, 0x5410);
    words[3] = permute_bytes(raw.dense.y, raw.dense.w, 0x7632);
  }
}

// A warp's step: some consecutive elements of a row.
template <typename T, bool kPacked>
class Step {
 public:
  // rows * steps_per_row < 2^31: a workspace holds no more.
  __device__ __forceinline__ void load(const UnpackArgs& args, int64_t begin, uint32_t step,
                                       int lane) {
    const Operand& source = args.gemm.a;
    const int64_t k = args.gemm.k;
    const uint32_t row = step / args.to.steps_per_row;  // 32 bits: a division of 64 is a call
    first_ = (step - row * args.to.steps_per_row) * kStepElements;
    out_ = static_cast<uint16_t*>(args.to.rows) + row * args.to.pitch;
    const int64_t from = source_row(args.gemm, begin + row);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      raw_[c].dense = make_uint4(0, 0, 0, 0);
      raw_[c].word = raw_[c].scale = 0;
      const uint32_t element = first_ + c * kChunkElements + lane * kLaneElements;
      if (element >= k || from < 0) continue;
      if constexpr (kPacked) {
        const uint32_t column = element / kBlockSize;
        raw_[c].word = __ldg(reinterpret_cast<const uint32_t*>(
            static_cast<const uint8_t*>(source.data) + from * (k / 2) + element / 2));
        raw_[c].scale = __ldg(source.scale +
                              (source.swizzled ? swizzled_offset(from, column, args.tiles_per_row)
                                               : from * (k / kBlockSize) + column));
      } else {
        raw_[c].dense = load_streaming(static_cast<const uint16_t*>(source.data) +
                                       from * source.row_stride + element);
      }
    }
  }

  // A lane has eight consecutive elements of k. A block of 128 of k has element
  // 32 t + 8 w + 4 e + i in place 32 w + 8 i + 2 t + e: what lane t of a fragment decodes from its
  // 16 bytes w = 0 ... 3, i = 0 ... 3 is where wgmma takes it from.
  __device__ __forceinline__ void store(int64_t pitch, int lane) const {
    const int t = lane / 4 % 4, w = lane % 4;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint32_t words[4];
      decode_raw<T, kPacked>(raw_[c], words);
      transpose_four<4>(words, t);
      const uint32_t element = first_ + c * kChunkElements + lane / 16 * 128 + 32 * w + 8 * t;
      if (element >= pitch) continue;
      *reinterpret_cast<uint4*>(out_ + element) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

 private:
  Raw<kPacked> raw_[kChunks];
  uint16_t* out_;
  uint32_t first_;
};

// All blocks make steps in rounds, in the order of rows. Each may say how many it has made, for
// grouped_wgmma to take rows while later ones are made.
template <typename T, bool kPacked>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) unpack_kernel(const UnpackArgs args) {
  const ArrangedA& to = args.to;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
  unsigned* const rounds = to.rounds && thread == 0 ? to.rounds + blockIdx.x : nullptr;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + thread; i < to.cuts;
       i += int64_t{gridDim.x} * kThreads) {
    to.met[i] = 0;
  }
  if (rounds) *rounds = 0;
  fence_device();
  __syncthreads();
  let_next_kernel_start();
  const RowWindow window = window_of(args.part);
  const uint32_t steps = static_cast<uint32_t>(window.end - window.begin) * to.steps_per_row;
  const uint32_t round = gridDim.x * kWarps;
  uint32_t mine = blockIdx.x * kWarps + thread / kWarpSize;
  Step<T, kPacked> step;
  if (mine < steps) step.load(args, window.begin, mine, lane);
  for (uint32_t done = 0; done < steps; done += round) {
    if (mine < steps) step.store(to.pitch, lane);
    mine += round;
    if (mine < steps) step.load(args, window.begin, mine, lane);
    __syncthreads();
    if (rounds) add_release_acquire(rounds, 1);
  }
}

// One block: each thread has consecutive groups.
__global__ void __launch_bounds__(kThreads)
    ends_kernel(const GroupedGemmParams p, int32_t* ends, unsigned* zeros, int64_t count) {
  __shared__ int32_t largest[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t i = thread; i < count; i += kThreads) zeros[i] = 0;
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

void grouped_ends(const GroupedGemmParams& p, int32_t* ends, unsigned* zeros, int64_t count,
                  Stream stream) {
  launch("grouped_gemm (ends)", ends_kernel, dim3(1), kThreads, stream, p, ends, zeros, count);
}

bool grouped_unpack_takes(const Operand& operand) {
  if (operand.scale) return is_aligned(operand.data, 4);
  return operand.type != DType::kFloat32 && is_aligned(operand.data, 16) &&
         operand.row_stride % 8 == 0;
}

void grouped_unpack_rows(const GroupedGemmParams& p, const GroupedPart& part, ArrangedA& to,
                         Stream stream) {
  to.steps_per_row = static_cast<uint32_t>(ceil_div(to.pitch, kStepElements));
  const int64_t steps = std::min(part.rows, p.m) * to.steps_per_row;
  const int64_t most = int64_t{current_device().sm_count} * (to.rounds ? 1 : kBlocksPerSm);
  to.blocks = static_cast<unsigned>(std::clamp<int64_t>(ceil_div(steps, kWarps), 1, most));
  to.steps_per_round = to.blocks * kWarps;
  UnpackArgs args = {};
  args.gemm = p;
  args.part = part;
  args.to = to;
  args.tiles_per_row = ceil_div(p.k / kBlockSize, kTileCols);
  const bool packed = p.a.scale != nullptr, half = to.type == DType::kFloat16;
  void (*const kernel)(const UnpackArgs) =
      half ? (packed ? unpack_kernel<__half, true> : unpack_kernel<__half, false>)
           : (packed ? unpack_kernel<__nv_bfloat16, true> : unpack_kernel<__nv_bfloat16, false>);
  // As grouped_wgmma has it: a multiprocessor divides its memory anew only when it is empty.
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
  launch("grouped_gemm (unpack)", kernel, dim3(to.blocks), kThreads, stream, args);
}

}  // namespace nvfp4::cuda
