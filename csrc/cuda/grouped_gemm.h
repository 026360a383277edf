// The kernels behind cuda::grouped_gemm, on raw pointers; grouped_gemm.cpp picks one.
//
// None reads offs, gather or scatter on the host, and none trusts them. Offsets are clamped to the
// problem; along M they are made non-decreasing, along K a slice [offs[e-1], offs[e]) has both ends
// rounded down to a block and is empty where the second lies before the first. A row whose index is
// out of range is zero or dropped.
#pragma once

#include "../kernels.h"

namespace nvfp4::cuda {

// Scattered results leave rows unwritten that only the device knows: this zeroes all of out.
// Without scatter it does nothing, as the kernels zero what is beyond the last offset.
void grouped_zero(const GroupedGemmParams& p, Stream stream);

// Without scatter: zeroes out's rows from *begin (on the device) on.
void grouped_zero_rest(const GroupedGemmParams& p, const int32_t* begin, Stream stream);

// Any operands, both ragged modes. Zeroes rows that nobody writes, as every kernel here does.
void grouped_general(const GroupedGemmParams& p, Stream stream);

// Ragged M, packed weights with swizzled scales, a dense A, all aligned; weights are read once for
// up to `rows` rows of a group, at most 64.
bool grouped_small_m_weights(const GroupedGemmParams& p);  // all of that but A
bool grouped_small_m_takes(const GroupedGemmParams& p);
constexpr int64_t kGroupedSmallMMax = 64;
void grouped_small_m(const GroupedGemmParams& p, int64_t rows, Stream stream);

// A launch's share of a problem of ragged M: rows [row_begin, row_begin + rows) of those that
// groups [first_group, first_group + groups) have, counted from their first one. Where `ends` is
// null: of all groups, counted from row 0.
struct GroupedPart {
  const int32_t* ends = nullptr;  // see grouped_ends
  int64_t first_group = 0, groups = 0, row_begin = 0, rows = 0;
};

// ends[0] = 0, ends[e + 1]: where group e ends, inside the problem and never decreasing. Ragged M.
// And `count` counters become zero.
void grouped_ends(const GroupedGemmParams& p, int32_t* ends, unsigned* zeros, int64_t count,
                  Stream stream);

bool grouped_unpack_takes(const Operand& operand);  // aligned well enough to be made dense

// What grouped_wgmma wants in a workspace: a part's rows of A in the problem's order, `pitch`
// 16-bit values each, a multiple of 128, those from k on zero, in the order of k that it multiplies
// in; and room for the tiles that two blocks share.
struct ArrangedA {
  void* rows = nullptr;
  DType type = DType::kBFloat16;
  int64_t pitch = 0;
  unsigned* met = nullptr;  // `cuts` counters, zeroed with the rows
  int64_t cuts = 0;
  void* sums = nullptr;
  // Not null where rows are made while grouped_wgmma is under way: by `blocks` blocks, a row in
  // steps, and those in rounds. rounds[i] counts block i's; there is one for every multiprocessor.
  // grouped_unpack_rows() says the other figures.
  unsigned* rounds = nullptr;
  unsigned blocks = 0, steps_per_row = 0, steps_per_round = 0;
};
bool grouped_wgmma_overlaps(int64_t rows);  // is sooner done with rounds
int64_t grouped_wgmma_cuts();
int64_t grouped_wgmma_sums_bytes(int64_t rows);
// Called next before grouped_wgmma().
void grouped_unpack_rows(const GroupedGemmParams& p, const GroupedPart& part, ArrangedA& to,
                         Stream stream);

// Hopper (compute capability 9.0), ragged M. Packed weights with swizzled scales, as for
// grouped_small_m, which are read once for up to `rows` rows of a group, at most 64.
void grouped_wgmma(const GroupedGemmParams& p, const GroupedPart& part, const ArrangedA& a,
                   int64_t rows, Stream stream);

// Hopper, ragged M.
// Both sides dense, of one type, 16-byte aligned, rows multiples of 16 bytes apart. Makes columns
// [n_begin, n_begin + n) of out, in rows that the part's groups have. `part.ends` is not null.
struct DenseSides {
  const void *a, *b;  // b: n rows a group of the part
  DType type;
  int64_t a_rows, a_pitch, b_pitch;
  bool a_of_part;  // row 0 of a is the part's first one, else the problem's
  int64_t n_begin, n;
  // Where not null, a or b itself: these rows are made of the problem's A or B, packed or gathered,
  // while others are multiplied. n_begin is then a multiple of 128.
  void *unpack_a, *unpack_b;
  unsigned* counters;  // grouped_dense_counters() zeros
};
int64_t grouped_dense_counters(const GroupedPart& part, int64_t n);
void grouped_dense(const GroupedGemmParams& p, const GroupedPart& part, const DenseSides& sides,
                   Stream stream);

}  // namespace nvfp4::cuda
