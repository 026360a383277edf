// The fused GEMM for few rows of A, as Hopper likes it: gemm_small_m.cu's arithmetic, other
// plumbing.
//
//   out (m, n) = T(fma(alpha, acc, bias)),  acc = sum_k A[m, k] B[n, k] in FP32
//
// What bounds it is its schedulers, close to the bandwidth of B: 20 instructions decode a word, and
// each mma.sync holds a scheduler up for six cycles, whatever else is ready. From 17 rows of A on
// wgmma, with B's fragments as its register operand, takes less of them. What is left is to start
// early and to end fast:
// - A warp brings B's rows by cp.async in whole lines of 128 bytes, 256 k, into a ring in shared
//   memory that it has to itself: 32 rows, n = 128 tile + 8 w + g + 32 j for g < 8, j < 4, and
//   their scales, four tiles of 128x4. Lane (g, t) multiplies 64 consecutive k of each of its four
//   rows: one word of scales a row. Vectors are exclusive-ored with g, so that no bank is met
//   twice.
// - Warps of their own lay A out in shared memory, decoded where it is packed, in a ring of chunks
//   of 256 k that all warps of the block read: for each eight k of a lane 16 bytes, in the order
//   in which the tensor cores take them (see decode8_split). Their first loads go ahead of most of
//   B's, behind which they would wait for microseconds; and B's first copies go by turns, so that
//   each scheduler has a warp with a chunk to multiply early.
// - Twelve warps share a block, all beside each other along n, or four, two or one of them, the
//   others along k. The blocks of a cluster split k. Each warp sends its sums straight to the block
//   that adds them up, in a fixed order: the same bytes in every run. A NaN scale of row n reaches
//   row n of B's products only.
// - A block takes at most 32 rows of A; more are slices, rows of the grid, that read B again.
// - The next kernel of the stream may be launched while this one runs, and this one may have been:
//   whatever comes before wait_for_kernel_ahead touches no global memory.
#include <array>
#include <mutex>

#include "../recent.h"
#include "cluster.cuh"
#include "common.cuh"
#include "decode.cuh"
#include "hopper.cuh"
#include "small_m_hopper_layout.cuh"
#include "small_m_hopper_stager.cuh"
#include "small_m_hopper_sums.cuh"

namespace nvfp4::cuda {
namespace {

// ------------------------------------------------------------------------------ B: a warp's ring

struct WeightRing {
  const uint8_t *codes, *scales;          // of this lane, in the next chunk
  uint32_t row[kRowsPerLane * 2];         // where its rows begin, from there
  int k_left, scale_k_left;               // from this lane's piece to the end of its rows
  int to_issue, k_step;                   // chunks of this warp left; k from one to the next
  uint32_t begin, end, filling, reading;  // stages
  uint32_t code_target[2], scale_target, scale_row;

  // Lane (r, p): 16-byte piece p of rows r, r + 4, ... of the warp's 32, and of scale tile r.
  __device__ WeightRing(const Args& a, int strip, int lane, int first, int steps, uint32_t ring,
                        int stages) {
    const SmallMParams& q = a.gemm;
    const int r = lane / 8, p = lane % 8;
    const int tile = strip / kHopperTileStrips, w = strip % kHopperTileStrips;
    const int read = min(tile, a.row_tiles - 1);  // past the end: as the last, dropped
    const int last = read == a.row_tiles - 1 ? a.last_row : kTileRows - 1;
    const uint32_t pitch = static_cast<uint32_t>(a.k) / 2;
    codes = q.b + int64_t{read} * (kTileRows * pitch) + first * kRowBytes;
#pragma unroll
    for (int i = 0; i < kRowsPerLane * 2; ++i) {
      row[i] = static_cast<uint32_t>(min(8 * w + r + i % 2 * 4 + i / 2 * 32, last)) * pitch +
               p * kVectorBytes;
    }
    scales = q.b_scale + (int64_t{read} * a.tiles_per_row + first * kChunkTiles) * kTileBytes;
    scale_row = r * kTileBytes + (8 * w + p) * kVectorBytes;
    k_left = a.k - first * kHopperChunk - p * 32;
    scale_k_left = a.k - first * kHopperChunk - r * kLaneK;
    to_issue = steps;
    k_step = a.k_groups * kHopperChunk;
    begin = filling = reading = ring;
    end = ring + stages * kStageBytes;
    code_target[0] = r * kRowBytes + (p ^ r) * kVectorBytes;
    code_target[1] = (r + 4) * kRowBytes + (p ^ (r + 4)) * kVectorBytes;
    scale_target = kCodesBytes + r * (kScalesBytes / kChunkTiles) + (p ^ 2 * r) * kVectorBytes;
  }

