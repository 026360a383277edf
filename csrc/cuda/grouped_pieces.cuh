// Rows of packed or gathered operands made dense in a workspace, exactly, by warps that have
// nothing else to do, while others multiply what is done.
//
// - A strip is kStripRows rows of one group, of A or of B, counted from the group's first. A piece
//   is rows p, p + kPieces, p + 2 kPieces, ... of a strip.
// - Warps claim pieces from a counter, in about the order in which tiles want them, and wait for
//   nobody: who waits for a strip waits for warps that run, whatever else is on the GPU.
// - A strip's counter says how many of its pieces are done.
#pragma once

#include "common.cuh"
#include "decode.cuh"
#include "grouped_gemm.h"
#include "grouped_schedule.cuh"
#include "hopper.cuh"

namespace nvfp4::cuda {

constexpr int kStripRows = 128;
constexpr int kPieces = 32;                       // of a whole strip
constexpr int kPieceRows = kStripRows / kPieces;  // of a whole piece
constexpr int kFirstStrips = 16;                  // of a group's A that are wanted before its B
constexpr int kLaneElements = 8;
constexpr int kChunkElements = kWarpSize * kLaneElements;
constexpr int kChunks = 2;  // of every row of a piece: loads in flight

// One operand, and where its rows go: null, nowhere.
struct UnpackSide {
  Operand source;  // of B: from the part's first row on
  void* out;
  int64_t group_rows, group_scale_rows;  // of B
  unsigned* done;                        // a counter a strip
};

struct UnpackArgs {
  UnpackSide a, b;
  unsigned* next;  // the first piece that nobody has claimed; null: there are none
  int64_t pitch;   // of the workspace
  int64_t scale_tiles;
};

NVFP4_HD int64_t strips_of(int64_t rows) { return (rows + kStripRows - 1) / kStripRows; }
// Of `rows` rows of a group.
NVFP4_HD unsigned pieces_of(int64_t rows) {
  const int64_t rest = rows % kStripRows;
  return static_cast<unsigned>(rows / kStripRows * kPieces + (rest < kPieces ? rest : kPieces));
}

// The number of the strip with this row. A: counted from the window's first row. Groups' strips
// don't share one: each begins one later than those before it can end.
NVFP4_HD int64_t a_strip(int64_t row, int64_t group) { return row / kStripRows + group; }
NVFP4_HD int64_t a_strips(int64_t rows, int64_t groups) { return rows / kStripRows + groups + 1; }
// B: counted from the group's first row.
NVFP4_HD int64_t b_strip(int64_t row, int64_t group, int64_t n) {
  return group * strips_of(n) + row / kStripRows;
}

struct Piece {
  bool of_b;
  int64_t group, begin, rows;  // the group's first row in the workspace, and how many it has
  unsigned index;              // among the group's pieces of this side
};

// The pieces of a window's groups: of each its A's first strips, its B's, its A's others. For a
// warp, which moves over groups as its pieces do, and never back.
class PieceList {
 public:
  __device__ PieceList(const GroupedGemmParams& p, const UnpackArgs& args, RowWindow window,
                       int lane)
      : p_(p), args_(args), window_(window), lane_(lane) {
    load();
  }

  // The next piece that nobody has. False: there is none.
  __device__ bool claim(Piece& piece) {
    unsigned index = lane_ == 0 ? atomicAdd(args_.next, 1u) : 0;
    index = __shfl_sync(kFullWarp, index, 0) - before_;
    for (;;) {
      const unsigned loaded = __shfl_sync(kFullWarp, upto_, kWarpSize - 1);
      if (index < loaded) break;
      first_ += kWarpSize;
      if (first_ >= p_.groups) return false;
      before_ += loaded;
      index -= loaded;
      load();
    }
    int lane = 0;  // the first one whose pieces end beyond `index`
    for (int half = kWarpSize / 2; half; half /= 2) {
      if (__shfl_sync(kFullWarp, upto_, lane + half - 1) <= index) lane += half;
    }
    const unsigned ahead = __shfl_sync(kFullWarp, upto_, lane ? lane - 1 : 0);
    find(first_ + lane, lane ? index - ahead : index, piece);
    return true;
  }

