// Runs the grouped kernels of csrc/cuda on the emulator and compares them with a plain FP64 loop.
//
// Every operand type, both scale layouts, both ragged modes, gather, scatter, gamma, hostile
// offsets and indices; memory ends at a page that can't be read. Prints one line per kernel;
// returns the number of failed kernels.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/grouped_gemm.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "kernels.h"
#include "nvfp4.h"

// Its scheduler is needed here, for named barriers.
#include "../cuda_emulator/emulator.cpp"

namespace emulator {

Barrier named[16];

void sync_named(int id, int threads) {
  named[id].expected = threads;
  wait(named[id]);
}

void arrive_named(int id, int threads) {
  Barrier& b = named[id];
  b.expected = threads;
  if (++b.arrived < threads) return;
  b.arrived = 0;
  ++b.generation;
}

}  // namespace emulator

using namespace nvfp4;

namespace {

bool quick = false;  // a test's worth of cases, not all

std::mt19937 rng(11);
float uniform() { return static_cast<float>(rng()) * 0x1p-31f - 1.0f; }

// `size` bytes of 0x7F that end (up to alignment) at an unreadable page.
class Buffer {
 public:
  explicit Buffer(int64_t size, int64_t misalign = 0) : size_(size) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t used = round_up(size + misalign, 16);
    mapped_ = round_up(std::max<int64_t>(used, 1), page) + page;
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + mapped_ - page, page, PROT_NONE);
    data_ = base_ + mapped_ - page - used + misalign;
    std::memset(data_, 0x7F, size);
  }
  ~Buffer() { munmap(base_, mapped_); }
  Buffer(const Buffer&) = delete;
  uint8_t* data() { return data_; }
  int64_t size() const { return size_; }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }

 private:
  int64_t size_, mapped_;
  uint8_t *base_, *data_;
};

int64_t size_of(DType t) { return t == DType::kFloat32 ? 4 : 2; }

float load(const void* p, DType t, int64_t i) {
  if (t == DType::kFloat32) return static_cast<const float*>(p)[i];
  if (t == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return __half2float(static_cast<const __half*>(p)[i]);
}

void store(void* p, DType t, int64_t i, float v) {
  const bool nan = v != v;
  if (t == DType::kFloat32) {
    static_cast<float*>(p)[i] = nan ? float_from_bits(kNanFloat32) : v;
  } else if (t == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(p)[i] =
        nan ? __ushort_as_bfloat16(kNanBFloat16) : __float2bfloat16_rn(v);
  } else {
    static_cast<__half*>(p)[i] = nan ? __ushort_as_half(kNanFloat16) : __float2half_rn(v);
  }
}

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
};

