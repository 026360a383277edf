// The fused GEMM for tens to hundreds of rows of A, on Hopper: weights decoded in registers, wgmma.
//
//   out (m, n) = T(fma(alpha, acc, bias)),  acc = sum_k A[m, k] B[n, k] in FP32
//
// - B's rows are the 64-row side of wgmma, which comes out of registers: a warp decodes the
//   fragments it feeds, one word of eight codes a row at a time, while the tensor cores work on the
//   words before. No decoded weight touches memory.
// - A is the other side, out of shared memory. A small kernel ahead writes A's image: for each tile
//   of kN rows and chunk of 128 k, the bytes as shared memory wants them (128-byte swizzle), in the
//   order of k in which words of codes decode, decoded where A is packed. One thread fetches it and
//   the weights' scales by bulk copies; codes come through a pipeline that each thread has to
//   itself.
// - mid_m_plan.h cuts the work. Two blocks that have a tile to themselves are a cluster, and send
//   each other half of their sums. Else those that share a tile leave sums in memory for each other
//   and add up parts of it, warp by warp: who does what depends on who comes when, but all add in
//   the order of k, so that the bytes are the same in every run. No block needs another one but
//   that of its cluster to run at the same time.
#include <mutex>

#include "cluster.cuh"
#include "common.cuh"
#include "decode.cuh"
#include "hopper.cuh"
#include "mid_m_layout.cuh"
#include "mid_m_results.cuh"

namespace nvfp4::cuda {
namespace {

// --------------------------------------------------------------------------------------- A's image

// Lane q of four has v[0 .. 3] and gets v[q] of each.
__device__ __forceinline__ void transpose_four(uint32_t (&v)[4], uint32_t q) {
#pragma unroll
  for (uint32_t step = 1; step <= 2; ++step) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t& low = v[step == 1 ? 2 * j : j];
      uint32_t& high = v[step == 1 ? 2 * j + 1 : j + 2];
      const bool up = q & step;
      const uint32_t got = __shfl_xor_sync(kFullWarp, up ? low : high, static_cast<int>(step));
      (up ? low : high) = got;
    }
  }
}

