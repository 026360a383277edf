// grouped_gemm on a GPU: which kernel takes it, by sizes that the host knows, never by offs.
//
// On Hopper, for ragged M:
//   wgmma       packed weights decoded in registers: bound by the weights' bytes, then by decoding
//   dense       both sides dense: decoded to a workspace by the warps that don't multiply, in parts
//               where it is too small for all
// Elsewhere:
//   few rows    packed weights decoded in registers for mma.sync: bound by the weights' bytes
//   general     everything else
//
// NVFP4_GROUPED_KERNEL=small|wgmma|dense|general takes that one wherever it can be had, for tests.
#include "grouped_gemm.h"

#include <algorithm>
#include <string_view>

#include "../environment.h"
#include "../ladder.h"
#include "../nvfp4.h"
#include "../tensors.h"
#include "gemm.h"

namespace nvfp4::cuda {
namespace {

// Rows a group, on average: up to kFewRows its weights' bytes are the limit for mma.sync.
constexpr int64_t kFewRows = 64;
// From here on, decoding all weights once costs less than decoding them for every 64 rows: with an
// A that is copied from where it is, and with one that is unpacked.
constexpr int64_t kDenseRows = 448, kDenseUnpackedRows = 640;
// Dense weights need no decoding: fewer rows than these fill too little of a dense tile.
constexpr int64_t kDenseWeightRows = 17;
constexpr int64_t kUnpackedPitch = 128;  // a row's length in a workspace is a multiple of this
constexpr int64_t kRowsUnit = 256;       // of a part: a tile's

enum class Kernel { kFewRows, kWgmma, kDense, kGeneral };

// The kernel for few rows takes a dense A: a packed one is decoded first, exactly, all of it,
// because gather may ask for any row. Not where that takes more than the library's budget: 0 bytes.
int64_t decoded_a_bytes(const GroupedGemmParams& p) {
  const int64_t bytes = p.a_rows * p.k * 2;
  return p.a.scale == nullptr || bytes > kWorkspaceBudget ? 0 : bytes;
}

void decode_a(GroupedGemmParams& p, void* decoded, Stream stream) {
  DequantizeParams d;
  d.data = static_cast<const uint8_t*>(p.a.data);
  d.block_scale = p.a.scale;
  d.swizzled = p.a.swizzled;
  d.rows = p.a_rows;
  d.k = p.k;
  d.out = decoded;
  d.out_type = DType::kBFloat16;
  dequantize(d, stream);
  p.a = Operand{};
  p.a.data = decoded;
  p.a.row_stride = p.k;
}

// 16-bit rows where they are, for copies of boxes.
bool boxes_take(const Operand& o) {
  return o.scale == nullptr && o.type != DType::kFloat32 &&
         reinterpret_cast<uintptr_t>(o.data) % 16 == 0 && o.row_stride % 8 == 0;
}

bool unpacks_a(const GroupedGemmParams& p) { return p.gather || !boxes_take(p.a); }

bool on_hopper() { return kHasHopperKernels && current_device().cc_major == 9; }

bool wgmma_takes(const GroupedGemmParams& p) {
  return grouped_small_m_weights(p) && grouped_unpack_takes(p.a) && on_hopper();
}

bool dense_takes(const GroupedGemmParams& p) {
  if (p.ragged_k || p.groups == 0 || p.m == 0 || p.n == 0 || p.k == 0) return false;
  const bool b = p.b.scale ? grouped_unpack_takes(p.b) : boxes_take(p.b);
  return b && grouped_unpack_takes(p.a) && on_hopper();
}

Kernel pick_kernel(const GroupedGemmParams& p, int64_t rows) {
  static thread_local EnvironmentVariable variable("NVFP4_GROUPED_KERNEL");
  const char* forced = variable.text();
  const std::string_view wanted = forced ? forced : "";
  if (wanted == "general") return Kernel::kGeneral;
  if (wanted == "small") {
    return grouped_small_m_weights(p) ? Kernel::kFewRows : Kernel::kGeneral;
  }
  const int64_t packed_rows = unpacks_a(p) && wgmma_takes(p) ? kDenseUnpackedRows : kDenseRows;
  const int64_t dense_rows = p.b.scale ? packed_rows : kDenseWeightRows;
  const bool dense = wanted == "dense" || (wanted.empty() && rows >= dense_rows);
  if (dense && dense_takes(p)) return Kernel::kDense;
  if (wgmma_takes(p)) return Kernel::kWgmma;
  return grouped_small_m_weights(p) && rows <= kFewRows ? Kernel::kFewRows : Kernel::kGeneral;
}

DType product_type(const GroupedGemmParams& p) {
  if (p.a.scale == nullptr) return p.a.type;
  return p.b.scale == nullptr ? p.b.type : DType::kBFloat16;
}

// Tiles of up to twice the average rows: groups differ, and a group of more rows than a tile
// decodes its weights twice, while an empty part of a tile costs little.
int64_t tile_rows(int64_t rows) { return std::min(2 * rows, kGroupedSmallMMax); }

void run_wgmma(const GroupedGemmParams& p, int64_t rows, Stream stream) {
  ArrangedA a;
  // Both sides packed: exact in FP16 too, whose words decode in fewer instructions.
  a.type = p.a.scale ? DType::kFloat16 : p.a.type;
  a.pitch = round_up(p.k, kUnpackedPitch);
  a.cuts = grouped_wgmma_cuts();
  const int64_t sums = grouped_wgmma_sums_bytes(tile_rows(rows));
  const int64_t part_rows = std::min(p.m, (kWorkspaceBudget - sums) / (a.pitch * 2));
  const Workspace workspace{part_rows * a.pitch * 2, sums, a.cuts * 4,
                            current_device().sm_count * 4};
  a.rows = workspace.part(0);
  a.sums = workspace.part(1);
  a.met = static_cast<unsigned*>(workspace.part(2));
  if (grouped_wgmma_overlaps(tile_rows(rows))) a.rounds = static_cast<unsigned*>(workspace.part(3));
  grouped_zero(p, stream);
  GroupedPart part;
  part.groups = p.groups;
  for (; part.row_begin < p.m; part.row_begin += part_rows) {
    part.rows = std::min(part_rows, p.m - part.row_begin);
    grouped_unpack_rows(p, part, a, stream);
    grouped_wgmma(p, part, a, tile_rows(rows), stream);
  }
}

// How much of both sides is dense at a time.
struct Parts {
  int64_t rows, groups, n;
};

int64_t pieces(int64_t all, int64_t each) { return (all + each - 1) / each; }

Parts split(const GroupedGemmParams& p, bool unpack_a, int64_t row_bytes) {
  const int64_t a_bytes = unpack_a ? p.m * row_bytes : 0;
  const int64_t b_bytes = p.b.scale ? p.groups * p.n * row_bytes : 0;
  // Half of the budget each, and what the other side leaves.
  const int64_t half = kWorkspaceBudget / 2;
  const auto fit = [&](int64_t other) {
    return std::max(half, kWorkspaceBudget - other) / row_bytes;
  };
  Parts parts{p.m, p.groups, p.n};
  const auto whole_tiles = [](int64_t rows) {
    return std::max(rows / kRowsUnit * kRowsUnit, kRowsUnit);
  };
  if (unpack_a && fit(b_bytes) < p.m) parts.rows = whole_tiles(fit(b_bytes));
  const int64_t b_rows = fit(a_bytes);
  if (p.b.scale && b_rows < p.groups * p.n) {
    parts.groups = std::max<int64_t>(1, b_rows / p.n);
    if (b_rows < p.n) parts.n = whole_tiles(b_rows);
  }
  return parts;
}

void run_dense(const GroupedGemmParams& p, Stream stream) {
  const int64_t pitch = round_up(p.k, kUnpackedPitch), row_bytes = pitch * 2;
  const bool unpack_a = unpacks_a(p), unpack_b = p.b.scale != nullptr;
  const Parts parts = split(p, unpack_a, row_bytes);
  GroupedPart part;
  part.groups = parts.groups;
  part.rows = parts.rows;
  const int64_t counters = grouped_dense_counters(part, parts.n);
  const int64_t count =
      counters * pieces(p.groups, parts.groups) * pieces(p.n, parts.n) * pieces(p.m, parts.rows);
  const Workspace workspace{(p.groups + 1 + count) * 4, unpack_a ? parts.rows * row_bytes : 0,
                            unpack_b ? parts.groups * parts.n * row_bytes : 0};
  auto* const ends = static_cast<int32_t*>(workspace.part(0));
  void *const a = workspace.part(1), *const b = workspace.part(2);
  part.ends = ends;
  DenseSides sides = {};
  sides.counters = reinterpret_cast<unsigned*>(ends + p.groups + 1);
  grouped_ends(p, ends, sides.counters, count, stream);
  grouped_zero(p, stream);
  grouped_zero_rest(p, ends + p.groups, stream);
  sides.type = product_type(p);
  sides.a = unpack_a ? a : p.a.data;
  sides.a_rows = unpack_a ? parts.rows : p.a_rows;
  sides.a_pitch = unpack_a ? pitch : p.a.row_stride;
  sides.a_of_part = unpack_a;
  sides.b = unpack_b ? b : p.b.data;
  sides.b_pitch = unpack_b ? pitch : p.b.row_stride;
  for (; part.first_group < p.groups; part.first_group += parts.groups) {
    part.groups = std::min(parts.groups, p.groups - part.first_group);
    for (sides.n_begin = 0; sides.n_begin < p.n; sides.n_begin += parts.n) {
      sides.n = std::min(parts.n, p.n - sides.n_begin);
      for (part.row_begin = 0; part.row_begin < p.m; part.row_begin += parts.rows) {
        part.rows = std::min(parts.rows, p.m - part.row_begin);
        const bool new_a = unpack_a && (parts.rows < p.m || sides.n_begin == 0);
        const bool new_b = unpack_b && part.row_begin == 0;
        sides.unpack_a = new_a ? a : nullptr;
        sides.unpack_b = new_b ? b : nullptr;
        grouped_dense(p, part, sides, stream);
        sides.counters += counters;
      }
    }
  }
}

}  // namespace

void grouped_gemm(const GroupedGemmParams& p, Stream stream) {
  const int64_t rows = p.groups ? (p.m + p.groups - 1) / p.groups : p.m;
  switch (pick_kernel(p, rows)) {
    case Kernel::kWgmma:
      return run_wgmma(p, rows, stream);
    case Kernel::kDense:
      return run_dense(p, stream);
    case Kernel::kFewRows: {
      GroupedGemmParams dense = p;
      const Workspace decoded(decoded_a_bytes(p));
      if (decoded.data()) decode_a(dense, decoded.data(), stream);
      if (grouped_small_m_takes(dense)) return grouped_small_m(dense, tile_rows(rows), stream);
      break;
    }
    case Kernel::kGeneral:
      break;
  }
  grouped_general(p, stream);
}

}  // namespace nvfp4::cuda