 private:
  struct Rows {
    int64_t begin, end;  // inside the window
    bool any;            // there, or outside
  };

  __device__ Rows rows_of(int64_t group) const {
    const int64_t begin = p_.offs[group - 1], end = p_.offs[group];  // before the first: part.ends
    const auto inside = [&](int64_t row) { return min(max(row, window_.begin), window_.end); };
    return {inside(begin), inside(end), end > begin};
  }
  __device__ unsigned of_a(const Rows& rows) const {
    return args_.a.out ? pieces_of(rows.end - rows.begin) : 0;
  }
  __device__ unsigned of_b(const Rows& rows) const {
    return args_.b.out && rows.any ? pieces_of(p_.n) : 0;
  }

  __device__ void find(int64_t group, unsigned index, Piece& piece) const {
    const Rows rows = rows_of(group);
    const unsigned first = min(of_a(rows), unsigned{kFirstStrips * kPieces}), b = of_b(rows);
    piece.group = group;
    piece.of_b = index >= first && index < first + b;
    if (piece.of_b) {
      piece.index = index - first;
      piece.begin = group * p_.n;
      piece.rows = p_.n;
    } else {
      piece.index = index < first ? index : index - b;
      piece.begin = rows.begin - window_.begin;
      piece.rows = rows.end - rows.begin;
    }
  }

  __device__ void load() {
    unsigned pieces = 0;
    if (first_ + lane_ < p_.groups) {
      const Rows rows = rows_of(first_ + lane_);
      pieces = of_a(rows) + of_b(rows);
    }
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const unsigned other = __shfl_sync(kFullWarp, pieces, max(lane_ - distance, 0));
      if (lane_ >= distance) pieces += other;
    }
    upto_ = pieces;
  }

  const GroupedGemmParams& p_;
  const UnpackArgs& args_;
  const RowWindow window_;
  const int lane_;
  int64_t first_ = 0;    // lane 0's group
  unsigned before_ = 0;  // pieces of the groups before it
  unsigned upto_ = 0;    // pieces from lane 0's group on, up to and with this lane's
};

// Where a piece's rows come from and go to.
struct PieceRows {
  int64_t row[kPieceRows], scale_row[kPieceRows];  // -1: zero
  int count;
  int64_t to;  // the first one's place, kPieces before the next one's

  __device__ PieceRows(const GroupedGemmParams& p, const UnpackSide& side, const RowWindow& window,
                       const Piece& piece) {
    const int64_t first = int64_t{piece.index / kPieces} * kStripRows + piece.index % kPieces;
    to = piece.begin + first;
    count =
        static_cast<int>(min((piece.rows - first + kPieces - 1) / kPieces, int64_t{kPieceRows}));
#pragma unroll
    for (int j = 0; j < kPieceRows; ++j) {
      row[j] = scale_row[j] = -1;
      if (j >= count) continue;
      const int64_t of_group = first + j * kPieces;
      if (piece.of_b) {
        row[j] = piece.group * side.group_rows + of_group;
        scale_row[j] = piece.group * side.group_scale_rows + of_group;
      } else {
        row[j] = scale_row[j] = source_row(p, window.begin + piece.begin + of_group);
      }
    }
  }
};

