// Runs the grouped kernels of csrc/cuda on the emulator and compares them with a plain FP64 loop.
//
// Every operand type, both scale layouts, both ragged modes, gather, scatter, gamma, hostile
// offsets and indices; memory ends at a page that can't be read. The deliberate faults of
// faults_for_tests.h must be seen. Prints one line per kernel; returns the number of failed ones.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/grouped_gemm.h"
#include "cuda/grouped_schedule.cuh"
#include "cuda/grouped_shares.cuh"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "kernels.h"
#include "nvfp4.h"

// The scheduler is needed here, for named barriers.
#include "../cuda_emulator/buffer.h"
#include "../cuda_emulator/emulator.cpp"

namespace emulator {

constexpr int kMaxCluster = 2;
Barrier named[kMaxCluster][16];
std::mt19937 turns(5);

// At least once, else a thread that waits for memory would keep the others from writing it.
void give_way() {
  for (unsigned times = 1 + turns() % 3; times; --times) swapcontext(&current->context, &scheduler);
}

void sync_named(int id, int threads) {
  Barrier& b = named[cluster_rank()][id];
  b.expected = threads;
  wait(b);
}

void arrive_named(int id, int threads) {
  Barrier& b = named[cluster_rank()][id];
  b.expected = threads;
  if (++b.arrived < threads) return;
  b.arrived = 0;
  ++b.generation;
}

// Barriers that count bytes, by block and place.
struct Counted {
  Barrier barrier;
  int64_t bytes = 0;  // to come, less those that came
  std::vector<std::function<void()>> copies;
};
std::map<std::pair<int, uint32_t>, Counted> counted;

void init_counted(uint32_t barrier, int arrivals) {
  Counted& c = counted[{cluster_rank(), barrier}];
  c = {};
  c.barrier.expected = arrivals;
}

void end_phase(Counted& c) {
  if (c.barrier.arrived < c.barrier.expected || c.bytes != 0) return;
  for (const auto& copy : c.copies) copy();
  c.copies.clear();
  c.barrier.arrived = 0;
  ++c.barrier.generation;
}

void arrive_counted(uint32_t barrier, int rank, int arrivals, int64_t bytes) {
  Counted& c = counted.at({rank, barrier});
  c.barrier.arrived += arrivals;
  c.bytes += bytes;
  if (c.barrier.arrived > c.barrier.expected) {
    std::fprintf(stderr, "more arrivals than a barrier's phase has\n");
    std::abort();
  }
  end_phase(c);
}

void copy_counted(uint32_t barrier, int rank, int64_t bytes, std::function<void()> copy) {
  Counted& c = counted.at({rank, barrier});
  c.copies.push_back(std::move(copy));
  c.bytes -= bytes;
  end_phase(c);
}

bool phase_over(uint32_t barrier, uint32_t parity) {
  return counted.at({cluster_rank(), barrier}).barrier.generation % 2 != parity;
}

void wait_counted(uint32_t barrier, uint32_t parity) {
  Barrier& b = counted.at({cluster_rank(), barrier}).barrier;
  while (b.generation % 2 == parity) {
    current->waiting = &b;
    current->generation = b.generation;
    swapcontext(&current->context, &scheduler);
  }
}

}  // namespace emulator

using namespace nvfp4;

namespace {

bool quick = false;  // a test's worth of cases, not all

std::mt19937 rng(11);
float uniform() { return static_cast<float>(rng()) * 0x1p-31f - 1.0f; }

enum Kind { kSwizzled, kLinear, kBf16, kFp16, kKinds };

// `stack` matrices of rows x k, one after another.
struct Matrix {
  int64_t stack, rows, k, stride, tiles;
  Kind kind;
  Buffer data, scale;

