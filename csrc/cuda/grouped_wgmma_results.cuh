// grouped_wgmma's results: a tile's sums, added up where two blocks have made it, to out.
#pragma once

#include "grouped_wgmma_layout.cuh"

namespace nvfp4::cuda {
namespace {

// Words of (0, 4), (1, 5), (2, 6), (3, 7): the order in which lanes g have a fragment's rows.
__device__ __forceinline__ uint4 in_order(uint4 v) {
  return make_uint4(permute_bytes(v.x, v.y, 0x5410), permute_bytes(v.z, v.w, 0x5410),
                    permute_bytes(v.x, v.y, 0x7632), permute_bytes(v.z, v.w, 0x7632));
}

// Four pairs as 16-bit results.
template <typename Out>
__device__ __forceinline__ void round_pairs(const float (&v)[kRowsPerLane][2],
                                            uint32_t (&words)[kRowsPerLane]) {
  bool nan = false;
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    words[j] = round_pair<Out>(v[j][0], v[j][1]);
    nan |= v[j][0] != v[j][0] || v[j][1] != v[j][1];
  }
  if (!nan) return;
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {  // NaN has bytes of its own
    words[j] = bits_of(from_float<Out>(v[j][0])) | bits_of(from_float<Out>(v[j][1])) << 16;
  }
}

// Eight results, in the order of lanes, to `out` on, of which `count` exist. Not where 16-byte
// stores may be used and all exist.
__device__ void store_narrow(uint16_t* out, uint32_t from, int count, bool missing) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const uint32_t pair = load_shared_word(from + i % 4 * 4);
    out[i] = missing ? 0 : static_cast<uint16_t>(pair >> (i / 4 * 16));
  }
}

// A warp's sums of a piece that isn't its whole tile. Who comes second adds the other's, true; who
// comes first leaves its own. Nobody waits, and a + b is b + a: the same bytes either way.
template <int kTileM>
__device__ __forceinline__ bool meet(const WgmmaArgs& args, const Tile<kTileM>& tile,
                                     const Lane& lane, float (&acc)[2][kTileM / 2]) {
  constexpr int kVectors = kTileM / 4;  // a lane's
  uint32_t thread = lane.group * kGroupThreads + lane.thread;
  keep(thread);  // or what follows from it is made ahead of all tiles, and spilled
  const int in_warp = thread % kWarpSize;
  const int place = tile.meets * kMultiplierWarps + static_cast<int>(thread) / kWarpSize;
  const int side = tile.begin > 0;
  float4* const sums = static_cast<float4*>(args.arranged.sums) +
                       int64_t{place} * 2 * kVectors * kWarpSize + in_warp;
  float4* const mine = sums + side * kVectors * kWarpSize;
  const float4* const others = sums + (1 - side) * kVectors * kWarpSize;
  unsigned there = in_warp == 0 ? load_acquire(args.arranged.met + place) : 0;
  if (!__shfl_sync(kFullWarp, there, 0)) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float* from = &acc[i % 2][i / 2 * 4];
      if (i / 2 * 8 < tile.rows) {
        mine[i * kWarpSize] = make_float4(from[0], from[1], from[2], from[3]);
      }
    }
    __syncwarp();
    if (in_warp == 0) there = add_release_acquire(args.arranged.met + place, 1);
    if (!__shfl_sync(kFullWarp, there, 0)) return false;
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i / 2 * 8 >= tile.rows) continue;
    const float4 other = others[i * kWarpSize];
    float* to = &acc[i % 2][i / 2 * 4];
    to[0] += other.x;
    to[1] += other.y;
    to[2] += other.z;
    to[3] += other.w;
  }
  return true;
}

// A warpgroup's sums of a tile to out. FP32: a sector is one fragment's eight rows already. 16
// bits: a warp turns some columns of its fragments round at a time, by way of shared memory of
// its own, so that a lane has eight neighbours of a row of out. One function for all kN: its
// instructions come from far at the end of every tile, the loop over steps fills the near caches.
template <typename T, typename Out, int kTileM>
__device__ __forceinline__ void finish(const WgmmaArgs& args, const Tile<kTileM>& tile,
                                       const Lane& lane, Addresses<kTileM> addresses,
                                       const float (&acc)[2][kTileM / 2]) {
  constexpr int kColumns = kRowUnit<kTileM>, kEights = kColumns / 8;
  const GroupedGemmParams& p = args.gemm;
  const float alpha = tile.alpha;
  // Said anew, here and for all columns below, or the compiler makes what follows from it ahead of
  // all tiles or all columns, and spills it.
  uint32_t thread = lane.thread;
  keep(thread);
  const uint32_t in_warp = thread % kWarpSize;
  const uint32_t warp = lane.group * (kGroupThreads / kWarpSize) + thread / kWarpSize;
  // Of what a lane stores: matrix in_warp / 8, and in it row in_warp % 8.
  const int64_t n = tile.n + lane.group * kGroupRows + thread / kWarpSize * 8 + in_warp / 8 * 32;
  const int count = static_cast<int>(max(min(p.n - n, int64_t{8}), int64_t{0}));
  const uint32_t mine = addresses.staged(warp) + in_warp * kVectorBytes;
  float bias[kRowsPerLane];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) bias[j] = tile.bias[lane.row(j)];
#pragma unroll
  for (int m0 = 0; m0 < kTileM; m0 += kColumns) {
    if (m0 >= tile.rows) break;
    uint32_t my_column = 2 * lane.t, my_turned = in_warp % 8;
    keep(my_column);
    keep(my_turned);
    if constexpr (!std::is_same_v<Out, float>) __syncwarp();  // the columns before are stored
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const int m8 = m0 + 8 * e;
      float v[kRowsPerLane][2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float gamma = tile.gamma[m8 + my_column + c];
#pragma unroll
        for (int j = 0; j < kRowsPerLane; ++j) {
          const float sum = acc[j / 2][m8 / 2 + j % 2 * 2 + c] * (1.0f / kSplitUnit<T>);
          v[j][c] = gamma * fma_rn(alpha, sum, bias[j]);
        }
        if constexpr (std::is_same_v<Out, float>) {
          const int target = tile.target[m8 + my_column + c];
          if (target == kDropped) continue;
          const int64_t to = target < 0 ? kMissing - target : target;
#pragma unroll
          for (int j = 0; j < kRowsPerLane; ++j) {
            const int64_t at = tile.n + lane.row(j);
            if (at >= p.n) continue;
            static_cast<float*>(p.out)[to * p.n + at] =
                target < 0 ? 0.0f : from_float<float>(v[j][c]);
          }
        }
      }
      if constexpr (!std::is_same_v<Out, float>) {
        uint32_t words[kRowsPerLane];
        round_pairs<Out>(v, words);
        store_matrices_transposed(mine + e * kTurnBytes, words);
      }
    }
    if constexpr (!std::is_same_v<Out, float>) {
      __syncwarp();
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
        const int target = tile.target[m0 + 8 * e + my_turned];
        if (target == kDropped || count == 0) continue;
        const int64_t to = target < 0 ? kMissing - target : target;
        uint16_t* out = static_cast<uint16_t*>(p.out) + to * p.n + n;
        const uint32_t from = mine + e * kTurnBytes;
        if (args.wide) {  // then a lane has all eight or none
          uint4 results = in_order(load_shared(from));
          if (target < 0) results = make_uint4(0, 0, 0, 0);
          *reinterpret_cast<uint4*>(out) = results;
        } else {
          store_narrow(out, from, count, target < 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4::cuda
