// The dynamic global scale on a GPU: g = max(fl32(amax / 2688), 2^-126), 1 where amax is 0.
//
// amax is over the finite elements. A maximum does not depend on the order it is taken in, so the
// result is the same from run to run. Pass one leaves a maximum per block in the scratch memory,
// pass two reduces those; a tensor that one block reads quickly needs no second pass.
//
// Of silu(gate) * up the values are the producer's, computed again and written nowhere.
#include "common.cuh"
#include "hopper.cuh"
#include "swiglu.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxBlocks = 2048;  // floats of scratch memory
constexpr int kLaneElements = 8;
constexpr int kChunkElements = kWarpSize * kLaneElements;
// SwiGLU's arithmetic takes more registers, so fewer threads and chunks; a chunk is twice the
// bytes.
template <bool kSwiglu>
constexpr int kBlocksPerSm = kSwiglu ? 4 : 8;
template <bool kSwiglu>
constexpr int kChunks = kSwiglu ? 2 : 4;  // that a lane loads at a time
template <bool kSwiglu>
constexpr int kStepElements = kChunks<kSwiglu> * kChunkElements;
constexpr int64_t kOneBlockSteps = 4 * kWarps;  // up to here a second launch costs more

struct AmaxArgs {
  const void* x;
  int64_t row_stride, rows, cols;
  int64_t steps_per_row;
  int64_t row_step, place_step;  // from a warp's step to its next: rows, and steps in the row
  float* partial;                // one a block
  float* out;                    // not null: there is one block, and this is the result
};

// Of a finite maximum; valid in thread 0.
__device__ __forceinline__ float block_max(float v) {
  __shared__ float warps[kWarps];
  for (int d = kWarpSize / 2; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, d));
  if (threadIdx.x % kWarpSize == 0) warps[threadIdx.x / kWarpSize] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kWarps; ++i) v = fmaxf(v, warps[i]);
  }
  return v;
}

template <typename T>
__device__ float finite_abs_max(const T* p, int64_t count) {
  float m = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float v = to_float(p[i]);
    if (is_finite(v)) m = fmaxf(m, fabsf(v));
  }
  return m;
}

// silu(gate) * up, in the plain form where some lane has to.
template <typename T>
__device__ __forceinline__ Values<kLaneElements> swiglu8(const Raw8<T>& gate, const Raw8<T>& up) {
  Values<kLaneElements> g, u;
  widen(gate, g.v);
  widen(up, u.v);
  if (!__all_sync(kFullWarp, is_fast_silu(gate))) return plain_swiglu(g, u);
  for (int i = 0; i < kLaneElements; ++i) g.v[i] = fast_swiglu<T>(g.v[i], u.v[i]);
  return g;
}