  Matrix(int64_t stack_, int64_t rows_, int64_t k_, Kind kind_, int64_t pad, int64_t misalign)
      : stack(stack_),
        rows(rows_),
        k(k_),
        stride(kind_ >= kBf16 ? k_ + pad : k_),
        tiles(round_up(k_ / kBlockSize, kTileCols) / kTileCols),
        kind(kind_),
        data(kind_ >= kBf16 ? std::max<int64_t>(0, (stack_ * rows_ - 1) * stride + k_) * 2
                            : stack_ * rows_ * k_ / 2,
             misalign ? (kind_ >= kBf16 ? 2 : 1) : 0),
        scale(kind_ == kSwizzled ? stack_ * round_up(rows_, kTileRows) * tiles * kTileCols
              : kind_ == kLinear ? stack_ * rows_ * (k_ / kBlockSize)
                                 : 0,
              misalign) {
    if (kind >= kBf16) {
      for (int64_t r = 0; r < stack * rows; ++r) {
        for (int64_t c = 0; c < k; ++c) store(data.data(), type(), r * stride + c, uniform() * 4);
      }
      return;
    }
    for (int64_t i = 0; i < data.size(); ++i) data.data()[i] = static_cast<uint8_t>(rng());
    for (int64_t e = 0; e < stack; ++e) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < k / kBlockSize; ++c) *scale_at(e, r, c) = 0x28 + rng() % 0x30;
      }
    }
  }
  DType type() const { return kind == kFp16 ? DType::kFloat16 : DType::kBFloat16; }
  uint8_t* scale_at(int64_t e, int64_t r, int64_t c) {
    if (kind == kLinear) return scale.data() + (e * rows + r) * (k / kBlockSize) + c;
    return scale.data() + e * round_up(rows, kTileRows) * tiles * kTileCols +
           swizzled_offset(r, c, tiles);
  }
  double at(int64_t e, int64_t r, int64_t c) {
    if (kind >= kBf16) return load(data.data(), type(), (e * rows + r) * stride + c);
    const int64_t i = ((e * rows + r) * k + c) / 2;
    return double{e2m1_to_float(data.data()[i] >> (c % 2 ? 4 : 0) & 0xF)} *
           e4m3_to_float(*scale_at(e, r, c / kBlockSize));
  }
  Operand operand() {
    Operand o;
    o.data = data.data();
    if (kind < kBf16) o.scale = scale.data();
    o.swizzled = kind == kSwizzled;
    o.type = type();
    o.row_stride = stride;
    return o;
  }
};

using Run = bool (*)(const GroupedGemmParams& p);  // false: not for this kernel

struct Outcome {
  long cases = 0, failed = 0;
  // A fault switched on: a case that it changes must be wrong, any other right.
  bool rows_not_zeroed = false, stale_padding = false;
  long changed = 0;
};

// Slices or rows of a group, as whoever trusts nothing reads offs.
struct Range {
  int64_t begin, end;
};

std::vector<Range> ranges(const GroupedGemmParams& p) {
  std::vector<Range> all(p.groups);
  const auto inside = [&](int64_t e) {
    const int64_t end = p.ragged_k ? p.k : p.m, unit = p.ragged_k ? kBlockSize : 1;
    return e < 0 ? 0 : std::clamp<int64_t>(p.offs[e], 0, end) / unit * unit;
  };
  int64_t last = 0;  // rows are one after another, whatever offs say; slices are on their own
  for (int64_t e = 0; e < p.groups; ++e) {
    const int64_t begin = p.ragged_k ? inside(e - 1) : last;
    all[e] = {begin, last = std::max(begin, inside(e))};
  }
  return all;
}

