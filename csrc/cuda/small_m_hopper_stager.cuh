// gemm_small_m_hopper's A: warps of their own lay it out in shared memory, decoded where it is
// packed.
#pragma once

#include "decode.cuh"
#include "hopper.cuh"
#include "small_m_hopper_layout.cuh"

namespace nvfp4::cuda {
namespace {

// Slot of a chunk: for v < 2, w < 4, tile of eight rows, lane (row, t): 16 bytes,
// A[8 tile + row][64 t + 32 v + 8 w + i] for i = 0 4 1 5 2 6 3 7. For wgmma four pairs of them lie
// apart: for v, w / 2, row of A 128 bytes, pair p of the four lanes t beside each other as vector
// 4 (w % 2) + p, exclusive-ored with the row. Rows past m are left as they are: their sums are
// dropped. A warp has the v of its parity and every other unit of rows; it loads a unit at a time,
// many of them under way. Loads are never skipped, what lies past the end is brought back to the
// end: a branch a load costs more.

// The eight k of `word` = 4 v + w, row m, lane t.
template <int kTiles>
__device__ __forceinline__ void store_pairs(uint32_t slot, int word, int m, int t,
                                            const uint32_t (&pairs)[4]) {
  if constexpr (kByGroup<kTiles>) {
    const uint32_t row = slot + word / 2 * (kTiles * kAtomBytes) + m * kRowBytes + t * 4;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      store_shared_word(row + ((word % 2 * 4 + p) ^ m % 8) * kVectorBytes, pairs[p]);
    }
  } else {
    store_shared(slot + (word * kTiles + m / 8) * kFragmentBytes + (m % 8 * 4 + t) * kVectorBytes,
                 make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
}

// Dense: units of two rows; lanes take four t, two rows, four w.
template <typename T, bool kPackedA, int kTiles>
struct Unit {
  static constexpr int kWarps = 4;             // that share a chunk
  static constexpr int kOfChunk = 2 * kTiles;  // a warp's
  static constexpr int kBatch = 8;
  uint4 value;

  __device__ __forceinline__ static int row(int unit, int warp, int lane) {
    return 4 * unit + warp / 2 * 2 + lane / 4 % 2;
  }
  __device__ __forceinline__ static int first_k(int warp, int lane) {
    return lane % 4 * kLaneK + warp % 2 * 32 + lane / 8 * 8;
  }
  __device__ __forceinline__ void load(const Args& a, int unit, int chunk, int warp, int lane) {
    const SmallMParams& q = a.gemm;
    const int k = min(chunk * kHopperChunk + first_k(warp, lane), a.k - 8);
    value = load_vector_before(
        static_cast<const uint16_t*>(q.a) +
        (q.a_row_begin + min(row(unit, warp, lane), a.m - 1)) * q.a_row_stride + k);
  }
  __device__ __forceinline__ void store(const Args& a, uint32_t slot, int unit, int chunk, int warp,
                                        int lane) const {
    const int m = row(unit, warp, lane);
    if (m >= a.m) return;
    uint4 v = value;
    if (chunk * kHopperChunk + first_k(warp, lane) >= a.k) v = make_uint4(0, 0, 0, 0);
    const uint32_t pairs[4] = {permute_bytes(v.x, v.z, 0x5410), permute_bytes(v.x, v.z, 0x7632),
                               permute_bytes(v.y, v.w, 0x5410), permute_bytes(v.y, v.w, 0x7632)};
    store_pairs<kTiles>(slot, warp % 2 * 4 + lane / 8, m, lane % 4, pairs);
  }
};

// Packed, up to eight rows: those, 16 k a lane.
template <typename T>
struct Unit<T, true, 1> {
  static constexpr int kWarps = 4;
  static constexpr int kOfChunk = 1;
  static constexpr int kBatch = 4;
  uint2 codes;
  uint32_t scale;

  __device__ __forceinline__ static int first_k(int warp, int lane) {
    return lane % 4 * kLaneK + warp * kBlockSize;
  }
  __device__ __forceinline__ void load(const Args& a, int, int chunk, int warp, int lane) {
    const SmallMParams& q = a.gemm;
    const int k = min(chunk * kHopperChunk + first_k(warp, lane), a.k - kBlockSize);
    const int64_t m = q.a_row_begin + min(lane / 4, a.m - 1);
    codes = load_pair_before(static_cast<const uint8_t*>(q.a) + (m * a.k + k) / 2);
    scale = load_byte_before(q.a_scale + swizzled_offset(m, k / kBlockSize, a.tiles_per_row));
  }
  __device__ __forceinline__ void store(const Args& a, uint32_t slot, int, int chunk, int warp,
                                        int lane) const {
    if (lane / 4 >= a.m) return;
    const bool past = chunk * kHopperChunk + first_k(warp, lane) >= a.k;
    uint32_t s[2], r[4];
    scale_pairs(past ? 0 : scale, s, T{});
    decode8_split<T>(codes.x, s[0], r);
    store_pairs<1>(slot, 2 * warp, lane / 4, lane % 4, r);
    decode8_split<T>(codes.y, s[0], r);
    store_pairs<1>(slot, 2 * warp + 1, lane / 4, lane % 4, r);
  }
};

// Packed: units of eight rows, 32 k a lane.
template <typename T, int kTiles>
struct Unit<T, true, kTiles> {
  static constexpr int kWarps = 4;
  static constexpr int kOfChunk = 2 * kTiles / kWarps;
  static constexpr int kBatch = 4;
  uint4 codes;
  uint32_t scales;

  __device__ __forceinline__ static int tile(int unit, int warp) { return 2 * unit + warp / 2; }
  __device__ __forceinline__ static int first_k(int warp, int lane) {
    return lane % 4 * kLaneK + warp % 2 * 32;
  }
  __device__ __forceinline__ void load(const Args& a, int unit, int chunk, int warp, int lane) {
    const SmallMParams& q = a.gemm;
    const int k = min(chunk * kHopperChunk + first_k(warp, lane), a.k - 32);
    const int64_t m = q.a_row_begin + min(8 * tile(unit, warp) + lane / 4, a.m - 1);
    codes = load_vector_before(static_cast<const uint8_t*>(q.a) + (m * a.k + k) / 2);
    scales = load_half_before(q.a_scale + swizzled_offset(m, k / kBlockSize, a.tiles_per_row));
  }
  __device__ __forceinline__ void store(const Args& a, uint32_t slot, int unit, int chunk, int warp,
                                        int lane) const {
    if (8 * tile(unit, warp) + lane / 4 >= a.m) return;
    const bool past = chunk * kHopperChunk + first_k(warp, lane) >= a.k;
    uint32_t s[2];
    scale_pairs(past ? 0 : scales, s, T{});
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t r[4];
      decode8_split<T>(word(codes, w), s[w / 2], r);
      store_pairs<kTiles>(slot, warp % 2 * 4 + w, 8 * tile(unit, warp) + lane / 4, lane % 4, r);
    }
  }
};

// One warp's part of A's chunks [first, first + chunks), in the order of k: whoever waits for a
// chunk may rely on the ones before.
template <typename T, bool kPackedA, int kTiles>
struct Stager {
  using U = Unit<T, kPackedA, kTiles>;
  static constexpr int kArrivals = U::kWarps * kWarpSize;

