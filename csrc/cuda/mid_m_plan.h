// How gemm_mid_m cuts a problem into work: host and device agree by sharing these functions.
//
// A tile is 128 rows of B by `rows` rows of A. All tiles' chunks of k, tile after tile, are one
// line, which is cut into `workers` even pieces, one a block: a piece may end inside a tile, and
// the sums of a tile in several pieces meet in memory. A tile takes time at its end, too: on the
// line it is `finish` longer than its chunks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../nvfp4.h"
#include "../recent.h"

namespace nvfp4::cuda {

constexpr int kMidMTileN = 128;   // rows of B a tile
constexpr int kMidMChunkK = 128;  // elements of k a block takes at a time
constexpr int kMidMWarps = 8;     // that multiply, of a block

struct MidMPlan {
  int rows = 0;     // of A, a tile: 64, 128, 192 or 256
  int m_tiles = 0;  // along m; along n there are `tiles` / `m_tiles`
  int tiles = 0;    // those of one n side by side
  int chunks = 0;   // of k
  int finish = 0;
  int workers = 0;  // 0: the problem is too large for the kernel's arithmetic

  bool ok() const { return workers > 0; }
  NVFP4_HD int line() const { return tiles * (chunks + finish); }

  // First chunk of a worker's piece, counting all tiles'; the piece ends where the next one's
  // begins.
  NVFP4_HD int begin(int worker) const {
    const int at = line() * worker / workers, tile = at / (chunks + finish);
    const int in_tile = at - tile * (chunks + finish);
    return tile * chunks + (in_tile < chunks ? in_tile : chunks);
  }
  // The worker whose piece has chunk `chunk` of tile `tile`.
  NVFP4_HD int worker_of(int tile, int chunk) const {
    return ((tile * (chunks + finish) + chunk + 1) * workers - 1) / line();
  }
};

// Cycles a chunk takes, measured on an H200, and what a tile's end takes, in chunks.
struct MidMCosts {
  int rows;
  int64_t chunk, finish;

  // Of a tile in several pieces: to leave sums and to add those of the others.
  constexpr int64_t share(int64_t pieces) const {
    return pieces > 1 ? 1000 + pieces * (500 + 8 * rows) : 0;
  }
};
constexpr MidMCosts kMidMCosts[] = {{256, 2048, 4}, {192, 1540, 4}, {128, 1140, 5}, {64, 800, 6}};

inline MidMPlan plan_mid_m(int64_t m, int64_t n, int64_t k, int sm_count) {
  const int64_t chunks = (k + kMidMChunkK - 1) / kMidMChunkK;
  MidMPlan best;
  int64_t best_cost = 0;
  for (const MidMCosts& c : kMidMCosts) {
    const int64_t m_tiles = (m + c.rows - 1) / c.rows;
    const int64_t tiles = (n + kMidMTileN - 1) / kMidMTileN * m_tiles;
    if (tiles * (chunks + c.finish) >= INT32_MAX / (sm_count + 1)) continue;
    const auto consider = [&](int64_t finish, int64_t workers, int64_t pieces) {
      const int64_t piece = (tiles * (chunks + finish) + workers - 1) / workers + c.finish;
      const int64_t cost = piece * c.chunk + c.share(pieces);
      if (best.ok() && cost >= best_cost) return;
      best_cost = cost;
      best.rows = c.rows;
      best.m_tiles = static_cast<int>(m_tiles);
      best.tiles = static_cast<int>(tiles);
      best.chunks = static_cast<int>(chunks);
      best.finish = static_cast<int>(finish);
      best.workers = static_cast<int>(workers);
    };
    // As many pieces of every tile, or as many workers as there are multiprocessors.
    const int64_t each = std::min<int64_t>(sm_count / tiles, chunks);
    if (each > 0) consider(0, tiles * each, each);
    const int64_t workers = std::min<int64_t>(sm_count, tiles * chunks);
    consider(c.finish, workers, chunks * workers / (tiles * (chunks + c.finish)) + 2);
  }
  return best;
}

inline const MidMPlan& find_mid_m(int64_t m, int64_t n, int64_t k, int sm_count) {
  static thread_local Recent<4, MidMPlan> found;
  return found.find({m, n, k, sm_count}, [&] { return plan_mid_m(m, n, k, sm_count); });
}

// Bytes of the workspace's parts, in this order: A's image, sums of tiles in pieces (two to a
// worker), counters.
inline int64_t mid_m_image_bytes(const MidMPlan& p) {
  return int64_t{p.m_tiles} * p.chunks * p.rows * kMidMChunkK * 2;
}
inline int64_t mid_m_sums_bytes(const MidMPlan& p) {
  return p.workers == p.tiles ? 0 : int64_t{p.workers} * 2 * kMidMTileN * p.rows * 4;
}
inline int64_t mid_m_counter_bytes(const MidMPlan& p) {
  return round_up(int64_t{p.tiles} * kMidMWarps * 4, 16);
}
inline int64_t mid_m_workspace(const MidMPlan& p) {
  return mid_m_image_bytes(p) + mid_m_sums_bytes(p) + mid_m_counter_bytes(p);
}

}  // namespace nvfp4::cuda
