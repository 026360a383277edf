// What each block makes of a grouped problem, so that all are done at the same time though tiles of
// fewer rows take less time and their number is no multiple of the blocks'.
//
// - Blocks make whole tiles in rounds, as items in order, for as long as even the longest tiles
//   leave every block more than another one to do. So rows of A are wanted group after group.
// - What is left of the line of all tiles is cut so that every block has had the same length in the
//   end. A cut may lie inside a tile: no share is shorter than a tile, so that a tile is cut once
//   at most, into a head of steps along k and a tail.
// - Offsets alone decide all this: the same bytes in every run.
#pragma once

#include "grouped_schedule.cuh"

namespace nvfp4::cuda {

// Steps [begin, end) of a tile. meets: the cut's number, between blocks `meets` - 1 and `meets`,
// where there are more steps to the tile than these; else kWholeTile.
struct TilePiece {
  GroupedTile tile;
  int begin, end, meets;
};
constexpr int kWholeTile = -1;

// Fewer steps than this are not worth a cut.
constexpr int kLeastSteps = 2;

// For a warp, which asks together.
template <typename Schedule>
class Shares {
 public:
  __device__ Shares(Schedule& schedule, int steps, int lane) : schedule_(schedule), steps_(steps) {
    const int blocks = gridDim.x;
    cut_ = schedule.one_window() && worth_cutting();
    if (!cut_) return;
    const int rounds = schedule.line() / blocks / schedule.longest() - 1;
    whole_items_ = rounds * blocks;
    at_ = cut(blockIdx.x, rounds, lane);
    end_ = cut(blockIdx.x + 1, rounds, lane);
  }

  // False after the last one.
  __device__ bool next(TilePiece& piece) {
    piece.begin = 0;
    piece.end = steps_;
    piece.meets = kWholeTile;
    const int64_t item = item_;
    if (!cut_ || item < whole_items_) {
      item_ += gridDim.x;
      return schedule_.find(item, piece.tile);
    }
    while (at_ < end_) {
      const OnLine tile = schedule_.find_on_line(at_, piece.tile);
      piece.begin = step_of(at_, tile);
      piece.end = step_of(end_, tile);
      const int block = static_cast<int>(blockIdx.x);
      const bool whole = piece.begin == 0 && piece.end == steps_;
      piece.meets = whole ? kWholeTile : block + (piece.begin == 0);
      at_ = tile.begin + tile.length;
      if (piece.begin < piece.end) return true;
    }
    return false;
  }

 private:
  // A cut costs more than it brings where whole tiles are nearly as good, and can't be where the
  // shares would be shorter than a tile.
  __device__ bool worth_cutting() const {
    const int blocks = gridDim.x, line = schedule_.line(), longest = schedule_.longest();
    const int rounds = (schedule_.items() + blocks - 1) / blocks;
    return line / blocks >= longest && int64_t{rounds} * longest * blocks * 19 > int64_t{line} * 20;
  }

  // Where the share of `block` begins: the line is cut as if the blocks before it had had nothing
  // but their shares, less what they had in rounds.
  __device__ int cut(int block, int rounds, int lane) const {
    const int blocks = gridDim.x;
    uint32_t made = 0;  // in rounds, by the blocks before this one
    for (int round = lane; round < rounds; round += kWarpSize) {
      made += schedule_.line_begin(round * blocks + block) - schedule_.line_begin(round * blocks);
    }
    for (int distance = kWarpSize / 2; distance; distance /= 2) {
      made += __shfl_xor_sync(kFullWarp, made, distance);
    }
    const auto share = static_cast<int>(int64_t{schedule_.line()} * block / blocks);
    return schedule_.line_begin(rounds * blocks) + share - static_cast<int>(made);
  }

  // The step at which a cut at this place of the line cuts a tile; 0 or all of them where it is
  // outside or next to an end.
  __device__ int step_of(int at, const OnLine& tile) const {
    if (at <= tile.begin) return 0;
    if (at >= tile.begin + tile.length) return steps_;
    const int step = static_cast<int>(int64_t{at - tile.begin} * steps_ / tile.length);
    if (step < kLeastSteps) return 0;
    return steps_ - step < kLeastSteps ? steps_ : step;
  }

  Schedule& schedule_;
  const int steps_;
  bool cut_;
  int64_t item_ = blockIdx.x;
  int whole_items_ = 0, at_ = 0, end_ = 0;
};

}  // namespace nvfp4::cuda