  const Args& a;
  int first, chunks, warp, lane;
  uint32_t slots, barriers;
  U batch[2][U::kBatch];  // one under way while the other is stored

  __device__ Stager(const Args& args, int first_chunk, int count, uint32_t slots_at,
                    uint32_t barriers_at)
      : a(args),
        first(first_chunk),
        chunks(count),
        warp(static_cast<int>(threadIdx.x) / kWarpSize - kHopperWarps),
        lane(static_cast<int>(threadIdx.x) % kWarpSize),
        slots(slots_at),
        barriers(barriers_at) {}

  // Units are counted through all chunks.
  template <int kWhich>
  __device__ __forceinline__ void load(int unit) {
#pragma unroll
    for (int i = 0; i < U::kBatch; ++i) {
      const int u = unit + i;
      batch[kWhich][i].load(a, u % U::kOfChunk, first + u / U::kOfChunk, warp, lane);
    }
  }

  template <int kWhich>
  __device__ __forceinline__ void store(int unit) {
#pragma unroll
    for (int i = 0; i < U::kBatch; ++i) {
      const int u = (unit + i) % U::kOfChunk, c = (unit + i) / U::kOfChunk;
      const int shift = slot_shift<kTiles>(a), slot = c & ((1 << shift) - 1);
      if (c >= chunks) return;
      if (u == 0) barrier_wait(barriers + slot * 16 + 8, ((c >> shift) + 1) & 1);
      batch[kWhich][i].store(a, slots + slot * Layout<kTiles>::kSlotBytes, u, first + c, warp,
                             lane);
      if (u == U::kOfChunk - 1) {
        if (kByGroup<kTiles>) fence_shared_for_wgmma();
        barrier_arrive(barriers + slot * 16);
      }
    }
  }

  // What goes ahead of run().
  __device__ __forceinline__ void start() {
    load<0>(0);
    if (kByGroup<kTiles>) load<1>(U::kBatch);
  }
  __device__ __forceinline__ void run() {
    for (int unit = 0; unit < chunks * U::kOfChunk; unit += 2 * U::kBatch) {
      if constexpr (kByGroup<kTiles>) {
        // The fence behind a chunk waits for whatever is loaded meanwhile, too: so that it is
        // nothing, both batches are loaded at once.
        store<0>(unit);
        store<1>(unit + U::kBatch);
        load<0>(unit + 2 * U::kBatch);
        load<1>(unit + 3 * U::kBatch);
      } else {
        load<1>(unit + U::kBatch);
        store<0>(unit);
        load<0>(unit + 2 * U::kBatch);
        store<1>(unit + U::kBatch);
      }
    }
  }
};

}  // namespace
}  // namespace nvfp4::cuda
