// gemm_small_m_hopper's results: warps' sums, added up in the blocks of a cluster, to out.
//
// A block's rows of B have places, and block r of a cluster adds up the places [r share, (r + 1)
// share): it receives [block of the cluster][warp along k][place] a row's 8 kTiles sums, in the
// order t, i < kTiles, c < 2 of A's rows 8 i + 2 t + c, in vectors of four; those of every other
// place, or every other two, are exclusive-ored, so that no bank is met twice. No t of which all
// rows are past m is looked at.
//
// Up to 16 rows of A each lane sends its own sums. With more of them that takes the time of a step
// or two, and a warp's sums go from its ring as one copy, or as many as there are other blocks to
// add them up. So its rows have places beside each other there; else neighbours in n have.
#pragma once

#include "cluster.cuh"
#include "hopper.cuh"
#include "small_m_hopper_layout.cuh"

namespace nvfp4::cuda {
namespace {

template <int kTiles>
struct Accumulators {
  float c[kRowsPerLane / 2][kTiles][4];  // pairs of rows (j, j + 1), tiles of A, mma's four
};

template <int kTiles>
struct Sums {
  static constexpr bool kByCopy = kTiles == 4;
  static constexpr int kRowBytes = 32 * kTiles, kVectors = 2 * kTiles, kLaneBytes = 8 * kTiles;
  static_assert(kStripRows * kRowBytes <= HopperRing<kTiles>::kStages * kStageBytes);

  // From a row's start; in_warp: 8 j + g.
  __device__ __forceinline__ static uint32_t vector_at(int vector, int in_warp) {
    return (vector ^ in_warp % 8 * kVectors / 8) * kVectorBytes;
  }
};

// Where row 8 j + g of a warp's is.
template <int kTiles>
__device__ __forceinline__ int place_of(const Args& a, int strip, int j, int g) {
  if (Sums<kTiles>::kByCopy) return strip * kStripRows + 8 * j + g;
  return strip / kHopperTileStrips * kTileRows + (j << a.span_shift) +
         strip % kHopperTileStrips * 8 + g;
}
// Which row that is, from the block's first.
template <int kTiles>
__device__ __forceinline__ int row_at(const Args& a, int place) {
  if (Sums<kTiles>::kByCopy) {
    const int strip = place / kStripRows;
    return strip / kHopperTileStrips * kTileRows + place % kStripRows / 8 * kStripRows +
           strip % kHopperTileStrips * 8 + place % 8;
  }
  return (place >> a.span_shift) * kStripRows + (place & ((1 << a.span_shift) - 1));
}

// The sums of row j that begin with tile i, two or four.
template <int kTiles>
__device__ __forceinline__ void pick_sums(const Accumulators<kTiles>& acc, int j, int i,
                                          float (&v)[2]) {
  v[0] = acc.c[j / 2][i][j % 2 * 2];
  v[1] = acc.c[j / 2][i][j % 2 * 2 + 1];
}
template <int kTiles>
__device__ __forceinline__ void pick_sums(const Accumulators<kTiles>& acc, int j, int i,
                                          float (&v)[4]) {
#pragma unroll
  for (int x = 0; x < 4; ++x) v[x] = acc.c[j / 2][i + x / 2][j % 2 * 2 + x % 2];
}

__device__ __forceinline__ void store_sums(uint32_t at, const float (&v)[2]) {
  store_shared_word(at, __float_as_uint(v[0]));
  store_shared_word(at + 4, __float_as_uint(v[1]));
}
__device__ __forceinline__ void store_sums(uint32_t at, const float (&v)[4]) {
  store_shared(at, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                              __float_as_uint(v[3])));
}

// A warp's sums. set: where its set begins, in each block; ring: its own shared memory. What is
// copied does not include what this block, number `rank` of its cluster, adds up itself.
template <int kTiles>
__device__ __forceinline__ void send_sums(const Args& a, int rank, int strip, int g, int t,
                                          uint32_t set, uint32_t ring, uint32_t received,
                                          const Accumulators<kTiles>& acc) {
  using S = Sums<kTiles>;
  constexpr int kVector = kTiles == 1 ? 2 : 4;  // sums at a time
  const bool by_copy = S::kByCopy && a.cluster > 1;
  if (by_copy || t < a.pairs) {
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) {
      const uint32_t place = place_of<kTiles>(a, strip, j, g);
      const int owner = static_cast<int>(place * a.per_share >> kShareShift);
      const uint32_t row = by_copy && owner != rank
                               ? ring + (8 * j + g) * S::kRowBytes
                               : set + (place - owner * a.share) * S::kRowBytes;
#pragma unroll
      for (int i = 0; i < kTiles; i += kVector / 2) {
        float sent[kVector];
        pick_sums(acc, j, i, sent);
        const int byte = t * S::kLaneBytes + i * 8;
        const uint32_t at =
            row + S::vector_at(byte / kVectorBytes, 8 * j + g) + byte % kVectorBytes;
        if (by_copy || a.cluster == 1) {
          store_sums(at, sent);
        } else {
          store_cluster_async(at, owner, sent, received);
        }
      }
    }
  }
  if (!by_copy) return;
  fence_shared_for_wgmma();
  __syncwarp();
  const int first = strip * kStripRows;
  const int owner = static_cast<int>(first * a.per_share >> kShareShift) + 4 * g + t;
  const int begin = max(first, owner * a.share);
  const int end = min(first + kStripRows, (owner + 1) * a.share);
  if (begin < end && owner != rank) {
    copy_cluster_async(set + (begin - owner * a.share) * S::kRowBytes,
                       ring + (begin - first) * S::kRowBytes, (end - begin) * S::kRowBytes, owner,
                       received);
  }
}

// Adds the sets in ascending order, applies the epilogue, stores. first: the block's first row of
// B; own: this one's first place, `places` of them.
template <int kTiles>
__device__ __forceinline__ void finish(const Args& a, int64_t first, int own, int places, int sets,
                                       float alpha, const float* sums) {
  using S = Sums<kTiles>;
  const SmallMParams& q = a.gemm;

  const int set = a.share * S::kRowBytes / 4;
  const int vectors = (a.pairs * kTiles + 1) / 2;
  for (uint32_t e = threadIdx.x; e < static_cast<uint32_t>(vectors * a.share); e += kThreads) {
    const int vector = static_cast<int>(e * a.per_share >> kShareShift);
    const int place = static_cast<int>(e) - vector * a.share;
    const int row = row_at<kTiles>(a, own + place);
    const int64_t n = first + row;
    if (place >= places || n >= q.n) continue;
    const float* at = sums + (place * S::kRowBytes + S::vector_at(vector, row)) / 4;
    float acc[4] = {};
#pragma unroll 4
    for (int s = 0; s < sets; ++s) {
      const float4 got = *reinterpret_cast<const float4*>(at + s * set);
      acc[0] += got.x;
      acc[1] += got.y;
      acc[2] += got.z;
      acc[3] += got.w;
    }
    const float bias = q.bias ? load_as_float(q.bias, q.bias_type, n) : 0.0f;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int sum = 4 * vector + x, t = sum / (2 * kTiles), i = sum % (2 * kTiles) / 2;
      const int m = 8 * i + 2 * t + x % 2;
      if (m >= a.m) continue;
      store_one(q.out, q.out_type, m * q.n + n, fma_rn(alpha, acc[x] * a.unit, bias));
    }
  }
}

}  // namespace
}  // namespace nvfp4::cuda