void run_case(Outcome& outcome, Run run, const char* name, Kind ka, Kind kb, bool ragged_k,
              int64_t m, int64_t n, int64_t k, int64_t groups, bool hostile) {
  const int64_t misalign = rng() % 5 == 0, a_rows = ragged_k ? m : rng() % 2 ? m : m / 2 + 1;
  const bool gather = !ragged_k && (a_rows != m || rng() % 2);
  Matrix a(1, a_rows, k, ka, rng() % 2 ? 8 : 0, misalign);
  Matrix b(ragged_k ? 1 : groups, n, k, kb, 0, misalign);
  Buffer offs(groups * 4), from(m * 4), to(m * 4), gamma(m * 4), alpha(groups * 4),
      bias(groups * n * 4);
  const int64_t end = ragged_k ? k : m, unit = ragged_k ? kBlockSize : 1;
  for (int64_t e = 0; e < groups; ++e) {
    offs.as<int32_t>()[e] = static_cast<int32_t>(rng() % (end / unit + 1) * unit);
  }
  std::sort(offs.as<int32_t>(), offs.as<int32_t>() + groups);
  for (int64_t e = 0; hostile && e < groups; ++e) {
    const int32_t wild = static_cast<int32_t>(rng()) >> (rng() % 32);
    if (rng() % 2) offs.as<int32_t>()[e] = wild;
  }
  for (int64_t i = 0; i < m; ++i) {
    const bool wild = hostile && rng() % 2;
    from.as<int32_t>()[i] = static_cast<int32_t>(wild ? rng() : rng() % a_rows);
    to.as<int32_t>()[i] = static_cast<int32_t>(i);
    gamma.as<float>()[i] = uniform();
  }
  std::shuffle(to.as<int32_t>(), to.as<int32_t>() + m, rng);
  for (int64_t i = 0; i < m; ++i) {
    if (rng() % 5 == 0) to.as<int32_t>()[i] = hostile ? static_cast<int32_t>(rng()) : -1;
  }
  for (int64_t e = 0; e < groups; ++e) alpha.as<float>()[e] = uniform();
  GroupedGemmParams p;
  p.bias_type = static_cast<DType>(rng() % 3);
  for (int64_t i = 0; i < groups * n; ++i) store(bias.data(), p.bias_type, i, uniform());
  // One NaN scale a side.
  if (k > 0 && rng() % 2) {
    if (ka < kBf16) *a.scale_at(0, a_rows / 2, (k / kBlockSize) / 2) = kE4m3Nan;
    if (kb < kBf16 && n > 0) *b.scale_at(b.stack / 2, n / 2, 0) = kE4m3Nan;
  }
  p.a = a.operand();
  p.b = b.operand();
  p.ragged_k = ragged_k;
  p.offs = offs.as<int32_t>();
  p.groups = groups;
  p.m = m;
  p.n = n;
  p.k = k;
  p.a_rows = a_rows;
  if (gather) p.gather = from.as<int32_t>();
  if (!ragged_k && rng() % 2) p.scatter = to.as<int32_t>();
  if (rng() % 2) p.gamma = gamma.as<float>();
  if (rng() % 2) p.group_alpha = alpha.as<float>();
  p.alpha.value = 0.37f;
  if (rng() % 3) p.bias = bias.data();
  p.out_type = static_cast<DType>(rng() % 3);
  const int64_t out_rows = ragged_k ? groups * m : m;
  Buffer out(out_rows * n * size_of(p.out_type), rng() % 4 ? 0 : size_of(p.out_type));
  p.out = out.data();
  p.rows_not_zeroed = outcome.rows_not_zeroed;
  p.stale_padding = outcome.stale_padding;
  if (!run(p)) return;
  ++outcome.cases;

  bool changed = false;  // by the fault
  std::vector<bool> written(out_rows);
  std::vector<double> want(out_rows * n, 0.0), bound(out_rows * n, 0.0);
  const std::vector<Range> groups_of = ranges(p);
  for (int64_t e = 0; e < groups; ++e) {
    const auto [begin, past] = groups_of[e];
    const int64_t rows = ragged_k ? m : past - begin;
    const int64_t tile_end = round_up(past, kTileCols * kBlockSize);
    changed = changed || (p.stale_padding && ragged_k && past < std::min(tile_end, k));
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t problem_row = ragged_k ? i : begin + i;
      const int64_t source = gather ? from.as<int32_t>()[problem_row] : problem_row;
      const int64_t target = ragged_k    ? e * m + i
                             : p.scatter ? to.as<int32_t>()[problem_row]
                                         : problem_row;
      if (target < 0 || target >= out_rows) continue;
      written[target] = true;
      if (source < 0 || source >= a_rows) continue;  // zero, and without bias
      const double factor = p.group_alpha ? alpha.as<float>()[e] : p.alpha.value;
      const double g = p.gamma ? p.gamma[problem_row] : 1.0;
      for (int64_t c = 0; c < n; ++c) {
        double sum = 0, magnitude = 0;
        for (int64_t x = ragged_k ? begin : 0; x < (ragged_k ? past : k); ++x) {
          const double product = a.at(0, source, x) * b.at(ragged_k ? 0 : e, c, x);
          sum += product;
          magnitude += std::fabs(product);
        }
        const double bias_value = p.bias ? load(p.bias, p.bias_type, e * n + c) : 0.0;
        want[target * n + c] = (factor * sum + bias_value) * g;
        bound[target * n + c] =
            (std::fabs(factor) * magnitude * 0x1p-21 + std::fabs(bias_value) * 0x1p-22) *
                std::fabs(g) +
            1e-7;
      }
    }
  }
  int64_t wrong = 0, first = -1;
  for (int64_t i = 0; i < out_rows * n; ++i) {
    const float got = load(out.data(), p.out_type, i);
    bool right;
    if (want[i] != want[i]) {
      uint8_t nan[4];
      store(nan, p.out_type, 0, float_from_bits(kNanFloat32));
      right = std::memcmp(nan, out.data() + i * size_of(p.out_type), size_of(p.out_type)) == 0;
    } else {
      const double ulp = p.out_type == DType::kFloat32   ? 0x1p-22
                         : p.out_type == DType::kFloat16 ? 0x1p-10
                                                         : 0x1p-7;
      right = std::fabs(got - want[i]) <= bound[i] + ulp * std::fabs(want[i]) ||
              (p.out_type == DType::kFloat16 && std::fabs(want[i]) > 65000 && std::isinf(got));
    }
    if (!right && wrong++ == 0) first = i;
  }
  if (p.rows_not_zeroed) {
    changed = std::find(written.begin(), written.end(), false) != written.end();
  }
  outcome.changed += changed;
  if (changed == (wrong > 0) || outcome.failed++ >= 8) return;
  std::printf(
      "  %s: a=%d b=%d ragged_k=%d m=%lld n=%lld k=%lld e=%lld gather=%d scatter=%d misalign=%d "
      "hostile=%d: ",
      name, ka, kb, ragged_k, (long long)m, (long long)n, (long long)k, (long long)groups, gather,
      p.scatter != nullptr, (int)misalign, hostile);
  if (!wrong) {
    std::printf("the fault is not seen\n");
    return;
  }
  std::printf("%lld wrong, first (%lld, %lld): %g, expected %g\n", (long long)wrong,
              (long long)(first / n), (long long)(first % n), load(out.data(), p.out_type, first),
              want[first]);
}

