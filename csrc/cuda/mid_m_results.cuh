// gemm_mid_m's results: a tile's sums, added up among the blocks that share it, to out.
#pragma once

#include "cluster.cuh"
#include "mid_m_layout.cuh"

namespace nvfp4::cuda {
namespace {

// Four neighbours along n of one row of A.
template <typename Out>
__device__ __forceinline__ void store4(Out* out, int64_t left, bool wide,
                                       const uint32_t (&words)[sizeof(Out)]) {
  if (wide) {
    if constexpr (sizeof(Out) == 4) {
      *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= left) return;
    if constexpr (sizeof(Out) == 4) {
      reinterpret_cast<uint32_t*>(out)[i] = words[i];
    } else {
      reinterpret_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
    }
  }
}

template <typename Out>
__device__ __forceinline__ uint32_t bits_of(Out v) {
  uint32_t bits = 0;
  memcpy(&bits, &v, sizeof(v));
  return bits;
}

// What is added to a tile's sums.
struct Epilogue {
  float alpha, bias[kRows];

  __device__ Epilogue(const SmallMParams& q, const Segment& s, int warp, int lane)
      : alpha(load_scalar(q.alpha)) {
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      const int64_t n = int64_t{s.n_tile} * kTileRows + row_in_tile(warp, lane / 4, h);
      bias[h] = q.bias && n < q.n ? load_as_float(q.bias, q.bias_type, n) : 0.0f;
    }
  }
};

// Sums i .. i + 3 of two rows of B and two of A as results, four neighbours along n a lane.
template <typename Out, int kCount>
__device__ __forceinline__ void turn(uint32_t (&words)[sizeof(Out)], const MidMArgs& a,
                                     const Epilogue& e, const float (&sums)[kCount], int i) {
  uint32_t bits[kRows][2];
#pragma unroll
  for (int h = 0; h < kRows; ++h) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      bits[h][j] =
          bits_of(from_float<Out>(fma_rn(e.alpha, sums[i + 2 * h + j] * a.unit, e.bias[h])));
    }
  }
#pragma unroll
  for (int h = 0; h < kRows; ++h) {
    if constexpr (sizeof(Out) == 4) {
      const uint32_t low = transpose_matrix(permute_bytes(bits[h][0], bits[h][1], 0x5410));
      const uint32_t high = transpose_matrix(permute_bytes(bits[h][0], bits[h][1], 0x7632));
      words[2 * h] = permute_bytes(low, high, 0x5410);
      words[2 * h + 1] = permute_bytes(low, high, 0x7632);
    } else {
      words[h] = transpose_matrix(bits[h][0] | bits[h][1] << 16);
    }
  }
}

// kCount sums a thread, from column `first` of the tile's kN on. Some are turned round before the
// first one of them is stored, so that they don't wait for each other.
template <typename Out, int kCount>
__device__ __forceinline__ void store(const MidMArgs& a, const Segment& s, const Epilogue& e,
                                      int warp, int lane, int first, const float (&sums)[kCount]) {
  constexpr int kTogether = kCount % 16 == 0 ? 4 : kCount % 12 == 0 ? 3 : 2;  // times four
  static_assert(kCount % (4 * kTogether) == 0);
  const SmallMParams& q = a.gemm;
  const int64_t n = int64_t{s.n_tile} * kTileRows + 16 * warp + 4 * (lane % 4);
  const int64_t m = int64_t{s.m_tile} * a.plan.rows + first + lane / 4;
  Out* out = static_cast<Out*>(q.out) + m * q.n + n;
  const int rows = n < q.n ? static_cast<int>(min(q.m - m, int64_t{2 * kCount})) : 0;
  const bool wide = q.n % 4 == 0;
#pragma unroll
  for (int begin = 0; begin < kCount; begin += 4 * kTogether) {
    uint32_t words[kTogether][sizeof(Out)];
#pragma unroll
    for (int b = 0; b < kTogether; ++b) turn<Out>(words[b], a, e, sums, begin + 4 * b);
#pragma unroll
    for (int b = 0; b < kTogether; ++b) {
      if (2 * (begin + 4 * b) < rows) store4(out, q.n - n, wide, words[b]);
      out += 8 * q.n;
    }
  }
}

template <int kCount>
__device__ __forceinline__ void store_as(const MidMArgs& a, const Segment& s, const Epilogue& e,
                                         int warp, int lane, int first,
                                         const float (&sums)[kCount]) {
  switch (a.gemm.out_type) {
    case DType::kFloat32:
      return store<float>(a, s, e, warp, lane, first, sums);
    case DType::kBFloat16:
      return store<__nv_bfloat16>(a, s, e, warp, lane, first, sums);
    default:
      return store<__half>(a, s, e, warp, lane, first, sums);
  }
}

// Where a worker leaves a warp's sums of a tile: those of all lanes, four by four. It may be the
// first of those that share one tile, and a later one of those that share another.
template <typename L>
__device__ __forceinline__ float4* left_sums(const MidMArgs& a, const Segment& s, int worker,
                                             int warp) {
  const int64_t slot = 2 * worker + (worker == s.from);
  return reinterpret_cast<float4*>(a.sums) + (slot * kMidMWarps + warp) * (kWarpSize * L::kAcc / 4);
}

