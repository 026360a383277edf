// grouped_gemm on a GPU: which kernel takes it, by sizes that the host knows, never by offs.
//
//   few rows    packed weights decoded in registers for mma.sync: bound by the weights' bytes
//   wgmma       the same for Hopper's warpgroup instructions, from kWgmmaRows rows a group on
//   general     everything else
//
// NVFP4_GROUPED_KERNEL=small|wgmma|general takes that one wherever it can be had, for tests.
#include "grouped_gemm.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

#include "../ladder.h"
#include "../nvfp4.h"
#include "gemm.h"

namespace nvfp4::cuda {
namespace {

// Rows a group, on average: up to kFewRows its weights' bytes are the limit for mma.sync; from
// kWgmmaRows on, where there is wgmma, that is the faster one.
constexpr int64_t kFewRows = 64, kWgmmaRows = 17;

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

enum class Kernel { kFewRows, kWgmma, kGeneral };

// For a dense A.
Kernel pick_kernel(const GroupedGemmParams& p, int64_t rows) {
  if (!grouped_small_m_weights(p)) return Kernel::kGeneral;
  const char* forced = std::getenv("NVFP4_GROUPED_KERNEL");
  const std::string wanted = forced ? forced : "";
  if (wanted == "general") return Kernel::kGeneral;
  if (wanted == "small") return Kernel::kFewRows;
  const bool many = wanted == "wgmma" || (wanted.empty() && rows >= kWgmmaRows);
  if (many && grouped_wgmma_available()) return Kernel::kWgmma;
  return rows <= kFewRows ? Kernel::kFewRows : Kernel::kGeneral;
}

}  // namespace

void grouped_gemm(const GroupedGemmParams& p, const Tensor& like, Stream stream) {
  const int64_t rows = p.groups ? (p.m + p.groups - 1) / p.groups : p.m;
  const Kernel kernel = pick_kernel(p, rows);
  if (kernel != Kernel::kGeneral) {
    GroupedGemmParams dense = p;
    const auto decoded = decode_a(dense, like, stream);
    if (grouped_small_m_takes(dense)) {
      if (kernel == Kernel::kWgmma) return grouped_wgmma(dense, rows, stream);
      // Twice the average: groups differ, and a group of more rows than a tile reads its weights
      // twice, while an empty part of a tile costs little.
      return grouped_small_m(dense, std::min(2 * rows, kGroupedSmallMMax), stream);
    }
  }
  grouped_general(p, stream);
}

}  // namespace nvfp4::cuda
