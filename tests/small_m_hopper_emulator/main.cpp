// Runs gemm_small_m_hopper of csrc/cuda on the emulator and compares it with a plain FP64 loop.
//
// Every kind of A and every kernel, ragged sizes, padding of scales that is NaN, NaN scales and
// infinities that must stay in their row, machines whose planner takes one block or clusters;
// memory ends at a page that can't be read. Returns the number of failures.

#include <cmath>
#include <cstdio>
#include <iterator>
#include <set>
#include <tuple>

#include "cuda/small_m_hopper_plan.h"

// Its scheduler is needed here, for barriers.
#include "../cuda_emulator/emulator.cpp"
#include "../cuda_emulator/fused_case.h"
#include "../cuda_emulator/shared_barriers.h"

namespace emulator {

int cluster_index() { return static_cast<int>(current->block->index.x / blocks.size()); }

}  // namespace emulator

using namespace nvfp4;

namespace {

bool run_case(int64_t m, int64_t n, int64_t k, int kind, bool nan_rows) {
  FusedCase problem(m, n, k, kind, rng() % 3, 0x60, nan_rows);  // rows of A are skipped
  cuda::gemm_small_m_hopper(problem.p, nullptr);
  const int64_t wrong = problem.wrong();
  if (wrong == 0) return true;
  std::printf("%ld of %ld wrong: m=%ld n=%ld k=%ld kind=%d sms=%d out=%d\n", long(wrong),
              long(m * n), long(m), long(n), long(k), kind, emulator::machine.sm_count,
              static_cast<int>(problem.p.out_type));
  return false;
}

}  // namespace

int main() {
  int failed = 0;
  std::set<std::tuple<int, int, int>> plans;
  std::set<int> strips, tiles_of_clusters;
  const int64_t shapes[][3] = {{1, 1, 32},     {3, 130, 96},   {8, 129, 1312}, {11, 40, 800},
                               {16, 390, 544}, {17, 257, 288}, {32, 20, 2080}, {40, 130, 96},
                               {100, 20, 544}, {5, 300, 1568}, {9, 140, 2336}, {20, 390, 800}};
  for (const auto& [m, n, k] : shapes) {
    for (int kind = 0; kind < kKinds; ++kind) {
      for (const int sms : {1, 8}) {
        emulator::machine.index = emulator::machine.sm_count = sms;
        cuda::HopperDevice device = {{0, sms}};
        for (int c = 2; c <= cuda::kHopperMaxCluster; ++c) device.resident[c] = 2 * sms / c * c;
        const cuda::HopperPlan plan = cuda::plan_hopper(m, n, k, kind == kPacked, device);
        plans.insert({cuda::hopper_tiles(m), plan.strips, plan.cluster});
        strips.insert(plan.strips);
        if (plan.cluster > 1) tiles_of_clusters.insert(cuda::hopper_tiles(m));
        failed += !run_case(m, n, k, kind, (m + sms) % 3 == 0);
      }
    }
  }
  for (const auto& [tiles, beside, cluster] : plans) {
    std::printf(" %d:%dx%d", 8 * tiles, beside, cluster);
  }
  std::printf(" rows: strips x cluster; gemm_small_m_hopper: %d failed\n", failed);
  // Every way of standing beside each other, and every way of sending sums.
  return failed + (strips.size() < std::size(cuda::kHopperStrips)) + (tiles_of_clusters.size() < 3);
}
