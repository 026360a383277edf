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
constexpr int kMidMParts = 4;     // of a tile along m, whose pieces are added by different blocks

// A divisor that many threads divide by as their first act: by a multiplication, a tenth of the
// instructions. Exact for 0 <= x < 2^31: the inverse is too large by less than 2^-64 each.
struct MidMDivisor {
  int value = 1;
  uint64_t inverse = 0;  // 2^64 / value, rounded up; 0: value is 1

  MidMDivisor() = default;
  explicit MidMDivisor(int divisor)
      : value(divisor), inverse(divisor == 1 ? 0 : ~uint64_t{0} / divisor + 1) {}

  NVFP4_HD int divide(int x) const {
    const auto product = static_cast<unsigned __int128>(inverse) * static_cast<uint32_t>(x);
    return inverse == 0 ? x : static_cast<int>(product >> 64);
  }
};

struct MidMPlan {
  int rows = 0;   // of A, a tile: 64, 128, 192 or 256
  int tiles = 0;  // those of one n side by side
  int finish = 0;
  MidMDivisor m_tiles;                   // along m; along n there are `tiles` / `m_tiles`
  MidMDivisor chunks;                    // of k
  MidMDivisor workers, line, tile_line;  // all tiles' length on the line, and one's

  MidMPlan() = default;
  MidMPlan(int rows_of_a, int along_m, int all_tiles, int all_chunks, int end, int all_workers)
      : rows(rows_of_a),
        tiles(all_tiles),
        finish(end),
        m_tiles(along_m),
        chunks(all_chunks),
        workers(all_workers),
        line(all_tiles * (all_chunks + end)),
        tile_line(all_chunks + end) {}

  // Every tile is two workers' and theirs alone, which are neighbours: their blocks send each other
  // their sums.
  NVFP4_HD bool pairs() const { return finish == 0 && workers.value == 2 * tiles; }

  // Where not, the problem is too large for the kernel's arithmetic.
  bool ok() const { return rows > 0; }

  // First chunk of a worker's piece, counting all tiles'; the piece ends where the next one's
  // begins.
  NVFP4_HD int begin(int worker) const {
    const int at = workers.divide(line.value * worker), tile = tile_line.divide(at);
    const int in_tile = at - tile * tile_line.value;
    return tile * chunks.value + (in_tile < chunks.value ? in_tile : chunks.value);
  }
  // The worker whose piece has chunk `chunk` of tile `tile`.
  NVFP4_HD int worker_of(int tile, int chunk) const {
    return line.divide((tile * tile_line.value + chunk + 1) * workers.value - 1);
  }
};

// Cycles a chunk takes, for how many of them a tile's end lets a line's pieces be shorter, and how
// many it takes: chosen by the times of 1,438 plans of 134 problems on an H200.
struct MidMCosts {
  int rows;
  int64_t chunk, finish, end;

  // Of a tile in several pieces: to leave sums and to add those of the others.
  constexpr int64_t share(int64_t pieces) const {
    return pieces > 1 ? 900 + 33 * rows + 800 * pieces : 0;
  }
  // Of one that is a pair's.
  constexpr int64_t pair() const { return 2000 + 6 * rows; }
};
constexpr int64_t kMidMUneven = 4900;  // of pieces that end inside tiles: they meet at odd times
constexpr MidMCosts kMidMCosts[] = {
    {256, 2048, 4, 8}, {192, 1580, 4, 6}, {128, 1130, 8, 5}, {64, 910, 8, 6}};

inline MidMPlan plan_mid_m(int64_t m, int64_t n, int64_t k, int sm_count) {
  const int64_t chunks = (k + kMidMChunkK - 1) / kMidMChunkK;
  MidMPlan best;
  int64_t best_cost = 0;
  for (const MidMCosts& c : kMidMCosts) {
    const int64_t m_tiles = (m + c.rows - 1) / c.rows;
    const int64_t tiles = (n + kMidMTileN - 1) / kMidMTileN * m_tiles;
    if (tiles * (chunks + c.finish) >= INT32_MAX / (sm_count + 1)) continue;
    const auto consider = [&](int64_t finish, int64_t workers, int64_t pieces) {
      const int64_t end = finish > 0 ? c.end : 0;
      const int64_t piece = (tiles * (chunks + end) + workers - 1) / workers;
      const bool pair = finish == 0 && pieces == 2;
      const int64_t cost =
          piece * c.chunk + (pair ? c.pair() : c.share(pieces)) + (finish > 0 ? kMidMUneven : 0);
      if (best.ok() && cost >= best_cost) return;
      best_cost = cost;
      best =
          MidMPlan(c.rows, static_cast<int>(m_tiles), static_cast<int>(tiles),
                   static_cast<int>(chunks), static_cast<int>(finish), static_cast<int>(workers));
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
  return int64_t{p.m_tiles.value} * p.chunks.value * p.rows * kMidMChunkK * 2;
}
inline int64_t mid_m_sums_bytes(const MidMPlan& p) {
  return p.workers.value == p.tiles || p.pairs()
             ? 0
             : int64_t{p.workers.value} * 2 * kMidMTileN * p.rows * 4;
}
inline int64_t mid_m_counter_bytes(const MidMPlan& p) {
  return int64_t{p.tiles} * kMidMWarps * kMidMParts * 4;
}
inline int64_t mid_m_workspace(const MidMPlan& p) {
  return mid_m_image_bytes(p) + mid_m_sums_bytes(p) + mid_m_counter_bytes(p);
}

}  // namespace nvfp4::cuda