template <typename T>
__device__ __forceinline__ uint4 decode_eight(uint32_t word, uint32_t scale) {
  uint32_t words[4];
  decode8<T>(word, scale_pair(e4m3_decode(static_cast<uint8_t>(scale)), T{}), words);
  const uint32_t unit = round_pair<T>(1.0f / kDecodedUnit, 1.0f / kDecodedUnit);
  for (int i = 0; i < 4; ++i) words[i] = multiply_pair(words[i], unit, T{});
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Codes and scales as loaded, of kChunks chunks of every row.
struct PackedStep {
  uint32_t words[kChunks][kPieceRows], scales[kChunks][kPieceRows];
};

template <typename T>
__device__ __forceinline__ void unpack_packed(const UnpackArgs& args, const UnpackSide& side,
                                              const PieceRows& rows, int64_t k, int lane) {
  const bool swizzled = side.source.swizzled;
  const uint8_t *data[kPieceRows], *scale[kPieceRows];
#pragma unroll
  for (int j = 0; j < kPieceRows; ++j) {
    data[j] = rows.row[j] < 0
                  ? nullptr
                  : static_cast<const uint8_t*>(side.source.data) + rows.row[j] * (k / 2);
    scale[j] =
        side.source.scale + (swizzled ? swizzled_offset(rows.scale_row[j], 0, args.scale_tiles)
                                      : rows.scale_row[j] * (k / kBlockSize));
  }
  const int64_t pitch = args.pitch;
  uint16_t* out = static_cast<uint16_t*>(side.out) + rows.to * pitch + lane * kLaneElements;
  const uint32_t end = static_cast<uint32_t>(pitch), valid = static_cast<uint32_t>(k);
  const auto load = [&](uint32_t first) {
    PackedStep step;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint32_t element = first + c * kChunkElements, column = element / kBlockSize;
      const uint32_t at =
          swizzled ? column / kTileCols * (kTileRows * kTileCols) + column % kTileCols : column;
#pragma unroll
      for (int j = 0; j < kPieceRows; ++j) {
        step.words[c][j] = step.scales[c][j] = 0;
        if (element >= valid || data[j] == nullptr) continue;
        step.words[c][j] = __ldg(reinterpret_cast<const uint32_t*>(data[j] + element / 2));
        step.scales[c][j] = __ldg(scale[j] + at);
      }
    }
    return step;
  };
  constexpr uint32_t kStep = kChunks * kChunkElements;
  uint32_t element = lane * kLaneElements;
  PackedStep step = load(element);
  for (; element < end; element += kStep, out += kStep) {
    const PackedStep next = load(element + kStep);  // while this one is decoded
#pragma unroll
    for (int j = 0; j < kPieceRows; ++j) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (element + c * kChunkElements >= end || j >= rows.count) continue;
        *reinterpret_cast<uint4*>(out + j * kPieces * pitch + c * kChunkElements) =
            decode_eight<T>(step.words[c][j], step.scales[c][j]);
      }
    }
    step = next;
  }
}

template <typename T>
__device__ __forceinline__ void unpack_dense(const UnpackArgs& args, const UnpackSide& side,
                                             const PieceRows& rows, int64_t k, int lane) {
  const T* const data = static_cast<const T*>(side.source.data);
  T* const out = static_cast<T*>(side.out) + rows.to * args.pitch;
  for (int64_t element = lane * kLaneElements; element < args.pitch; element += kChunkElements) {
    uint4 eight[kPieceRows];
#pragma unroll
    for (int j = 0; j < kPieceRows; ++j) {
      eight[j] = make_uint4(0, 0, 0, 0);
      if (element >= k || rows.row[j] < 0) continue;
      eight[j] = load_streaming(data + rows.row[j] * side.source.row_stride + element);
    }
#pragma unroll
    for (int j = 0; j < kPieceRows; ++j) {
      if (j >= rows.count) continue;
      *reinterpret_cast<uint4*>(out + j * kPieces * args.pitch + element) = eight[j];
    }
  }
}

// Unpacks one piece, if any is left. For a warp.
template <typename T>
__device__ __forceinline__ bool unpack_next(PieceList& list, const GroupedGemmParams& p,
                                            const UnpackArgs& args, const RowWindow& window,
                                            int lane) {
  Piece piece;
  if (!list.claim(piece)) return false;
  const UnpackSide& side = piece.of_b ? args.b : args.a;
  const PieceRows rows(p, side, window, piece);
  if (side.source.scale) {
    unpack_packed<T>(args, side, rows, p.k, lane);
  } else {
    unpack_dense<T>(args, side, rows, p.k, lane);
  }
  __syncwarp();
  if (lane == 0) {
    const int64_t row = int64_t{piece.index / kPieces} * kStripRows;
    fence_device();
    atomicAdd(side.done + (piece.of_b ? b_strip(row, piece.group, p.n)
                                      : a_strip(piece.begin + row, piece.group)),
              1u);
  }
  return true;
}

__device__ __forceinline__ bool strip_done(const unsigned* done, int64_t rows) {
  return load_acquire(done) >= pieces_of(min(rows, int64_t{kStripRows}));
}

}  // namespace nvfp4::cuda