template <typename T, bool kSwiglu, bool kAligned>
__global__ void __launch_bounds__(kThreads) amax_kernel(const AmaxArgs a) {
  wait_for_kernel_ahead();
  constexpr int kChunks = cuda::kChunks<kSwiglu>, kStepElements = cuda::kStepElements<kSwiglu>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  float m = 0.0f;
  int64_t row = warp / a.steps_per_row, place = warp % a.steps_per_row;
  const auto advance = [&] {
    row += a.row_step;
    place += a.place_step;
    if (place >= a.steps_per_row) {
      place -= a.steps_per_row;
      ++row;
    }
  };
  for (; row < a.rows; advance()) {
    const int64_t column = place * kStepElements + lane * kLaneElements;
    const T* p = static_cast<const T*>(a.x) + row * a.row_stride + column;
    const int64_t left = a.cols - column;
    Raw8<T> raw[kChunks], up[kSwiglu ? kChunks : 1];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const bool whole = c * kChunkElements + kLaneElements <= left;
      raw[c] = whole ? load8<kAligned>(p + c * kChunkElements) : zero8<T>();
      if constexpr (kSwiglu) {
        up[c] = whole ? load8<kAligned>(p + a.cols + c * kChunkElements) : zero8<T>();
      }
    }
    if constexpr (kSwiglu) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const Values<kLaneElements> h = swiglu8(raw[c], up[c]);
        const float chunk_max = abs_max8(h.v);
        m = fmaxf(m, is_finite(chunk_max) ? chunk_max : finite_abs_max8(h.v));
      }
      continue;  // cols is a multiple of kLaneElements
    }
    float step_max = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) step_max = max_nan(step_max, raw_abs_max(raw[c]));
    if (!is_finite(step_max)) {  // rare: look again, at the finite elements only
      step_max = 0.0f;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float v[8];
        widen(raw[c], v);
        step_max = fmaxf(step_max, finite_abs_max8(v));
      }
    }
    m = fmaxf(m, step_max);
    // The row's last few elements, where cols is no multiple of kLaneElements.
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t rest = left - c * kChunkElements;
      if (rest > 0 && rest < kLaneElements) {
        m = fmaxf(m, finite_abs_max(p + c * kChunkElements, rest));
      }
    }
  }
  m = block_max(m);
  if (threadIdx.x == 0) {
    if (a.out) {
      *a.out = global_scale_from_amax(m);
    } else {
      a.partial[blockIdx.x] = m;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(const float* partial, int blocks, float* out) {
  wait_for_kernel_ahead();
  float m = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < blocks; i += kThreads) m = fmaxf(m, partial[i]);
  m = block_max(m);
  if (threadIdx.x == 0) *out = global_scale_from_amax(m);
}

template <bool kSwiglu>
void launch_global_scale(const AmaxParams& p, void* scratch, Stream stream) {
  AmaxArgs a;
  a.x = p.x;
  a.rows = p.rows;
  a.cols = p.cols;
  a.row_stride = p.x_row_stride;
  if (!kSwiglu && a.row_stride == a.cols && a.rows > 0) {  // contiguous: one long row
    a.cols *= a.rows;
    a.rows = 1;
  }
  a.steps_per_row = std::max<int64_t>(1, ceil_div(a.cols, kStepElements<kSwiglu>));
  a.partial = static_cast<float*>(scratch);
  const int64_t steps = a.rows * a.steps_per_row;
  const int64_t most =
      std::min<int64_t>(int64_t{current_device().sm_count} * kBlocksPerSm<kSwiglu>, kMaxBlocks);
  const int64_t blocks =
      steps <= kOneBlockSteps ? 1 : std::min<int64_t>(ceil_div(steps, kWarps), most);
  a.row_step = blocks * kWarps / a.steps_per_row;
  a.place_step = blocks * kWarps % a.steps_per_row;
  a.out = blocks == 1 ? p.out : nullptr;
  const dim3 grid(static_cast<unsigned>(blocks));
  dispatch(p.x_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto rows_aligned = [](int64_t elements) {
      return elements * static_cast<int64_t>(sizeof(T)) % 16 == 0;
    };
    const bool aligned = is_aligned(p.x, 16) && (a.rows <= 1 || rows_aligned(p.x_row_stride)) &&
                         (!kSwiglu || rows_aligned(p.cols));
    launch_behind("global_scale",
                  aligned ? amax_kernel<T, kSwiglu, true> : amax_kernel<T, kSwiglu, false>, grid,
                  kThreads, stream, a);
  });
  if (blocks > 1) {
    launch_behind("global_scale", finish_kernel, dim3(1), kThreads, stream, a.partial,
                  static_cast<int>(blocks), p.out);
  }
}

}  // namespace

size_t global_scale_scratch_bytes(const AmaxParams&) { return kMaxBlocks * sizeof(float); }

void global_scale(const AmaxParams& p, void* scratch, Stream stream) {
  if (p.swiglu) {
    launch_global_scale<true>(p, scratch, stream);
  } else {
    launch_global_scale<false>(p, scratch, stream);
  }
}

}  // namespace nvfp4::cuda
