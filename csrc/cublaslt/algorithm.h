// The nine attributes that together name a cuBLASLt kernel configuration, and the ranges they may
// take. cuBLASLt does not check them: an out-of-range tile id raises SIGFPE inside its AlgoCheck
// and takes the process with it. So nothing reaches the library before `out_of_range` passed it.

#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace nvfp4::cublaslt {

struct Algorithm {
  int id = 0;
  int tile = 0;
  int stages = 0;
  int split_k =
      1;  // negative values are undocumented: stream-K kernels of the heuristic carry them
  int reduction = 0;
  int swizzle = 0;
  int custom = 0;
  // nullopt: leave what cublasLtMatmulAlgoInit gave. A plan's algorithm always has both, read back.
  std::optional<int> inner;
  std::optional<int> cluster;

  bool operator==(const Algorithm& other) const;
};

// cuBLASLt publishes no end for these three. On an H200, 13.1.0's AlgoCheck answered every value up
// to here with a status, for each of its heuristic's answers; it died of split-K 2^30.
inline constexpr int kMaxSplitK = 1024;  // and down to -kMaxSplitK, but never 0
inline constexpr int kSwizzleEnd = 256;
inline constexpr int kCustomEnd = 256;

// Empty where every attribute is one that `library_version` (cublasLtGetVersion) knows; else which
// attribute is not, its value and the range.
std::string out_of_range(const Algorithm& algorithm, size_t library_version);

std::string tile_name(int tile);        // "128x128"
std::string stages_name(int stages);    // "256xAUTO"
std::string cluster_name(int cluster);  // "2x1x1"
std::string inner_name(int inner);      // "mma16816"
// Rows and columns of a tile, in cuBLASLt's column-major view: rows run along our n. False for a
// tile that has no shape.
bool tile_shape(int tile, int* rows, int* columns);
std::string to_text(const Algorithm& algorithm);  // "id 70, tile 20 (128x128), stages 37 (…), …"

}  // namespace nvfp4::cublaslt
