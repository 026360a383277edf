// grouped_gemm on a GPU: which kernel takes it, by sizes that the host knows, never by offs.
#include "grouped_gemm.h"

#include <algorithm>
#include <optional>

#include "../ladder.h"
#include "../nvfp4.h"
#include "gemm.h"

namespace nvfp4::cuda {
namespace {

// Up to this many rows a group on average, weights are decoded in registers for mma.sync tiles.
constexpr int64_t kFewRows = 64;

// The kernels for packed weights take a dense A: a packed one is decoded first, exactly, all of it,
// because gather may ask for any row. Not where that takes more than the library's budget.
std::optional<Tensor> decode_a(GroupedGemmParams& p, const Tensor& like, Stream stream) {
  const int64_t bytes = p.a_rows * p.k * 2;
  if (p.a.scale == nullptr || bytes == 0 || bytes > kWorkspaceBudget) return std::nullopt;
  Tensor decoded = allocate({bytes}, ScalarType::Byte, like);
  DequantizeParams d;
  d.data = static_cast<const uint8_t*>(p.a.data);
  d.block_scale = p.a.scale;
  d.swizzled = p.a.swizzled;
  d.rows = p.a_rows;
  d.k = p.k;
  d.out = decoded.mutable_data_ptr();
  d.out_type = DType::kBFloat16;
  dequantize(d, stream);
  p.a = Operand{};
  p.a.data = d.out;
  p.a.row_stride = p.k;
  return decoded;
}

}  // namespace

void grouped_gemm(const GroupedGemmParams& p, const Tensor& like, Stream stream) {
  const int64_t rows = p.groups ? (p.m + p.groups - 1) / p.groups : p.m;  // of a group, on average
  if (!p.ragged_k && p.b.scale && rows <= kFewRows && grouped_small_m_weights(p)) {
    GroupedGemmParams dense = p;
    const auto decoded = decode_a(dense, like, stream);
    if (grouped_small_m_takes(dense)) {
      // Twice the average: groups differ, and a group of more rows than a tile reads its weights
      // twice, while an empty part of a tile costs little.
      return grouped_small_m(dense, std::min(2 * rows, kGroupedSmallMMax), stream);
    }
  }
  grouped_general(p, stream);
}

}  // namespace nvfp4::cuda