// The worker of number `other` among those that share a tile with the one of number `mine`.
__device__ __forceinline__ int other_worker(const Segment& s, int other, int mine) {
  return s.from + other + (other >= mine);
}

template <int kCount, int kAll>
__device__ __forceinline__ void add_mine(int first, const float (&mine)[kAll],
                                         float (&total)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) total[i] += mine[first + i];
}

// Adds up all workers' sums of a tile in the order of k, which is their own: a thread's from the
// one with number `first` on, `mine` being this worker's. kAtOnce pieces are loaded together.
template <typename L>
__device__ __forceinline__ void add_pieces(const MidMArgs& a, const Segment& s, int first,
                                           int worker, int thread, const float (&mine)[L::kAcc],
                                           float (&total)[L::kBatch]) {
  const int others = s.to - s.from, before = worker - s.from;
#pragma unroll 1
  for (int done = 0; done < others; done += L::kAtOnce) {
    float4 v[L::kAtOnce][L::kBatch / 4];
#pragma unroll
    for (int p = 0; p < L::kAtOnce; ++p) {
      const float4* theirs =
          left_sums<L>(a, s, other_worker(s, done + p, before), thread / kWarpSize) +
          first / 4 * kWarpSize + thread % kWarpSize;
#pragma unroll
      for (int i = 0; i < L::kBatch / 4; ++i) {
        v[p][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (done + p < others) v[p][i] = __ldcg(theirs + i * kWarpSize);
      }
    }
#pragma unroll
    for (int p = 0; p < L::kAtOnce; ++p) {
      if (done + p == before && before < others) add_mine(first, mine, total);
#pragma unroll
      for (int i = 0; i < L::kBatch / 4; ++i) {
        total[4 * i] += v[p][i].x;
        total[4 * i + 1] += v[p][i].y;
        total[4 * i + 2] += v[p][i].z;
        total[4 * i + 3] += v[p][i].w;
      }
    }
  }
  if (before == others) add_mine(first, mine, total);
}

// How many blocks have left their sums of what a warp has of a tile: lane p counts for part p of
// kMidMParts along m.
class Counter {
 public:
  __device__ Counter(const MidMArgs& a, const Segment& s, int warp, int lane)
      : counter_(a.counters + (s.tile * kMidMWarps + warp) * kMidMParts + lane),
        others_(static_cast<unsigned>(s.to - s.from)) {}

  __device__ bool all_others_came() const { return load_acquire(counter_) == others_; }
  // Looks for them for a while.
  __device__ bool others_come() const {
#pragma unroll 1
    for (int look = 0; look < kPatience; ++look) {
      if (all_others_came()) return true;
    }
    return false;
  }
  // Counts this block, and gives how many were there.
  __device__ unsigned come() const { return add_release_acquire(counter_, 1); }
  __device__ bool was_last(unsigned there) const { return there == others_; }

 private:
  unsigned* counter_;
  unsigned others_;
};

// Leaves a block's sums of those parts of a tile that are in the mask, all lanes'.
template <typename L>
__device__ __forceinline__ void leave_sums(const MidMArgs& a, const Segment& s, unsigned mask,
                                           int worker, int thread, const float (&sums)[L::kAcc]) {
  float4* mine = left_sums<L>(a, s, worker, thread / kWarpSize) + thread % kWarpSize;
#pragma unroll
  for (int part = 0; part < kMidMParts; ++part) {
    if (!(mask >> part & 1)) continue;
#pragma unroll
    for (int i = part * L::kPart; i < (part + 1) * L::kPart; i += 4) {
      mine[i / 4 * kWarpSize] = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    }
  }
  __syncwarp();
}

// Which parts of a tile that other blocks have sums of, too, this one is to finish: of those the
// others' sums are there. So that blocks that come at about the same time share the adding, each
// owns parts: it does not leave those as long as it is `patient` and the others come soon, while
// all others' it does. None waits for long: a block that is not running yet may be waiting for this
// one's multiprocessor. Whoever has left sums and is the last to come finishes the part.
template <typename L>
__device__ __forceinline__ unsigned share_sums(const MidMArgs& a, const Segment& s, int worker,
                                               bool patient, int thread,
                                               const float (&sums)[L::kAcc]) {
  const int lane = thread % kWarpSize;
  const bool counts = lane < kMidMParts;
  const Counter counter(a, s, thread / kWarpSize, lane);
  const bool owns = patient && s.from + lane * (s.to - s.from + 1) / kMidMParts == worker;
  bool finish = counts && counter.all_others_came();
  bool leave = counts && !finish && !owns;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    const unsigned mask = __ballot_sync(kFullWarp, leave);
    if (mask != 0) leave_sums<L>(a, s, mask, worker, thread, sums);
    unsigned there = 0;
    if (leave) there = counter.come();
    const bool left = leave;
    leave = false;
    if (turn == 0 && counts && owns && !finish) {
      finish = counter.others_come();
      leave = !finish;
    }
    if (left) finish = counter.was_last(there);
    __syncwarp();
  }
  return __ballot_sync(kFullWarp, finish);
}

