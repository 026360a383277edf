#include "algorithm.h"

#include <algorithm>
#include <vector>

#include "library.h"

namespace nvfp4::cublaslt {
namespace {

// The ids a library accepts are those of *its* header, and the library that runs need not be the
// one this was compiled against: 13.1.0 dies of tile 635, which 13.10.0 knows. No query tells, so
// a library older than our header is given the ranges of the oldest 13.x headers (13.0.0, which
// ends at stages 37, and 13.1.0).
struct Limits {
  int tile, stages, cluster, inner;
};
constexpr Limits kHeaderLimits{CUBLASLT_MATMUL_TILE_END, CUBLASLT_MATMUL_STAGES_END,
                               CUBLASLT_CLUSTER_SHAPE_END, CUBLASLT_MATMUL_INNER_SHAPE_END};
constexpr Limits kLimits1301{635, 39, 52, 5};
constexpr Limits kLimits1300{635, 38, 52, 5};

Limits limits(size_t library_version) {
  if (library_version >= CUBLAS_VERSION) return kHeaderLimits;
  return library_version >= 130100 ? kLimits1301 : kLimits1300;
}

// The header's tile enumerators are an irregular list of 35, then two regular families, then a
// tail. Written as a rule rather than as 645 lines; a test holds it to the header's own text.
struct Shape {
  int rows, columns;
};

std::vector<Shape> tile_shapes() {
  std::vector<Shape> shapes = {{0, 0},     {8, 8},     {8, 16},    {16, 8},   {8, 32},   {16, 16},
                               {32, 8},    {8, 64},    {16, 32},   {32, 16},  {64, 8},   {32, 32},
                               {32, 64},   {64, 32},   {32, 128},  {64, 64},  {128, 32}, {64, 128},
                               {128, 64},  {64, 256},  {128, 128}, {256, 64}, {64, 512}, {128, 256},
                               {256, 128}, {512, 64},  {64, 96},   {96, 64},  {96, 128}, {128, 160},
                               {160, 128}, {192, 128}, {128, 192}, {128, 96}, {32, 256}, {256, 32}};
  const auto add_new = [&shapes](Shape shape) {
    const bool known = std::any_of(shapes.begin(), shapes.end(), [&](const Shape& other) {
      return other.rows == shape.rows && other.columns == shape.columns;
    });
    if (!known) shapes.push_back(shape);
  };
  for (int rows = 8; rows <= 768; rows += 8) {
    for (int columns = 64; columns <= 768 && rows * columns <= 96 * 512; columns += 64) {
      add_new({rows, columns});
    }
  }
  for (int rows = 64; rows <= 768; rows += 64) {
    for (int columns = 8; columns <= 768 && rows * columns <= 256 * 256; columns += 8) {
      add_new({rows, columns});
    }
  }
  for (int rows : {256, 512}) {
    for (int columns : {512, 1024}) shapes.push_back({rows, columns});
  }
  for (int rows : {4, 8, 16, 24, 32, 40, 48, 64, 128, 192, 256}) shapes.push_back({rows, 1});
  return shapes;
}

const std::vector<Shape>& tiles() {
  static const std::vector<Shape> shapes = tile_shapes();
  return shapes;
}

// An empty name is a number that the header skips.
constexpr const char* kStages[] = {
    "undefined", "16x1",    "16x2",    "16x3",    "16x4",     "16x5",     "16x6",    "32x1",
    "32x2",      "32x3",    "32x4",    "32x5",    "32x6",     "64x1",     "64x2",    "64x3",
    "64x4",      "64x5",    "64x6",    "128x1",   "128x2",    "128x3",    "128x4",   "128x5",
    "128x6",     "32x10",   "8x4",     "16x10",   "8x5",      "",         "",        "8x3",
    "8xAUTO",    "16xAUTO", "32xAUTO", "64xAUTO", "128xAUTO", "256xAUTO", "768xAUTO"};

constexpr const char* kClusters[] = {
    "auto",   "",       "1x1x1",  "2x1x1",  "4x1x1",  "1x2x1",  "2x2x1",  "4x2x1",  "1x4x1",
    "2x4x1",  "4x4x1",  "8x1x1",  "1x8x1",  "8x2x1",  "2x8x1",  "16x1x1", "1x16x1", "3x1x1",
    "5x1x1",  "6x1x1",  "7x1x1",  "9x1x1",  "10x1x1", "11x1x1", "12x1x1", "13x1x1", "14x1x1",
    "15x1x1", "3x2x1",  "5x2x1",  "6x2x1",  "7x2x1",  "1x3x1",  "2x3x1",  "3x3x1",  "4x3x1",
    "5x3x1",  "3x4x1",  "1x5x1",  "2x5x1",  "3x5x1",  "1x6x1",  "2x6x1",  "1x7x1",  "2x7x1",
    "1x9x1",  "1x10x1", "1x11x1", "1x12x1", "1x13x1", "1x14x1", "1x15x1"};

constexpr const char* kInnerShapes[] = {"undefined", "mma884", "mma1684", "mma1688", "mma16816"};

template <size_t Count>
std::string entry(const char* const (&names)[Count], int index) {
  const bool known = index >= 0 && index < static_cast<int>(Count) && names[index][0] != '\0';
  return known ? names[index] : "unknown";
}

template <size_t Count>
bool skipped(const char* const (&names)[Count], int index) {
  return index >= 0 && index < static_cast<int>(Count) && names[index][0] == '\0';
}

std::string outside(const char* attribute, int value, const std::string& allowed,
                    size_t library_version) {
  return std::string(attribute) + " " + std::to_string(value) + " is out of range: cuBLASLt " +
         version_text(library_version) + " takes " + allowed;
}

std::string up_to(int end) { return "0 to " + std::to_string(end - 1); }

}  // namespace

bool Algorithm::operator==(const Algorithm& other) const {
  return id == other.id && tile == other.tile && stages == other.stages &&
         split_k == other.split_k && reduction == other.reduction && swizzle == other.swizzle &&
         custom == other.custom && inner == other.inner && cluster == other.cluster;
}

std::string out_of_range(const Algorithm& a, size_t version) {
  const Limits end = limits(version);
  const auto within = [](int value, int end) { return value >= 0 && value < end; };
  if (a.id < 0) return outside("id", a.id, "0 and above", version);
  if (!within(a.tile, end.tile)) return outside("tile", a.tile, up_to(end.tile), version);
  if (!within(a.stages, end.stages) || skipped(kStages, a.stages)) {
    return outside("stages", a.stages, up_to(end.stages) + " without 29 and 30", version);
  }
  if (a.split_k == 0 || a.split_k < -kMaxSplitK || a.split_k > kMaxSplitK) {
    return outside("split_k", a.split_k, "1 to " + std::to_string(kMaxSplitK), version);
  }
  if (a.reduction != CUBLASLT_REDUCTION_SCHEME_NONE &&
      a.reduction != CUBLASLT_REDUCTION_SCHEME_INPLACE &&
      a.reduction != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE &&
      a.reduction != CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE) {
    return outside("reduction", a.reduction, "0, 1, 2 or 4", version);
  }
  if (!within(a.swizzle, kSwizzleEnd))
    return outside("swizzle", a.swizzle, up_to(kSwizzleEnd), version);
  if (!within(a.custom, kCustomEnd)) return outside("custom", a.custom, up_to(kCustomEnd), version);
  if (a.inner && !within(*a.inner, end.inner)) {
    return outside("inner", *a.inner, up_to(end.inner), version);
  }
  if (a.cluster && (!within(*a.cluster, end.cluster) || skipped(kClusters, *a.cluster))) {
    return outside("cluster", *a.cluster, up_to(end.cluster) + " without 1", version);
  }
  return "";
}

bool tile_shape(int tile, int* rows, int* columns) {
  if (tile <= 0 || tile >= static_cast<int>(tiles().size())) return false;
  *rows = tiles()[tile].rows;
  *columns = tiles()[tile].columns;
  return true;
}

std::string tile_name(int tile) {
  int rows, columns;
  if (tile == 0) return "undefined";
  if (!tile_shape(tile, &rows, &columns)) return "unknown";
  return std::to_string(rows) + "x" + std::to_string(columns);
}

std::string stages_name(int stages) { return entry(kStages, stages); }
std::string cluster_name(int cluster) { return entry(kClusters, cluster); }
std::string inner_name(int inner) { return entry(kInnerShapes, inner); }

std::string to_text(const Algorithm& a) {
  std::string text = "id " + std::to_string(a.id) + ", tile " + std::to_string(a.tile) + " (" +
                     tile_name(a.tile) + "), stages " + std::to_string(a.stages) + " (" +
                     stages_name(a.stages) + "), split-K " + std::to_string(a.split_k) +
                     ", reduction " + std::to_string(a.reduction) + ", swizzle " +
                     std::to_string(a.swizzle) + ", custom " + std::to_string(a.custom);
  if (a.inner) text += ", inner " + std::to_string(*a.inner) + " (" + inner_name(*a.inner) + ")";
  if (a.cluster) {
    text += ", cluster " + std::to_string(*a.cluster) + " (" + cluster_name(*a.cluster) + ")";
  }
  return text;
}

}  // namespace nvfp4::cublaslt
