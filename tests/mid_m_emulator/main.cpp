// Runs gemm_mid_m of csrc/cuda on the emulator and compares it with a plain FP64 loop.
//
// Every kind of A, ragged sizes, tiles in one piece and in several, NaN scales; memory ends at a
// page that can't be read. Also the plans of many problems. Returns the number of failures.

#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/mid_m_plan.h"

// Its scheduler is needed here, for barriers.
#include "../cuda_emulator/emulator.cpp"
#include "../cuda_emulator/fused_case.h"
#include "../cuda_emulator/shared_barriers.h"

namespace emulator {

Barrier named[2][16];  // by block of a cluster

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

}  // namespace emulator

using namespace nvfp4;

namespace {

bool run_case(int64_t m, int64_t n, int64_t k, int kind, int sms, bool nan_rows,
              emulator::Machine::Order order) {
  const cuda::MidMPlan plan = cuda::plan_mid_m(m, n, k, sms);
  emulator::machine.index = emulator::machine.sm_count = sms;
  emulator::machine.order = order;
  FusedCase problem(m, n, k, kind, 0, 0x7F, nan_rows);
  Buffer workspace(cuda::mid_m_workspace(plan));
  cuda::gemm_mid_m(problem.p, workspace.data(), nullptr);
  int64_t wrong = problem.wrong();
  // Who adds up a tile's pieces depends on what its blocks see of each other; the bytes do not.
  if (wrong == 0 && plan.workers.value != plan.tiles) {
    const auto before = problem.new_out();
    cuda::gemm_mid_m(problem.p, workspace.data(), nullptr);
    if (std::memcmp(before->data(), problem.out->data(), before->size()) != 0) {
      std::printf("  another run gives other bytes\n");
      ++wrong;
    }
  }
  if (wrong == 0) return true;
  std::printf(
      "gemm_mid_m: %ld of %ld wrong: m=%ld n=%ld k=%ld kind=%d sms=%d rows=%d workers=%d out=%d\n",
      long(wrong), long(m * n), long(m), long(n), long(k), kind, sms, plan.rows, plan.workers.value,
      static_cast<int>(problem.p.out_type));
  return false;
}

// What every plan must be: the pieces cover all chunks, and worker_of finds them.
bool check_plan(int64_t m, int64_t n, int64_t k, int sms) {
  const cuda::MidMPlan p = cuda::plan_mid_m(m, n, k, sms);
  const auto wrong = [&](const char* what) {
    std::printf(
        "plan_mid_m: %s: m=%ld n=%ld k=%ld sms=%d rows=%d tiles=%d chunks=%d finish=%d "
        "workers=%d\n",
        what, long(m), long(n), long(k), sms, p.rows, p.tiles, p.chunks.value, p.finish,
        p.workers.value);
    return false;
  };
  if (!p.ok()) return wrong("no plan");
  if (p.workers.value > sms && p.workers.value > 1)
    return wrong("more workers than multiprocessors");
  if (int64_t{p.rows} * p.m_tiles.value < m) return wrong("rows of A are missing");
  if (p.tiles / p.m_tiles.value * int64_t{cuda::kMidMTileN} < n)
    return wrong("rows of B are missing");
  if (int64_t{p.chunks.value} * cuda::kMidMChunkK < k) return wrong("some of k is missing");
  if (p.begin(0) != 0 || p.begin(p.workers.value) != p.tiles * p.chunks.value)
    return wrong("the ends");
  for (int w = 0; w < p.workers.value; ++w) {
    const int from = p.begin(w), to = p.begin(w + 1);
    if (to < from) return wrong("a piece ends before it begins");
    for (const int chunk : {from, to - 1}) {
      if (from < to && p.worker_of(chunk / p.chunks.value, chunk % p.chunks.value) != w)
        return wrong("worker_of");
    }
  }
  return true;
}

}  // namespace

int main() {
  int failed = 0;
  for (const int divisor : {1, 2, 3, 7, 112, 131, 132, 65536, 16777213, INT32_MAX}) {
    const cuda::MidMDivisor by(divisor);
    for (int i = 0; i < 1000; ++i) {
      // Both sides of multiples, and the ends.
      const int64_t multiple = INT32_MAX / divisor * int64_t{i} / 999 * divisor;
      for (const int64_t x : {multiple - 1, multiple, multiple + 1, int64_t{INT32_MAX}}) {
        if (x < 0 || x > INT32_MAX || by.divide(static_cast<int>(x)) == x / divisor) continue;
        std::printf("MidMDivisor: %ld / %d\n", long(x), divisor);
        ++failed;
      }
    }
  }
  for (const int sms : {1, 2, 7, 48, 132}) {
    for (const int64_t m : {1, 33, 64, 65, 128, 129, 256, 300, 384, 512, 2048}) {
      for (const int64_t n : {1, 77, 128, 129, 4096, 5376, 28672}) {
        for (const int64_t k : {32, 160, 4096, 14336, 28672}) failed += !check_plan(m, n, k, sms);
      }
    }
  }
  if (cuda::plan_mid_m(2048, int64_t{1} << 24, 14336, 132).ok()) {
    std::printf("plan_mid_m: a problem too large for 32 bits has a plan\n");
    ++failed;
  }
  const struct {
    int64_t m, n, k;
    int sms;
  } cases[] = {{33, 300, 672, 2},
               {33, 40, 32, 1},
               {65, 140, 160, 2},
               {100, 300, 672, 2},
               {70, 20, 1312, 5},
               {180, 300, 416, 2},
               {250, 300, 288, 2},
               {257, 24, 640, 1},
               {500, 77, 160, 2},
               // Tiles of three, four and eight pieces, and of pairs.
               {33, 40, 1312, 3},
               {40, 40, 1312, 4},
               {40, 24, 1312, 8},
               {65, 24, 1952, 3},
               {180, 24, 3872, 3},
               {250, 24, 3872, 3},
               {65, 24, 160, 4},
               {65, 24, 1312, 2},
               {180, 24, 1952, 2}};
  using Machine = emulator::Machine;
  int kind = 0;
  for (const auto& c : cases) {
    for (const auto order : {Machine::kForwards, Machine::kBackwards}) {
      const bool nan_rows = order == Machine::kBackwards;
      failed += !run_case(c.m, c.n, c.k, kind++ % kKinds, c.sms, nan_rows, order);
    }
  }
  // The middle one of three workers leaves sums of two tiles.
  failed += !run_case(33, 200, 3872, kPacked, 3, false, Machine::kOddFirst);
  std::printf("gemm_mid_m: %d failed\n", failed);
  return failed;
}