// A thread's share: lane t's 32 k of one row and chunk. Rows past m and k past the end are zeros.
template <typename T, bool kPackedA>
__global__ void __launch_bounds__(kImageThreads) image_kernel(const __grid_constant__ MidMArgs a) {
#if NVFP4_WGMMA
  let_next_kernel_start();
  const SmallMParams& q = a.gemm;
  const uint32_t m = blockIdx.y, thread = blockIdx.x * kImageThreads + threadIdx.x;
  if (m == 0) {
    for (uint32_t i = thread; i < static_cast<uint32_t>(a.plan.tiles) * kMidMParts * kMidMWarps;
         i += gridDim.x * kImageThreads) {
      a.counters[i] = 0;
    }
  }
  const uint32_t c = thread / 4, t = thread % 4, k = c * kMidMChunkK + kLaneK * t;
  uint32_t words[4] = {}, scale[2] = {};
  uint4 dense[4] = {};
  if (m < q.m && k < q.k) {
    if constexpr (kPackedA) {
      const uint4 v = load_cached(static_cast<const uint8_t*>(q.a) + m * (q.k / 2) + k / 2);
      words[0] = v.x;
      words[1] = v.y;
      words[2] = v.z;
      words[3] = v.w;
      const uint8_t* scales = q.a_scale + swizzled_offset(m, 0, a.tiles_per_row);
      scale_pairs(
          *reinterpret_cast<const uint16_t*>(scales + (2 * c + t / 2) * kTileBytes + t % 2 * 2),
          scale, T{});
    } else {
      const auto* from = static_cast<const uint16_t*>(q.a) + m * q.a_row_stride + k;
#pragma unroll
      for (int w = 0; w < 4; ++w) dense[w] = load_cached(from + 8 * w);
    }
  }
  // Two halves of a chunk, each `rows` rows of 128 bytes: eight vectors, four for each word.
  const uint32_t rows = a.plan.rows, chunks = a.plan.chunks.value, tile = m / rows,
                 r = m - tile * rows;
  uint8_t* out = a.image + (uint64_t{tile} * chunks + c) * (rows * 256) + r * 128;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t pairs[4];  // elements i, i + 4 of the word
    if constexpr (kPackedA) {
      decode8_split<T>(words[w], scale[w / 2], pairs);
    } else {
      pairs[0] = permute_bytes(dense[w].x, dense[w].z, 0x5410);
      pairs[1] = permute_bytes(dense[w].x, dense[w].z, 0x7632);
      pairs[2] = permute_bytes(dense[w].y, dense[w].w, 0x5410);
      pairs[3] = permute_bytes(dense[w].y, dense[w].w, 0x7632);
    }
    transpose_four(pairs, t);
    const uint32_t vector = (w % 2 * 4 + t) ^ (r % 8);
    if (c < chunks) {
      *reinterpret_cast<uint4*>(out + w / 2 * rows * 128 + vector * kVectorBytes) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
#endif
}

// ---------------------------------------------------------------------------------------- weights

// A thread's own pipeline of codes: for each chunk 16 bytes of its two rows.
template <typename L>
struct Weights {
  const uint8_t* row[kRows];
  int at, end, inside;  // bytes of codes: to issue next, of the segment, that this lane's k has
  int left;             // of those that this lane's k has, from the chunk to read next on
  uint32_t codes;       // in shared memory
  uint32_t filling, reading;

  __device__ __forceinline__ void start(const MidMArgs& a, const Segment& s, uint32_t base,
                                        int thread) {
    const SmallMParams& q = a.gemm;
    const int lane = thread % kWarpSize, t = lane % 4;
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      // A row past the end is read as the last one, and its result dropped.
      const int in_tile = row_in_tile(thread / kWarpSize, lane / 4, h);
      const int64_t n = min(int64_t{s.n_tile} * kTileRows + in_tile, q.n - 1);
      row[h] = q.b + n * (q.k / 2) + int64_t{s.first} * kCodeStep + t * kVectorBytes;
    }
    at = 0;
    end = s.count * kCodeStep;
    inside = static_cast<int>(q.k / 2 - int64_t{s.first} * kCodeStep) - t * kVectorBytes;
    left = inside;
    codes = base + L::kB + static_cast<uint32_t>(thread) * kVectorBytes;
    filling = reading = 0;
#pragma unroll
    for (int i = 0; i < L::kBStages - 1; ++i) issue();
  }

  __device__ __forceinline__ void issue() {
    if (at < end) {
      const int valid = at < inside;
#pragma unroll
      for (int h = 0; h < kRows; ++h) {
        copy_async(codes + filling + h * kMultipliers * kVectorBytes,
                   row[h] + static_cast<uint32_t>(at), valid * kVectorBytes);
      }
      at += kCodeStep;
      advance(filling);
    }
    commit_copies();
  }

  // The next chunk's codes.
  __device__ __forceinline__ void read(uint4 (&words)[kRows]) {
    wait_copies<L::kBStages - 2>();
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      words[h] = load_shared(codes + reading + h * kMultipliers * kVectorBytes);
    }
    advance(reading);
    issue();
  }
  // And its scales as decode8_split wants them, from shared memory at `scales`: those of this
  // lane's first row. Past the end of k memory may hold anything: zeros in its stead.
  template <typename T>
  __device__ __forceinline__ void read_scales(uint32_t (&factors)[kRows][2], uint32_t scales,
                                              uint32_t own_shift) {
    const uint32_t shift = left > 0 ? own_shift : 32;
    left -= kCodeStep;
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      scale_pairs(shift_right(load_shared_word(scales + 32 * h), shift), factors[h], T{});
    }
  }

  __device__ __forceinline__ static void advance(uint32_t& stage) {
    stage += L::kBBytes;
    if (stage == L::kBStages * L::kBBytes) stage = 0;
  }
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The words' products with two steps of 16 of k: rows h, h of the 64 x 16 fragments.
template <typename T>
__device__ __forceinline__ void decode(uint32_t (&fragment)[2][4], uint32_t word0, uint32_t word1,
                                       uint32_t factor0, uint32_t factor1) {
  uint32_t low[4], high[4];
  decode8_split<T>(word0, factor0, low);
  decode8_split<T>(word1, factor1, high);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    fragment[s][0] = low[2 * s];
    fragment[s][1] = high[2 * s];
    fragment[s][2] = low[2 * s + 1];
    fragment[s][3] = high[2 * s + 1];
  }
}