void run_case(Outcome& outcome, Run run, const char* name, Kind ka, Kind kb, bool ragged_k,
              int64_t m, int64_t n, int64_t k, int64_t groups, bool hostile) {
  const int64_t misalign = rng() % 5 == 0, a_rows = ragged_k ? m : rng() % 2 ? m : m / 2 + 1;
  const bool gather = !ragged_k && (a_rows != m || rng() % 2);
  Matrix a(1, a_rows, k, ka, rng() % 2 ? 8 : 0, misalign);
  Matrix b(ragged_k ? 1 : groups, n, k, kb, 0, misalign);
  Buffer offs(groups * 4), from(m * 4), to(m * 4), gamma(m * 4), alpha(groups * 4),
      bias(groups * n * 4);
  const int64_t end = ragged_k ? k : m, unit = ragged_k ? kBlockSize : 1;
  std::vector<int64_t> ends(groups);
  for (auto& e : ends) e = rng() % (end / unit + 1) * unit;
  std::sort(ends.begin(), ends.end());
  for (int64_t e = 0; e < groups; ++e) {
    if (hostile) ends[e] = static_cast<int32_t>(rng()) >> (rng() % 32);
    offs.as<int32_t>()[e] = static_cast<int32_t>(ends[e]);
  }
  for (int64_t i = 0; i < m; ++i) {
    from.as<int32_t>()[i] = static_cast<int32_t>(hostile ? rng() : rng() % a_rows);
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
  if (!run(p)) return;
  ++outcome.cases;
  if (hostile) return;  // that it came back is the test

  std::vector<double> want(out_rows * n, 0.0), bound(out_rows * n, 0.0);
  for (int64_t e = 0; e < groups; ++e) {
    const int64_t begin = e ? ends[e - 1] : 0;
    const int64_t rows = ragged_k ? m : ends[e] - begin;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t problem_row = ragged_k ? i : begin + i;
      const int64_t source = gather ? from.as<int32_t>()[problem_row] : problem_row;
      const int64_t target = ragged_k    ? e * m + i
                             : p.scatter ? to.as<int32_t>()[problem_row]
                                         : problem_row;
      if (target < 0) continue;
      const double factor = p.group_alpha ? alpha.as<float>()[e] : p.alpha.value;
      const double g = p.gamma ? p.gamma[problem_row] : 1.0;
      for (int64_t c = 0; c < n; ++c) {
        double sum = 0, magnitude = 0;
        for (int64_t x = ragged_k ? begin : 0; x < (ragged_k ? ends[e] : k); ++x) {
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
  if (!wrong) return;
  if (outcome.failed++ < 8) {
    std::printf(
        "  %s: a=%d b=%d ragged_k=%d m=%lld n=%lld k=%lld e=%lld gather=%d scatter=%d "
        "misalign=%d: %lld wrong, first (%lld, %lld): %g, expected %g\n",
        name, ka, kb, ragged_k, (long long)m, (long long)n, (long long)k, (long long)groups, gather,
        p.scatter != nullptr, (int)misalign, (long long)wrong, (long long)(first / n),
        (long long)(first % n), load(out.data(), p.out_type, first), want[first]);
  }
}

constexpr int64_t kShapes[][4] = {
    {1, 1, 16, 1},     {5, 8, 48, 3},     {40, 24, 96, 4}, {150, 136, 256, 3}, {300, 130, 80, 2},
    {64, 300, 144, 5}, {70, 40, 608, 70}, {33, 8, 0, 2},   {20, 16, 64, 1100}, {9, 264, 1056, 2},
};

int report(const char* name, const Outcome& outcome) {
  std::printf("%-18s %6ld cases %4ld failed\n", name, outcome.cases, outcome.failed);
  return outcome.failed || !outcome.cases;
}

int test_general() {
  Outcome outcome;
  const Run run = [](const GroupedGemmParams& p) {
    cuda::grouped_general(p, nullptr);
    return true;
  };
  for (const auto& [m, n, k, e] : kShapes) {
    for (int ka = 0; ka < kKinds; ++ka) {
      for (int kb = 0; kb < kKinds; ++kb) {
        if (ka >= kBf16 && kb >= kBf16 && ka != kb) continue;
        if (m * n > 4000 && rng() % 3) continue;  // slow
        if (quick && (m * n * k > 1500000 || rng() % 6)) continue;
        for (const bool ragged_k : {false, true}) {
          if (ragged_k && e > 100) continue;
          const auto one = [&](bool hostile) {
            run_case(outcome, run, "general", Kind(ka), Kind(kb), ragged_k, m, n, k, e, hostile);
          };
          one(false);
          if (rng() % 4 == 0) one(true);
        }
      }
    }
  }
  return report("grouped_general", outcome);
}

// Kernels for a dense A and packed weights with swizzled scales.
int test_dense_a(const char* name, Run run) {
  Outcome outcome;
  constexpr int64_t kShapes[][4] = {{1, 1, 32, 1},     {5, 8, 96, 3},      {40, 24, 128, 4},
                                    {70, 136, 256, 3}, {130, 264, 160, 2}, {64, 300, 416, 9},
                                    {33, 8, 1056, 2},  {20, 16, 64, 600},  {300, 520, 64, 2},
                                    {9, 600, 640, 2},  {80, 72, 544, 20}};
  for (const auto& [m, n, k, e] : kShapes) {
    for (const Kind ka : {kBf16, kFp16}) {
      for (int i = 0; i < 3; ++i) {
        if (quick && (m * n * k > 3000000 || rng() % 3)) continue;
        run_case(outcome, run, name, ka, kSwizzled, false, m, n, k, e, i == 2);
      }
    }
  }
  return report(name, outcome);
}

template <int kRows>
bool run_wgmma(const GroupedGemmParams& p) {
  if (!cuda::grouped_small_m_takes(p)) return false;
  cuda::grouped_wgmma(p, kRows, nullptr);
  for (const auto& barrier : emulator::named) {
    if (barrier.arrived == 0) continue;
    std::printf("  a named barrier is left half full\n");
    return false;
  }
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
  for (const char* name : {"small", "wgmma", "general"}) any = any || named(name);
  const auto wanted = [&](const char* name) { return !any || named(name); };
  int failed = 0;
  if (wanted("small")) {
    failed += test_dense_a("small_m 8", run_small<8>);
    failed += test_dense_a("small_m 16", run_small<16>);
    failed += test_dense_a("small_m 32", run_small<32>);
    failed += test_dense_a("small_m 64", run_small<64>);
  }
  if (wanted("wgmma")) {
    failed += test_dense_a("wgmma 64", run_wgmma<64>);
    failed += test_dense_a("wgmma 128", run_wgmma<128>);
  }
  if (wanted("general")) failed += test_general();
  return failed;
}
