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

// For a warp, which asks together. It does so at the start of a kernel, whose instructions come
// from far: what is asked twice is one piece of code.
template <typename Schedule>
class Shares {
 public:
  __device__ Shares(Schedule& schedule, int steps, int lane)
      : schedule_(schedule), steps_(steps), one_window_(schedule.one_window()) {
    if (!one_window_) return;
    whole_items_ = schedule.items();
    if (worth_cutting()) cut(schedule.line() / gridDim.x / schedule.longest() - 1, lane);
  }

  // False after the last one.
  __device__ bool next(TilePiece& piece) {
    piece.begin = 0;
    piece.end = steps_;
    piece.meets = kWholeTile;
    const int64_t item = item_;
    item_ += gridDim.x;
    if (!one_window_) return schedule_.find(item, piece.tile);
    const bool whole = item < whole_items_;
    while (whole || at_ < end_) {
      const OnLine tile =
          schedule_.find_in_window(whole ? static_cast<int>(item) : at_, whole, piece.tile);
      if (whole) return true;
      piece.begin = step_of(at_, tile);
      piece.end = step_of(end_, tile);
      const int block = static_cast<int>(blockIdx.x);
      const bool uncut = piece.begin == 0 && piece.end == steps_;
      piece.meets = uncut ? kWholeTile : block + (piece.begin == 0);
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

  // Where this block's share begins and where the next one's, half of the warp each: the line is
  // cut as if the blocks before had had nothing but their shares, less what they had in rounds.
  __device__ void cut(int rounds, int lane) {
    constexpr int kHalf = kWarpSize / 2;
    const int blocks = gridDim.x, block = static_cast<int>(blockIdx.x) + lane / kHalf;
    uint32_t begin = 0;
#pragma unroll 1
    for (int i = lane % kHalf; i <= 2 * rounds; i += kHalf) {
      const bool end = i % 2;  // of the blocks before, in round i / 2
      const auto place =
          static_cast<uint32_t>(schedule_.line_begin(i / 2 * blocks + (end ? block : 0)));
      begin += end ? 0 - place : place;
    }
    for (int distance = kHalf / 2; distance; distance /= 2) {
      begin += __shfl_xor_sync(kFullWarp, begin, distance);
    }
    const int line = schedule_.line();
    begin += line / blocks * block + line % blocks * block / blocks;
    whole_items_ = rounds * blocks;
    at_ = static_cast<int>(__shfl_sync(kFullWarp, begin, 0));
    end_ = static_cast<int>(__shfl_sync(kFullWarp, begin, kHalf));
  }

  // The step at which a cut at this place of the line cuts a tile; 0 or all of them where it is
  // outside or next to an end.
  __device__ int step_of(int at, const OnLine& tile) const {
    if (at <= tile.begin) return 0;
    if (at >= tile.begin + tile.length) return steps_;
    const int step = (at - tile.begin) * steps_ / tile.length;  // a tile's length is in hundreds
    if (step < kLeastSteps) return 0;
    return steps_ - step < kLeastSteps ? steps_ : step;
  }

  Schedule& schedule_;
  const int steps_;
  const bool one_window_;
  int64_t item_ = blockIdx.x;
  int whole_items_ = 0, at_ = 0, end_ = 0;
};

}  // namespace nvfp4::cuda