  __device__ __forceinline__ void advance(uint32_t& stage) const {
    stage = stage + kStageBytes == end ? begin : stage + kStageBytes;
  }

  // Nothing is read past the end of a row: zeros there.
  __device__ __forceinline__ void issue() {
    if (to_issue-- > 0) {
      const int valid = k_left > 0 ? kVectorBytes : 0;
#pragma unroll
      for (int i = 0; i < kRowsPerLane * 2; ++i) {
        copy_async(filling + code_target[i % 2] + i / 2 * 8 * kRowBytes, codes + row[i], valid);
      }
      copy_async(filling + scale_target, scales + scale_row, scale_k_left > 0 ? kVectorBytes : 0);
      codes += k_step / 2;
      scales += k_step / kBlockSize / kTileCols * kTileBytes;
      k_left -= k_step;
      scale_k_left -= k_step;
    }
    commit_copies();  // an empty group keeps the count
    advance(filling);
  }

  __device__ __forceinline__ uint4 codes_of(int v, int j, int g, int t) const {
    return load_shared(reading + (8 * j + g) * kRowBytes + ((2 * t + v) ^ g) * kVectorBytes);
  }
  __device__ __forceinline__ uint4 scales_of(int g, int t) const {
    return load_shared(reading + kCodesBytes + t * (kScalesBytes / kChunkTiles) +
                       (g ^ 2 * t) * kVectorBytes);
  }
};

// -------------------------------------------------------------------------------------- main loop

// Words of rows j and j + 1 in the order of mma's four registers, for the first four k of each and
// the second.
template <typename T>
__device__ __forceinline__ void decode_rows(uint32_t first, uint32_t first_scale, uint32_t second,
                                            uint32_t second_scale, uint32_t (&out)[2][4]) {
  uint32_t low[4], high[4];
  decode8_split<T>(first, first_scale, low);
  decode8_split<T>(second, second_scale, high);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    out[h][0] = low[2 * h];
    out[h][1] = high[2 * h];
    out[h][2] = low[2 * h + 1];
    out[h][3] = high[2 * h + 1];
  }
}

// Half of a lane's k, v, 32 of each row. scales: a row's two of them in bits 0..15. slot: A's
// chunk.
template <typename T, int kTiles>
__device__ __forceinline__ void multiply_half(int v, const uint4 (&codes)[kRowsPerLane],
                                              const uint32_t (&scales)[kRowsPerLane], uint32_t slot,
                                              int lane, Accumulators<kTiles>& acc) {
  uint32_t scale[kRowsPerLane][2];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) scale_pairs(scales[j], scale[j], T{});
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint4 x[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      x[i] = load_shared(slot + ((4 * v + w) * kTiles + i) * kFragmentBytes + lane * kVectorBytes);
    }
    uint32_t b[2][2][4];  // pair of rows, first or second four k, mma's four
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      decode_rows<T>(word(codes[2 * r], w), scale[2 * r][w / 2], word(codes[2 * r + 1], w),
                     scale[2 * r + 1][w / 2], b[r]);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) mma(acc.c[r][i], b[r][0], x[i].x, x[i].y, T{});
#pragma unroll
      for (int r = 0; r < 2; ++r) mma(acc.c[r][i], b[r][1], x[i].z, x[i].w, T{});
    }
  }
}

// The same by wgmma. fragments: of each pair of rows, which its products still read.
template <typename T, int kTiles>
__device__ __forceinline__ void multiply_half_by_group(int v, const uint4 (&codes)[kRowsPerLane],
                                                       const uint32_t (&scales)[kRowsPerLane],
                                                       uint32_t slot,
                                                       uint32_t (&fragments)[2][2][4],
                                                       Accumulators<kTiles>& acc) {
  const uint32_t activations = wgmma_descriptor_low(slot);
  uint32_t scale[kRowsPerLane][2];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) scale_pairs(scales[j], scale[j], T{});
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t at = activations + ((2 * v + w / 2) * kTiles * kAtomBytes + w % 2 * 64) / 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      wgmma_wait<1>();  // the last ones of this pair
      decode_rows<T>(word(codes[2 * r], w), scale[2 * r][w / 2], word(codes[2 * r + 1], w),
                     scale[2 * r + 1][w / 2], fragments[r]);
      wgmma_fence();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        wgmma(reinterpret_cast<float (&)[4 * kTiles]>(acc.c[r]), fragments[r][h],
              wgmma_descriptor_of(at + 2 * h), T{});
      }
      wgmma_commit();
    }
  }
}