constexpr int64_t kShapes[][4] = {
    {1, 1, 16, 1},     {5, 8, 48, 3},     {40, 24, 96, 4}, {150, 136, 256, 3}, {300, 130, 80, 2},
    {64, 300, 144, 5}, {70, 40, 608, 70}, {33, 8, 0, 2},   {20, 16, 64, 1100}, {9, 264, 1056, 2},
};

int report(const char* name, const Outcome& outcome) {
  std::printf("%-18s %6ld cases %4ld failed\n", name, outcome.cases, outcome.failed);
  return outcome.failed || !outcome.cases;
}

#include "schedule.inl"

bool run_general(const GroupedGemmParams& p) {
  cuda::grouped_general(p, nullptr);
  return true;
}

int test_general() {
  Outcome outcome;
  for (const auto& [m, n, k, e] : kShapes) {
    for (int ka = 0; ka < kKinds; ++ka) {
      for (int kb = 0; kb < kKinds; ++kb) {
        if (ka >= kBf16 && kb >= kBf16 && ka != kb) continue;
        if (m * n > 4000 && rng() % 3) continue;  // slow
        if (quick && (m * n * k > 1500000 || rng() % 6)) continue;
        for (const bool ragged_k : {false, true}) {
          if (ragged_k && e > 100) continue;
          const auto one = [&](bool hostile) {
            run_case(outcome, run_general, "general", Kind(ka), Kind(kb), ragged_k, m, n, k, e,
                     hostile);
          };
          one(false);
          if (quick || rng() % 4 == 0) one(true);
        }
      }
    }
  }
  return report("grouped_general", outcome);
}

