// Threads of the CPU backend: torch's own pool, so torch.set_num_threads() means what it says.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace nvfp4::cpu {

// f(begin, end) over [0, count), split so that no thread gets less than `grain` unless it is all.
template <typename F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
  torch::stable::parallel_for(0, count, grain < 1 ? 1 : grain, f);
}

constexpr int64_t kGrainElements = 1 << 15;  // work worth a thread: some tens of microseconds

}  // namespace nvfp4::cpu
