// What tests/test_matrix.py switches: deliberate faults, to see its matrix fail (the negative
// controls), and choices that a CUDA planner is told to take. Nothing else sets any of it; with
// none set, asking costs one relaxed load.
//
// Set through `_control`, see control.h. Faults of what lives in Python are made there.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace nvfp4 {

enum class Fault {
  kNone,
  kGatherIgnored,    // row i of the problem is a's row i
  kScatterIgnored,   // every result stays in its own row
  kRowsNotZeroed,    // rows that nobody wrote keep what memory held
  kStalePadding,     // a slice of K is read on to the end of its last tile of scales
  kPlannerUncapped,  // CUDA planners take shared memory to be endless
  kCount,
};

// By value.
inline constexpr std::array<const char*, static_cast<std::size_t>(Fault::kCount)> kFaultNames = {
    "none",          "gather-ignored",   "scatter-ignored", "rows-not-zeroed",
    "stale-padding", "planner-uncapped",
};

inline std::atomic<Fault> active_fault{Fault::kNone};

inline bool has_fault(Fault fault) { return active_fault.load(std::memory_order_relaxed) == fault; }

// A tile in the stead of a CUDA planner's own: of gemm_small_m and, the stages, of grouped_gemm's
// general kernel. All 0: their own.
struct ExplicitTile {
  int16_t strips = 0, k_warps = 0, cluster = 0;
  int16_t stages = 0;
};
static_assert(std::atomic<ExplicitTile>::is_always_lock_free);

inline std::atomic<ExplicitTile> explicit_tile{};

}  // namespace nvfp4