// -------------------------------------------------------------------------------------- main loop

// Slots and their barriers, one after the other: bytes from the first one's.
template <typename L>
struct Ring {
  uint32_t slot = 0, barrier = L::kBarriers, operand = 0;  // that in 16 bytes
  uint32_t parity;                                         // of the round

  __device__ explicit Ring(uint32_t first_parity) : parity(first_parity) {}
  __device__ __forceinline__ void advance() {
    slot += L::kSlotBytes;
    operand += L::kSlotBytes / kVectorBytes;
    barrier += L::kBarrierStep;
    if (barrier == L::kEnd) {
      slot = operand = 0;
      barrier = L::kBarriers;
      parity ^= 1;
    }
  }
};
constexpr uint32_t kSecondHalf = kBarrierBytes, kRead = 2 * kBarrierBytes;  // of a slot's barriers

// Brings A's image and B's scales.
template <typename L>
__device__ __forceinline__ void fetch(const MidMArgs& a, int worker, uint32_t base) {
  Piece piece(a.plan, worker);
  Segment s;
  bool very_first = true;
  Ring<L> ring(1);  // of the barriers of slots read: in the first round nothing to wait for
  wait_for_kernel_ahead();
  while (piece.next(s)) {
    const uint8_t* image =
        a.image + (int64_t{s.m_tile} * a.plan.chunks.value + s.first) * (2 * L::kABytes);
    // Bytes of scales that B's row of tiles has left. Its last chunk may have half of one.
    const int64_t first = int64_t{s.first} * L::kScaleBytes;
    int64_t left = a.tiles_per_row * kTileBytes - first;
    const uint8_t* scales = a.gemm.b_scale + s.n_tile * a.tiles_per_row * kTileBytes + first;
#pragma unroll 1
    for (int i = s.count; i > 0; --i) {
      const auto bytes = static_cast<uint32_t>(min(left, int64_t{L::kScaleBytes}));
      barrier_wait(base + ring.barrier + kRead, ring.parity);
      barrier_expect(base + ring.barrier, L::kABytes + bytes);
      copy_bulk(base + ring.slot + L::kScales, scales, bytes, base + ring.barrier);
      copy_bulk(base + ring.slot, image, L::kABytes, base + ring.barrier);
      if (L::kHalves) barrier_wait(base + ring.barrier + kRead + kSecondHalf, ring.parity);
      barrier_expect(base + ring.barrier + kSecondHalf, L::kABytes);
      copy_bulk(base + ring.slot + L::kABytes, image + L::kABytes, L::kABytes,
                base + ring.barrier + kSecondHalf);
      // The first ones come sooner if none of the others are asked for yet.
      if (very_first) barrier_wait(base + ring.barrier, 0);
      very_first = false;
      image += 2 * L::kABytes;
      scales += L::kScaleBytes;
      left -= L::kScaleBytes;
      ring.advance();
    }
  }
}

