// Barriers in shared memory that count arrivals and bytes, as PTX's mbarrier does. Part of a test's
// program, after emulator.cpp, whose scheduler it drives.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <utility>

namespace emulator {

namespace {

// A phase is over when all have arrived and as many bytes as they have announced.
struct SharedBarrier {
  int arrivals = 0, left = 0, bytes = 0;
  Barrier phase;

  void check() {
    if (left > 0 || bytes != 0) return;
    left = arrivals;
    ++phase.generation;
  }
};
std::map<std::pair<int, uint32_t>, SharedBarrier> shared_barriers;

SharedBarrier& barrier_at(int rank, uint32_t address) {
  const auto found = shared_barriers.find({rank, address});
  if (found != shared_barriers.end()) return found->second;
  std::fprintf(stderr, "a barrier is used that nobody has initialized\n");
  std::abort();
}

}  // namespace

void init_barrier(uint32_t address, int arrivals) {
  shared_barriers[{cluster_rank(), address}] = {arrivals, arrivals, 0, {}};
}
// Others go first, or not: warps come to barriers in any order.
void dawdle() {
  static std::mt19937 turns(3);
  for (uint32_t n = turns() % 4; n > 0; --n) swapcontext(&current->context, &scheduler);
}
void arrive(int rank, uint32_t address, int bytes_expected) {
  dawdle();
  SharedBarrier& b = barrier_at(rank, address);
  b.bytes += bytes_expected;
  if (--b.left < 0) {
    std::fprintf(stderr, "a barrier got more arrivals than it expects\n");
    std::abort();
  }
  b.check();
}
void bytes_arrived(int rank, uint32_t address, int bytes) {
  SharedBarrier& b = barrier_at(rank, address);
  b.bytes -= bytes;
  b.check();
}
void wait_barrier(uint32_t address, uint32_t parity) {
  dawdle();
  SharedBarrier& b = barrier_at(cluster_rank(), address);
  while (static_cast<uint32_t>(b.phase.generation % 2) == parity) {
    current->waiting = &b.phase;
    current->generation = b.phase.generation;
    swapcontext(&current->context, &scheduler);
  }
}

}  // namespace emulator