// Chunks [chunk, chunk + k_groups, ...) of the block's, `steps` of them; b has its first under way.
template <typename T, int kTiles>
__device__ __forceinline__ void multiply(WeightRing& b, int chunk, int steps, int k_groups,
                                         int k_left, int g, int t, uint32_t slots, int slots_shift,
                                         uint32_t barriers, Accumulators<kTiles>& acc) {
  constexpr int kStages = HopperRing<kTiles>::kStages;
  const int lane = 4 * g + t;
  [[maybe_unused]] uint32_t fragments[2][2][4];
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 1>();
    __syncwarp();
    uint4 scales = b.scales_of(g, t);
    if (k_left < kLaneK) {  // the row's end: padding counts as 0 whatever it is
      scales.x &= 0xFFFFu;
      scales.y &= 0xFFFFu;
      scales.z &= 0xFFFFu;
      scales.w &= 0xFFFFu;
    }
    const int slot = chunk & ((1 << slots_shift) - 1);
    const uint32_t activations = slots + slot * Layout<kTiles>::kSlotBytes;
    barrier_wait(barriers + slot * 16, chunk >> slots_shift & 1);
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      uint4 codes[kRowsPerLane];
      uint32_t two[kRowsPerLane];
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        codes[j] = b.codes_of(v, j, g, t);
        two[j] = word(scales, j) >> (16 * v);
      }
      if (v == 1) {
        __syncwarp();  // the stage has been read
        b.issue();
        b.advance(b.reading);
      }
      if constexpr (kByGroup<kTiles>) {
        multiply_half_by_group<T, kTiles>(v, codes, two, activations, fragments, acc);
      } else {
        multiply_half<T, kTiles>(v, codes, two, activations, lane, acc);
      }
    }
    if (kByGroup<kTiles>) wgmma_wait<0>();
    barrier_arrive(barriers + slot * 16 + 8);  // each lane for what it has read
    chunk += k_groups;
    k_left -= k_groups * kHopperChunk;
  }
  wait_copies<0>();
}

// ------------------------------------------------------------------------------------ kernel

__device__ __forceinline__ void hold_until(uint32_t began, uint32_t cycles) {
  while (clock_ticks() - began < cycles) {
  }
}