template <typename T, typename L>
__device__ __forceinline__ void multiply(const MidMArgs& a, int worker, uint32_t base) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize;
  const int lane = thread % kWarpSize, t = lane % 4;
  Piece piece(a.plan, worker);
  Segment s;
  Weights<L> weights;
  bool more = piece.next(s);
  if (more) weights.start(a, s, base, thread);
  barrier_sync(1, kThreads);  // the others are there
  auto scales = static_cast<uint32_t>(base + L::kScales +
                                      swizzled_offset(row_in_tile(warp, lane / 4, 0), 0, 1) +
                                      t / 2 * kTileBytes);
  keep(scales);
  uint32_t shift = 16 * (t % 2);
  keep(shift);
  const uint32_t first_operand = __shfl_sync(kFullWarp, wgmma_descriptor_low(base), 0);
  Ring<L> ring(0);
  constexpr uint32_t kLast = kRead + (L::kHalves ? kSecondHalf : 0);
  while (more) {
    float acc[L::kAcc];
#pragma unroll
    for (int i = 0; i < L::kAcc; ++i) acc[i] = 0.0f;
    uint32_t fragment[2][L::kWords][2][4];  // one set is decoded while products read the other
    uint32_t before = 0;                    // the barrier of the slot read before
    for (int chunk = 0; chunk < s.count; ++chunk) {
      uint4 words[kRows];
      uint32_t factors[kRows][2];
      weights.read(words);
      barrier_wait(base + ring.barrier, ring.parity);
      weights.template read_scales<T>(factors, ring.slot + scales, shift);
      const uint64_t operands = wgmma_descriptor_of(first_operand + ring.operand);
#pragma unroll
      for (int first = 0; first < 4; first += L::kWords) {
        auto& set = fragment[first / L::kWords % 2];
#pragma unroll
        for (int i = 0; i < L::kWords; ++i) {
          const int w = first + i;
          decode<T>(set[i], word(words[0], w), word(words[1], w), factors[0][w / 2],
                    factors[1][w / 2]);
        }
        if (first == 2) barrier_wait(base + ring.barrier + kSecondHalf, ring.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < L::kWords; ++i) {
          const int w = first + i;
          const uint64_t operand = operands + (w / 2 * L::kABytes + w % 2 * 64) / kVectorBytes;
          wgmma(acc, set[i][0], operand, T{});
          wgmma(acc, set[i][1], operand + 2, T{});
        }
        wgmma_commit();
        wgmma_wait<1>();  // the other set is free, and with a chunk's first words the slot before
        if (first == 0 && chunk > 0) barrier_arrive(base + before + kLast);
        if (L::kHalves && first == 2) barrier_arrive(base + ring.barrier + kRead);
      }
      before = ring.barrier;
      ring.advance();
    }
    wgmma_wait<0>();
    pin_registers(acc);
    barrier_arrive(base + before + kLast);
    piece.find_others(s);
    const Segment done = s;
    uint32_t id = threadIdx.x;  // anew: nothing of it has to stay in registers, or in memory
    keep(id);
    const int self = static_cast<int>(id);
    const Epilogue epilogue(a.gemm, done, self / kWarpSize, self % kWarpSize);
    more = piece.next(s);
    if (more) weights.start(a, s, base, self);
    if (done.from == done.to) {
      store_as(a, done, epilogue, self / kWarpSize, self % kWarpSize, 0, acc);
      continue;
    }
    if (a.plan.pairs()) {
      share_in_pair<L>(a, done, epilogue, base, self, acc);
      continue;
    }
    wait_for_kernel_ahead();  // it sets the counters to zero
    const unsigned parts = share_sums<L>(a, done, worker, !more, self, acc);
    const uint32_t own = self / kWarpSize;
    if (!more) barrier_sync(2, kMultipliers);  // all have read their slots
    if (!more && __popc(parts) * (done.to - done.from) * L::kPartBytes <= L::kRoom) {
      if (parts != 0) {
        finish_parts_by_copies<L>(a, done, epilogue, parts, worker, base + own * L::kRoom,
                                  base + L::kReceived + own * kBarrierBytes, self, acc);
      }
    } else {
      finish_parts<L>(a, done, epilogue, parts, worker, self, acc);
    }
  }
  wait_copies<0>();
}

template <typename T, typename L>
__global__ void __launch_bounds__(kThreads, 1) mid_m_kernel(const __grid_constant__ MidMArgs a) {
#if NVFP4_WGMMA
  const uint32_t start = shared_address(dynamic_shared());
  uint32_t base = (start + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
  keep(base);
  const int worker = static_cast<int>(blockIdx.x);
  if (threadIdx.x >= kMultipliers) {
    give_registers<kFetcherRegisters>();
    if (threadIdx.x == kMultipliers) {
      for (uint32_t at = base + L::kBarriers; at < base + L::kEnd; at += L::kBarrierStep) {
        barrier_init(at, 1);
        barrier_init(at + kSecondHalf, 1);
        barrier_init(at + kRead, kMultipliers);
        barrier_init(at + kRead + kSecondHalf, kMultipliers);
      }
      barrier_init(base + L::kOtherDone, kMidMWarps);
      for (uint32_t warp = 0; warp < kMidMWarps; ++warp) {
        barrier_init(base + L::kReceived + warp * kBarrierBytes, 1);
      }
      fence_barrier_init();
    }
    __syncwarp();
    barrier_arrive(1, kThreads);
    if (a.plan.pairs()) cluster_arrive_relaxed();
    if (threadIdx.x == kMultipliers) fetch<L>(a, worker, base);
    if (a.plan.pairs()) cluster_wait();
  } else {
    take_registers<kMultiplierRegisters>();
    if (a.plan.pairs()) cluster_arrive_relaxed();
    multiply<T, L>(a, worker, base);
  }
#endif
}

// ------------------------------------------------------------------------------------------- host

template <typename T, typename L>
void allow_shared() {
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(mid_m_kernel<T, L>),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes),
        "cudaFuncSetAttribute");
}