// Kernels for ragged M, from these kinds of A and B. Quick: one case in `thin`.
int test_rows(const char* name, Run run, std::vector<Kind> a_kinds, std::vector<Kind> b_kinds,
              unsigned thin = 3) {
  Outcome outcome;
  constexpr int64_t kShapes[][4] = {
      {1, 1, 32, 1},     {5, 8, 96, 3},    {40, 24, 128, 4},  {70, 136, 256, 3}, {130, 264, 160, 2},
      {64, 300, 416, 9}, {33, 8, 1056, 2}, {20, 16, 64, 600}, {300, 520, 64, 2}, {9, 600, 640, 2},
      {80, 72, 544, 20}, {90, 8, 96, 60},  {10, 40, 832, 4},  {40, 72, 1312, 9}};
  for (const auto& [m, n, k, e] : kShapes) {
    for (const Kind ka : a_kinds) {
      for (const Kind kb : b_kinds) {
        if (ka >= kBf16 && kb >= kBf16 && ka != kb) continue;
        for (int i = 0; i < 3; ++i) {
          const bool cut = k == 832 && b_kinds.size() == 1;  // by wgmma: all of them
          if (quick && (m * n * k > 3000000 || (!cut && rng() % thin))) continue;
          run_case(outcome, run, name, ka, kb, false, m, n, k, e, i == 2);
        }
      }
    }
  }
  return report(name, outcome);
}

// The deliberate faults, by every kernel that zeroes rows, and by the one for slices of K.
int test_faults(const char* name, Run run, bool slices) {
  Outcome zeroing, slicing;
  zeroing.rows_not_zeroed = slicing.stale_padding = true;
  for (int i = 0; i < 12; ++i) {
    run_case(zeroing, run, name, kBf16, kSwizzled, false, 40, 24, 96, 4, i % 4 == 3);
    if (slices) run_case(slicing, run, name, kLinear, Kind(i % 3), true, 20, 24, 208, 5, false);
  }
  zeroing.cases = std::min(zeroing.cases, zeroing.changed);
  slicing.cases = std::min(slicing.cases, slicing.changed);
  int failed = report(concat(name, ", rows not zeroed").c_str(), zeroing);
  if (slices) failed += report(concat(name, ", stale padding").c_str(), slicing);
  return failed;
}

void require_barriers_at_rest() {
  for (const auto& block : emulator::named) {
    for (const auto& barrier : block) {
      if (barrier.arrived == 0) continue;
      std::printf("  a named barrier is left half full\n");
      std::exit(1);
    }
  }
}

DType product_type(const GroupedGemmParams& p) {
  if (p.a.scale == nullptr) return p.a.type;
  return p.b.scale == nullptr ? p.b.type : DType::kBFloat16;
}

// The kernel that arranges A's rows as if it ran beside the one that takes them: what it has made
// is put aside and comes back, rows by rows, while the other asks how far it is. What is taken
// sooner is NaN.
class RowsInTheMaking {
 public:
  RowsInTheMaking(const cuda::ArrangedA& a, int64_t rows) : a_(a), bytes_(rows * a.pitch * 2) {
    if (a.rounds == nullptr) return;
    auto* const all = static_cast<uint8_t*>(a.rows);
    made_.assign(all, all + bytes_);
    std::memset(all, 0xFF, bytes_);
    last_.assign(a.rounds, a.rounds + a.blocks);
    std::fill_n(a.rounds, a.blocks, 0);
    cuda::other_kernel = [this] { go_on(); };
  }
  ~RowsInTheMaking() { cuda::other_kernel = nullptr; }