template <typename T, bool kPackedA, int kTiles>
__global__ void __launch_bounds__(kThreads, 1) small_m_hopper_kernel(const Args all) {
  if (NVFP4_WGMMA) {  // else an empty kernel, see kHasHopperKernels
    const Args a = slice_of(all);
    using Ring = HopperRing<kTiles>;
    using Place = Layout<kTiles>;
    using Staged = Stager<T, kPackedA, kTiles>;
    const uint32_t start = shared_address(dynamic_shared());
    uint32_t shared = (start + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
    keep(shared);
    const uint32_t slots = shared + Place::kSlots, barriers = shared + Place::kBarriers;
    const uint32_t received = shared + Place::kReceived;
    const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize, g = lane / 4, t = lane % 4;
    const int rank = a.cluster > 1 ? cluster_rank() : 0;
    const int block = static_cast<int>(a.cluster > 1 ? cluster_index() : blockIdx.x);
    const int first = rank * a.chunks + min(rank, a.longer);
    const int chunks = a.chunks + (rank < a.longer ? 1 : 0);
    const int first_strip = block * a.strips;  // of all of B's
    const int sets = a.cluster * a.k_groups;
    const int places = max(min(a.share, a.strips * kStripRows - rank * a.share), 0);

    if (threadIdx.x == 0) {
      for (int s = 0; s < Ring::kSlots; ++s) {
        barrier_init(barriers + s * 16, Staged::kArrivals);
        barrier_init(barriers + s * 16 + 8, a.strips * kWarpSize);
      }
      barrier_init(received, 1);
      fence_barrier_init();
      const bool by_copy = Sums<kTiles>::kByCopy;
      const int lanes = by_copy ? 4 : a.pairs, counted = by_copy ? sets - a.k_groups : sets;
      barrier_expect(received,
                     static_cast<uint32_t>(places * counted * lanes * Sums<kTiles>::kLaneBytes));
    }
    float alpha;  // loaded where there is something else to wait for
    let_next_kernel_start();
    if (warp >= kHopperWarps) {
      Staged stager(a, first, chunks, slots, barriers);
      wait_for_kernel_ahead();
      stager.start();
      __syncthreads();
      cluster_arrive_relaxed();
      stager.run();
      alpha = load_scalar(a.gemm.alpha);
      cluster_wait();
    } else {
      const int k_group = warp >> a.strip_shift, strip = warp - (k_group << a.strip_shift);
      const int steps = (chunks - k_group + a.k_groups - 1) / a.k_groups;
      const int first_of_group = first + k_group;
      const uint32_t ring = shared + Place::kStages + warp * Ring::kStages * kStageBytes;
      WeightRing b(a, first_strip + strip, lane, first_of_group, steps, ring, Ring::kStages);
      wait_for_kernel_ahead();
      // By turns: were all of it asked for at once, the first chunk would come as late as the last,
      // and A's behind them.
      const uint32_t began = clock_ticks(), turn = warp / kSchedulers * kTurn;
      if (turn == 0) b.issue();
      __syncthreads();  // A's first loads are under way
      cluster_arrive_relaxed();
      if (turn != 0) {
        hold_until(began, turn);
        b.issue();
      }
      hold_until(began, turn + kHeldBack);
#pragma unroll
      for (int s = 1; s < Ring::kStages; ++s) b.issue();
      Accumulators<kTiles> acc = {};
      const int k_left = a.k - first_of_group * kHopperChunk - t * kLaneK;
      multiply<T, kTiles>(b, k_group, steps, a.k_groups, k_left, g, t, slots, slot_shift<kTiles>(a),
                          barriers, acc);
      alpha = load_scalar(a.gemm.alpha);
      cluster_wait();  // the others run: they may be sent something
      const uint32_t set =
          shared + Place::kSums +
          (rank * a.k_groups + k_group) * a.share * static_cast<uint32_t>(Sums<kTiles>::kRowBytes);
      send_sums<kTiles>(a, rank, strip, g, t, set, ring, received, acc);
    }
    if (a.cluster == 1 || Sums<kTiles>::kByCopy) __syncthreads();  // for what stayed here
    if (a.cluster > 1) {
      barrier_wait(received, 0);
      if (Sums<kTiles>::kByCopy) cluster_arrive_relaxed();
    }
    const int64_t first_row =
        int64_t{first_strip / kHopperTileStrips} * kTileRows + first_strip % kHopperTileStrips * 8;
    finish<kTiles>(
        a, first_row, rank * a.share, places, sets, alpha,
        reinterpret_cast<const float*>(dynamic_shared() + (shared - start) + Place::kSums));
    // What is copied from here has arrived where everyone has got all.
    if (Sums<kTiles>::kByCopy && a.cluster > 1) cluster_wait();
  }
}

// ------------------------------------------------------------------------------------------- host

using Kernel = void (*)(const Args);

template <typename T, bool kPackedA>
Kernel pick_kernel(int tiles) {
  switch (tiles) {
    case 1:
      return small_m_hopper_kernel<T, kPackedA, 1>;
    case 2:
      return small_m_hopper_kernel<T, kPackedA, 2>;
    default:
      return small_m_hopper_kernel<T, kPackedA, 4>;
  }
}

// Packed A is decoded to FP16 too, as in gemm_small_m.cu.
Kernel pick_kernel(const SmallMParams& p, int tiles) {
  if (p.a_scale) return pick_kernel<__half, true>(tiles);
  if (p.a_type == DType::kBFloat16) return pick_kernel<__nv_bfloat16, false>(tiles);
  if (p.a_type == DType::kFloat16) return pick_kernel<__half, false>(tiles);
  throw std::runtime_error("gemm_small_m_hopper: A must be packed NVFP4, bfloat16 or float16");
}

// Of a plan with that many strips beside each other.
uint32_t shared_bytes(int tiles, int strips) {
  const int slots = 1 << hopper_slot_shift(tiles, strips);
  return tiles == 1   ? Layout<1>::bytes(slots)
         : tiles == 2 ? Layout<2>::bytes(slots)
                      : Layout<4>::bytes(slots);
}

cudaLaunchConfig_t launch_config(int64_t blocks, int cluster, uint32_t shared, cudaStream_t stream,
                                 std::array<cudaLaunchAttribute, 2>& attributes) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes.data();
  config.numAttrs = 2;
  return config;
}