// A multiprocessor that need not change its split of L1 and shared memory takes the next kernel's
// block at once.
template <typename T, bool kPackedA>
void split_like_mid_m() {
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(image_kernel<T, kPackedA>),
                             cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
}

// Once a device: the kernels' shared memory.
void prepare(const Device& device) {
  constexpr int kMaxDevices = 64;
  static std::once_flag once[kMaxDevices];
  std::call_once(once[device.index], [] {
    allow_shared<__nv_bfloat16, Layout<64>>();
    allow_shared<__nv_bfloat16, Layout<128>>();
    allow_shared<__nv_bfloat16, Layout<192>>();
    allow_shared<__nv_bfloat16, Layout<256>>();
    allow_shared<__half, Layout<64>>();
    allow_shared<__half, Layout<128>>();
    allow_shared<__half, Layout<192>>();
    allow_shared<__half, Layout<256>>();
    split_like_mid_m<__half, true>();
    split_like_mid_m<__half, false>();
    split_like_mid_m<__nv_bfloat16, false>();
  });
}

// The main kernel starts when the image's blocks are all under way, and waits for their end where
// it needs it. Whoever wrote the operands was over before the image kernel began. That one does not
// start early: its blocks would crowd on the multiprocessors that are free first.
template <typename T, typename L>
void launch_mid_m(const MidMArgs& a, bool packed, Stream stream) {
  void (*image)(const MidMArgs) = image_kernel<T, false>;
  if constexpr (std::is_same_v<T, __half>) image = packed ? image_kernel<T, true> : image;
  const dim3 image_grid(static_cast<unsigned>(ceil_div(a.plan.chunks.value * 4, kImageThreads)),
                        static_cast<unsigned>(a.plan.m_tiles.value * a.plan.rows));
  launch("gemm_mid_m, A's image", image, image_grid, kImageThreads, stream, a);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = 2;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(a.plan.workers.value));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = L::kBytes;
  config.stream = as_stream(stream);
  config.attrs = attributes;
  config.numAttrs = a.plan.pairs() ? 2 : 1;
  check(cudaLaunchKernelEx(&config, mid_m_kernel<T, L>, a), "gemm_mid_m");
}

template <typename T>
void launch_tuned(const MidMArgs& a, bool packed, Stream stream) {
  switch (a.plan.rows) {
    case 64:
      return launch_mid_m<T, Layout<64>>(a, packed, stream);
    case 128:
      return launch_mid_m<T, Layout<128>>(a, packed, stream);
    case 192:
      return launch_mid_m<T, Layout<192>>(a, packed, stream);
    default:
      return launch_mid_m<T, Layout<256>>(a, packed, stream);
  }
}

}  // namespace

void gemm_mid_m(const SmallMParams& p, void* workspace, Stream stream) {
  if (p.m == 0 || p.n == 0) return;
  const Device device = current_device();
  prepare(device);
  const bool packed = p.a_scale != nullptr, half = packed || p.a_type == DType::kFloat16;
  MidMArgs a = {};
  a.gemm = p;
  a.plan = find_mid_m(p.m, p.n, p.k, device.sm_count);
  a.image = static_cast<uint8_t*>(workspace);
  a.sums = reinterpret_cast<float*>(a.image + mid_m_image_bytes(a.plan));
  a.counters =
      reinterpret_cast<unsigned*>(a.image + mid_m_image_bytes(a.plan) + mid_m_sums_bytes(a.plan));
  a.tiles_per_row = ceil_div(p.k / kBlockSize, kTileCols);
  const float unit = half ? 1.0f / kSplitUnit<__half> : 1.0f / kSplitUnit<__nv_bfloat16>;
  a.unit = packed ? unit * unit : unit;
  half ? launch_tuned<__half>(a, packed, stream) : launch_tuned<__nv_bfloat16>(a, packed, stream);
}

}  // namespace nvfp4::cuda
