// Runs gemm_small_m_hopper of csrc/cuda on the emulator and compares it with a plain FP64 loop.
//
// Every kind of A and every kernel, ragged sizes, padding of scales that is NaN, NaN scales and
// infinities that must stay in their row, machines whose planner takes one block or clusters;
// memory ends at a page that can't be read. Returns the number of failures.

#include <cmath>
#include <cstdio>
#include <set>

#include "cuda/small_m_hopper_plan.h"

// Its scheduler is needed here, for barriers.
#include "../cuda_emulator/emulator.cpp"
#include "../cuda_emulator/operands.h"
#include "../cuda_emulator/shared_barriers.h"

namespace emulator {

int cluster_index() { return static_cast<int>(current->block->index.x / blocks.size()); }

}  // namespace emulator

using namespace nvfp4;

namespace {

uint32_t nan_of(DType t) {
  return t == DType::kFloat32 ? kNanFloat32 : t == DType::kBFloat16 ? kNanBFloat16 : kNanFloat16;
}

bool run_case(int64_t m, int64_t n, int64_t k, int kind, bool nan_rows) {
  const int64_t begin = rng() % 3, stride = k + 8;  // rows of A that are skipped
  Packed b(n, k, 0x60), packed_a(kind == kPacked ? begin + m : 0, k, 0x60);
  const DType a_type = kind == kFp16 ? DType::kFloat16 : DType::kBFloat16;
  Buffer dense(kind == kPacked ? 0 : ((begin + m - 1) * stride + k) * 2);
  for (int64_t r = 0; kind != kPacked && r < begin + m; ++r) {
    for (int64_t c = 0; c < k; ++c) {
      if (kind == kFp16) {
        dense.as<__half>()[r * stride + c] = __float2half_rn(uniform());
      } else {
        dense.as<__nv_bfloat16>()[r * stride + c] = __float2bfloat16_rn(uniform());
      }
    }
  }
  if (nan_rows) {
    b.scale.data()[swizzled_offset(n / 2, k / kBlockSize / 2, b.tiles)] = kE4m3Nan;
    if (kind == kPacked) {
      packed_a.scale.data()[swizzled_offset(begin + m / 2, 0, packed_a.tiles)] = kE4m3Nan;
    } else {  // infinity at the end of a row: must not meet zeros behind it
      dense.as<uint16_t>()[(begin + m / 2) * stride + k - 1] = kind == kFp16 ? 0x7C00 : 0x7F80;
    }
  }
  SmallMParams p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.b = b.data.data();
  p.b_scale = b.scale.data();
  p.a = kind == kPacked ? packed_a.data.data() : dense.data();
  if (kind == kPacked) p.a_scale = packed_a.scale.data();
  p.a_type = a_type;
  p.a_row_stride = stride;
  p.a_row_begin = begin;
  Buffer alpha(4), bias(n * 4);
  *alpha.as<float>() = 0.01f;
  if (rng() % 2) {
    p.alpha.device = alpha.as<float>();
  } else {
    p.alpha.value = 0.01f;
  }
  if (rng() % 2) {
    p.bias = bias.data();
    for (int64_t i = 0; i < n; ++i) bias.as<float>()[i] = uniform();
  }
  p.out_type = static_cast<DType>(rng() % 3);
  Buffer out(m * n * size_of(p.out_type));
  p.out = out.data();
  cuda::gemm_small_m_hopper(p, nullptr);

  int64_t wrong = 0;
  for (int64_t i = 0; i < m * n; ++i) {
    const int64_t row = i / n, col = i % n;
    double sum = 0, magnitude = 0;
    for (int64_t c = 0; c < k; ++c) {
      const double left = kind == kPacked ? packed_a.at(begin + row, c)
                                          : load(p.a, a_type, (begin + row) * stride + c);
      const double product = left * b.at(col, c);
      sum += product;
      magnitude += std::fabs(product);
    }
    const double want = double{0.01f} * sum + (p.bias ? bias.as<float>()[col] : 0.0f);
    const float got = load(out.data(), p.out_type, i);
    bool right;
    if (want != want) {
      const uint32_t nan = nan_of(p.out_type);
      right = std::memcmp(&nan, out.data() + i * size_of(p.out_type), size_of(p.out_type)) == 0;
    } else if (std::isinf(want)) {
      right = got == static_cast<float>(want);
    } else {
      const double ulp = p.out_type == DType::kFloat32   ? 0x1p-22
                         : p.out_type == DType::kFloat16 ? 0x1p-10
                                                         : 0x1p-7;
      const double allowed = 0.01f * magnitude * 0x1p-21 + ulp * std::fabs(want) + 1e-7;
      right = std::fabs(got - want) <= allowed ||
              (p.out_type == DType::kFloat16 && std::fabs(want) > 65000 && std::isinf(got));
    }
    if (!right && wrong++ == 0) {
      std::printf("  first: row %ld, column %ld: %g, not %g\n", long(row), long(col), got, want);
    }
  }
  if (wrong == 0) return true;
  std::printf("%ld of %ld wrong: m=%ld n=%ld k=%ld kind=%d sms=%d out=%d\n", long(wrong),
              long(m * n), long(m), long(n), long(k), kind, emulator::machine.sm_count,
              static_cast<int>(p.out_type));
  return false;
}

}  // namespace

int main() {
  int failed = 0;
  std::set<std::pair<int, int>> plans;
  const int64_t shapes[][3] = {{1, 1, 32},     {3, 130, 96},   {8, 129, 1312},
                               {11, 40, 800},  {16, 390, 544}, {17, 257, 288},
                               {32, 20, 2080}, {40, 130, 96},  {100, 20, 544}};
  for (const auto& [m, n, k] : shapes) {
    for (int kind = 0; kind < kKinds; ++kind) {
      for (const int sms : {1, 8}) {
        emulator::machine.index = emulator::machine.sm_count = sms;
        cuda::HopperDevice device = {{0, sms}};
        for (int c = 2; c <= cuda::kHopperMaxCluster; ++c) device.resident[c] = 2 * sms / c * c;
        const cuda::HopperPlan plan = cuda::plan_hopper(m, n, k, device);
        plans.insert({plan.row_groups, plan.cluster});
        failed += !run_case(m, n, k, kind, (m + sms) % 3 == 0);
      }
    }
  }
  for (const auto& [row_groups, cluster] : plans) std::printf(" %dx%d", row_groups, cluster);
  std::printf(" groups x cluster; gemm_small_m_hopper: %d failed\n", failed);
  return failed + (plans.size() < 4);
}