constexpr int kMaxDevices = 64;

struct DeviceEntry {
  std::once_flag once;
  HopperDevice device = {};
};

// All the shared memory that they need, for every kernel; what the driver says about clusters.
void describe_device(const Device& device, DeviceEntry& e) {
  for (const int tiles : {1, 2, 4}) {
    for (const Kernel kernel : {pick_kernel<__half, true>(tiles), pick_kernel<__half, false>(tiles),
                                pick_kernel<__nv_bfloat16, false>(tiles)}) {
      check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes(tiles, hopper_least_strips(tiles)))),
            "cudaFuncSetAttribute");
    }
  }
  e.device.resident[1] = device.sm_count;
  for (int c = 2; c <= kHopperMaxCluster; ++c) {
    std::array<cudaLaunchAttribute, 2> attributes = {};
    const cudaLaunchConfig_t config =
        launch_config(c, c, shared_bytes(4, kHopperWarps), nullptr, attributes);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, small_m_hopper_kernel<__half, true, 4>,
                                       &config) != cudaSuccess) {
      cudaGetLastError();
      clusters = 0;
    }
    e.device.resident[c] = clusters * c;
  }
}

const DeviceEntry& device_entry(const Device& device) {
  static std::array<DeviceEntry, kMaxDevices> entries;
  DeviceEntry& e = entries[static_cast<size_t>(device.index)];
  std::call_once(e.once, [&] { describe_device(device, e); });
  return e;
}

void launch_planned(const SmallMParams& p, const HopperPlan& plan, cudaStream_t stream) {
  Args a = {};
  a.gemm = p;
  a.strips = plan.strips;
  a.strip_shift = plan.strips == 1 ? 0 : plan.strips == 2 ? 1 : plan.strips == 4 ? 2 : 4;
  a.k_groups = hopper_k_groups(plan.strips);
  a.slot_shift = hopper_slot_shift(hopper_tiles(p.m), plan.strips);
  a.span_shift = 3 + std::min(a.strip_shift, 2);
  a.cluster = plan.cluster;
  const int64_t chunks = ceil_div(p.k, kHopperChunk);
  a.chunks = static_cast<int>(chunks / plan.cluster);
  a.longer = static_cast<int>(chunks % plan.cluster);
  a.share = hopper_share(plan);
  a.per_share = ((1u << kShareShift) + a.share - 1) / a.share;
  const float unit = p.a_scale || p.a_type == DType::kFloat16 ? 1.0f / kSplitUnit<__half>
                                                              : 1.0f / kSplitUnit<__nv_bfloat16>;
  a.unit = p.a_scale ? unit * unit : unit;
  a.m = static_cast<int>(p.m);
  a.k = static_cast<int>(p.k);
  a.row_tiles = static_cast<int>(ceil_div(p.n, kTileRows));
  a.last_row = static_cast<int>((p.n - 1) % kTileRows);
  a.tiles_per_row = static_cast<int>(ceil_div(p.k / kBlockSize, kTileCols));
  const int tiles = hopper_tiles(p.m);
  std::array<cudaLaunchAttribute, 2> attributes = {};
  cudaLaunchConfig_t config = launch_config(hopper_blocks(p.n, plan), plan.cluster,
                                            shared_bytes(tiles, plan.strips), stream, attributes);
  config.gridDim.y = static_cast<unsigned>(hopper_slices(p.m));
  check(cudaLaunchKernelEx(&config, pick_kernel(p, tiles), a), "gemm_small_m_hopper");
}

const HopperPlan& find_plan(const SmallMParams& p, const Device& device) {
  static thread_local Recent<5, HopperPlan> found;
  const bool packed = p.a_scale != nullptr;
  return found.find({p.m, p.n, p.k, packed, device.index}, [&] {
    return plan_hopper(p.m, p.n, p.k, packed, device_entry(device).device);
  });
}

}  // namespace

void gemm_small_m_hopper(const SmallMParams& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return;
  launch_planned(p, find_plan(p, current_device()), as_stream(stream));
}

}  // namespace nvfp4::cuda