 private:
  void go_on() {
    const auto block = rng() % a_.blocks;
    if (a_.rounds[block] == last_[block]) return;
    ++a_.rounds[block];
    const int64_t rounds = *std::min_element(a_.rounds, a_.rounds + a_.blocks);
    const int64_t rows = rounds * a_.steps_per_round / a_.steps_per_row;
    const int64_t bytes = std::min(rows * a_.pitch * 2, bytes_);
    std::memcpy(a_.rows, made_.data(), bytes);
  }

  const cuda::ArrangedA& a_;
  const int64_t bytes_;
  std::vector<uint8_t> made_;
  std::vector<unsigned> last_;
};

// In parts, by few blocks, so that tiles are cut.
template <int kRows>
bool run_wgmma(const GroupedGemmParams& p) {
  if (!cuda::grouped_small_m_weights(p) || !cuda::grouped_unpack_takes(p.a)) return false;
  emulator::machine.index = emulator::machine.sm_count = 2 + static_cast<int>(rng() % 4);
  emulator::machine.order = static_cast<emulator::Machine::Order>(rng() % 3);
  cuda::GroupedPart part;
  part.groups = p.groups;
  const int64_t rows = p.m / (1 + rng() % 3) + 1;
  cuda::ArrangedA a;
  a.type = p.a.scale ? DType::kFloat16 : p.a.type;
  a.pitch = round_up(p.k, 128);
  a.cuts = cuda::grouped_wgmma_cuts();
  Buffer arranged(rows * a.pitch * 2), met(a.cuts * 4), sums(cuda::grouped_wgmma_sums_bytes(kRows));
  Buffer rounds(emulator::machine.sm_count * 4);
  a.rows = arranged.data();
  a.met = met.as<unsigned>();
  a.sums = sums.data();
  a.rounds = rng() % 3 ? rounds.as<unsigned>() : nullptr;
  cuda::grouped_zero(p, nullptr);
  for (; part.row_begin < p.m; part.row_begin += rows) {
    part.rows = std::min(rows, p.m - part.row_begin);
    cuda::grouped_unpack_rows(p, part, a, nullptr);
    const RowsInTheMaking meanwhile(a, part.rows);
    cuda::grouped_wgmma(p, part, a, kRows, nullptr);
  }
  require_barriers_at_rest();
  return true;
}