// Adds up those parts of a tile that are in the mask, all lanes', in the order of k, and stores
// them.
template <typename L>
__device__ __forceinline__ void finish_parts(const MidMArgs& a, const Segment& s, const Epilogue& e,
                                             unsigned mask, int worker, int thread,
                                             const float (&sums)[L::kAcc]) {
#pragma unroll
  for (int part = 0; part < kMidMParts; ++part) {
    if (!(mask >> part & 1)) continue;
#pragma unroll
    for (int first = part * L::kPart; first < (part + 1) * L::kPart; first += L::kBatch) {
      float total[L::kBatch] = {};
      add_pieces<L>(a, s, first, worker, thread, sums, total);
      store_as(a, s, e, thread / kWarpSize, thread % kWarpSize, 2 * first, total);
    }
  }
}

// The same where slots are free: all of the others' sums are on their way at the same time. `room`:
// a warp's part of them.
template <typename L>
__device__ __forceinline__ void finish_parts_by_copies(const MidMArgs& a, const Segment& s,
                                                       const Epilogue& e, unsigned mask, int worker,
                                                       uint32_t room, uint32_t received, int thread,
                                                       const float (&sums)[L::kAcc]) {
  const int others = s.to - s.from, before = worker - s.from;
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  if (lane == 0) {
    fence_async_proxy();
    barrier_expect(received, __popc(mask) * others * L::kPartBytes);
    uint32_t to = room;
#pragma unroll 1
    for (unsigned left = mask; left != 0; left &= left - 1) {
      const int first = (__ffs(left) - 1) * L::kPart;
#pragma unroll 1
      for (int other = 0; other < others; ++other) {
        copy_bulk(to,
                  left_sums<L>(a, s, other_worker(s, other, before), warp) + first / 4 * kWarpSize,
                  L::kPartBytes, received);
        to += L::kPartBytes;
      }
    }
  }
  __syncwarp();
  barrier_wait(received, 0);
  uint32_t from = room + lane * kVectorBytes;
#pragma unroll
  for (int part = 0; part < kMidMParts; ++part) {
    if (!(mask >> part & 1)) continue;
    float total[L::kPart] = {};
#pragma unroll 1
    for (int other = 0; other < others; ++other) {
      if (other == before) add_mine(part * L::kPart, sums, total);
#pragma unroll
      for (int i = 0; i < L::kPart; i += 4) {
        const uint4 v = load_shared(from + i * (kWarpSize * 4));
        total[i] += __uint_as_float(v.x);
        total[i + 1] += __uint_as_float(v.y);
        total[i + 2] += __uint_as_float(v.z);
        total[i + 3] += __uint_as_float(v.w);
      }
      from += L::kPartBytes;
    }
    if (before == others) add_mine(part * L::kPart, sums, total);
    store_as(a, s, e, warp, lane, 2 * part * L::kPart, total);
  }
}

// Of a tile that two blocks share, a cluster: each sends the other one the sums of its half along
// m, where slots were before, adds up those of its own half and stores them.
template <typename L>
__device__ __forceinline__ void share_in_pair(const MidMArgs& a, const Segment& s,
                                              const Epilogue& e, uint32_t base, int thread,
                                              float (&sums)[L::kAcc]) {
  constexpr int kHalf = L::kAcc / 2;
  const int rank = cluster_rank(), other = 1 - rank;
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  cluster_wait();  // the other one runs, its barriers are set up
  __syncwarp();
  if (lane == 0) barrier_arrive_cluster(base + L::kOtherDone, other);
  if (rank == 1) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float first = sums[i];
      sums[i] = sums[kHalf + i];
      sums[kHalf + i] = first;
    }
  }
  const uint32_t received = base + L::kReceived + warp * kBarrierBytes;
  const uint32_t at = base + warp * L::kRoom + lane * kVectorBytes;
  if (lane == 0) barrier_expect(received, L::kSent);
  barrier_wait(base + L::kOtherDone, 0);
#pragma unroll
  for (int i = 0; i < kHalf; i += 4) {
    const float four[4] = {sums[kHalf + i], sums[kHalf + i + 1], sums[kHalf + i + 2],
                           sums[kHalf + i + 3]};
    store_cluster_async(at + i * (kWarpSize * 4), other, four, received);
  }
  barrier_wait(received, 0);
  float total[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; i += 4) {
    const uint4 v = load_shared(at + i * (kWarpSize * 4));
    total[i] = sums[i] + __uint_as_float(v.x);
    total[i + 1] = sums[i + 1] + __uint_as_float(v.y);
    total[i + 2] = sums[i + 2] + __uint_as_float(v.z);
    total[i + 3] = sums[i + 3] + __uint_as_float(v.w);
  }
  store_as(a, s, e, warp, lane, rank * 2 * kHalf, total);
}

}  // namespace
}  // namespace nvfp4::cuda