// In parts of a few groups, `kRows` rows and half of the columns.
template <int kRows>
bool run_dense(const GroupedGemmParams& p) {
  if (p.ragged_k || p.k == 0 || !cuda::grouped_unpack_takes(p.a)) return false;
  const bool unpack_b = p.b.scale != nullptr;
  if (!cuda::grouped_unpack_takes(p.b)) return false;
  const bool unpack_a = p.gather || p.a.scale;
  const int64_t pitch = round_up(p.k, 128), rows = std::min<int64_t>(p.m, kRows);
  const int64_t groups = unpack_b ? std::min(2 + p.groups / 4, p.groups) : p.groups;
  const int64_t n = unpack_b ? round_up((p.n + 1) / 2, 128) : p.n;
  Buffer a(unpack_a ? rows * pitch * 2 : 0), b(unpack_b ? groups * n * pitch * 2 : 0);
  Buffer ends((p.groups + 1) * 4);
  emulator::machine.index = 1 + kRows % 2;
  emulator::machine.sm_count = kRows % 2 ? 3 : 9;
  emulator::machine.order = static_cast<emulator::Machine::Order>(rng() % 3);
  cuda::grouped_zero(p, nullptr);
  cuda::DenseSides sides = {};
  sides.type = product_type(p);
  sides.a = unpack_a ? a.data() : p.a.data;
  sides.a_rows = unpack_a ? rows : p.a_rows;
  sides.a_pitch = unpack_a ? pitch : p.a.row_stride;
  sides.a_of_part = unpack_a;
  sides.b = unpack_b ? b.data() : p.b.data;
  sides.b_pitch = unpack_b ? pitch : p.b.row_stride;
  cuda::GroupedPart part;
  part.ends = ends.as<int32_t>();
  part.groups = groups;
  part.rows = rows;
  const int64_t count = cuda::grouped_dense_counters(part, n);
  Buffer counters(count * 4);
  sides.counters = counters.as<unsigned>();
  for (; part.first_group < p.groups; part.first_group += groups) {
    part.groups = std::min(groups, p.groups - part.first_group);
    for (sides.n_begin = 0; sides.n_begin < p.n; sides.n_begin += n) {
      sides.n = std::min(n, p.n - sides.n_begin);
      for (part.row_begin = 0; part.row_begin < p.m; part.row_begin += rows) {
        part.rows = std::min(rows, p.m - part.row_begin);
        cuda::grouped_ends(p, ends.as<int32_t>(), sides.counters, count, nullptr);
        sides.unpack_a = unpack_a ? a.data() : nullptr;
        sides.unpack_b = unpack_b && part.row_begin == 0 ? b.data() : nullptr;
        cuda::grouped_dense(p, part, sides, nullptr);
      }
    }
  }
  cuda::grouped_zero_rest(p, ends.as<int32_t>() + p.groups, nullptr);
  require_barriers_at_rest();
  return true;
}

template <int kRows>
bool run_small(const GroupedGemmParams& p) {
  if (!cuda::grouped_small_m_takes(p)) return false;
  cuda::grouped_small_m(p, kRows, nullptr);
  return true;
}

}  // namespace

// Arguments: kernels to run (all where there are none), or `quick`, which leaves out most cases.
int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  bool any = false;
  const auto named = [&](const char* name) {
    return std::any_of(argv + 1, argv + argc,
                       [&](const char* one) { return std::strcmp(one, name) == 0; });
  };
  quick = named("quick");
  for (const char* name : {"schedule", "shares", "small", "wgmma", "dense", "general", "faults"}) {
    any = any || named(name);
  }
  const auto wanted = [&](const char* name) { return !any || named(name); };
  const std::vector<Kind> dense_a = {kBf16, kFp16}, any_kind = {kSwizzled, kLinear, kBf16, kFp16};
  int failed = 0;
  if (wanted("schedule")) failed += test_schedule();
  if (wanted("shares")) failed += test_shares();
  if (wanted("small")) {
    failed += test_rows("small_m 8", run_small<8>, dense_a, {kSwizzled});
    failed += test_rows("small_m 16", run_small<16>, dense_a, {kSwizzled});
    failed += test_rows("small_m 32", run_small<32>, dense_a, {kSwizzled});
    failed += test_rows("small_m 64", run_small<64>, dense_a, {kSwizzled});
  }
  if (wanted("wgmma")) {
    failed += test_rows("wgmma 8", run_wgmma<8>, any_kind, {kSwizzled});
    failed += test_rows("wgmma 16", run_wgmma<16>, any_kind, {kSwizzled});
    failed += test_rows("wgmma 32", run_wgmma<32>, any_kind, {kSwizzled});
    failed += test_rows("wgmma 64", run_wgmma<64>, any_kind, {kSwizzled});
  }
  if (wanted("dense")) {
    failed += test_rows("dense 41", run_dense<41>, any_kind, any_kind, 12);
    failed += test_rows("dense 512", run_dense<512>, any_kind, any_kind, 12);
  }
  if (wanted("general")) failed += test_general();
  if (wanted("faults")) {
    failed += test_faults("general", run_general, true);
    failed += test_faults("small_m", run_small<8>, false);
    failed += test_faults("wgmma", run_wgmma<8>, false);
    failed += test_faults("dense", run_dense<40>, false);
  }
  return failed;
}
