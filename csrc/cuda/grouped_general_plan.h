// How grouped_gemm's general kernel sizes its ring of stages: a host function that owns its
// default.
//
// A block's shared memory is the schedule and the tile's rows, then the ring, where the sums go
// once the tile is done.
#pragma once

#include <algorithm>
#include <cstddef>

namespace nvfp4::cuda {

constexpr int kGeneralTile = 128;  // rows of either side
constexpr int kGeneralStepK = 64;
constexpr int kGeneralPitch = kGeneralTile + 4;  // of the sums
constexpr size_t kGeneralFixedBytes = 6144;      // schedule and rows
constexpr size_t kGeneralStageBytes = size_t{2} * kGeneralTile * kGeneralStepK * 2;
constexpr size_t kGeneralSumsBytes = size_t{kGeneralTile} * kGeneralPitch * sizeof(float);
constexpr size_t kSystemBytes = 1024;  // of each resident block's shared memory

constexpr int kLeastStages = 2;  // one is filled while another is read
constexpr int kMostStages = 3;   // of a default: what hides the latency of a step
// What a planner that takes shared memory to be endless asks for, whatever the GPU.
constexpr int kUncappedStages = 16;

struct GeneralDevice {
  size_t shared_per_block;  // bytes, with the opt-in
  size_t shared_per_sm;
};

struct GeneralPlan {
  int stages, blocks_per_sm;
  size_t shared_bytes;
};

constexpr size_t general_bytes(int stages) {
  return kGeneralFixedBytes +
         std::max(kGeneralSumsBytes, static_cast<size_t>(std::max(stages, 0)) * kGeneralStageBytes);
}

inline GeneralPlan general_with(int stages, const GeneralDevice& device) {
  const size_t bytes = general_bytes(stages);
  return {stages, 2 * (bytes + kSystemBytes) <= device.shared_per_sm ? 2 : 1, bytes};
}

// The deepest ring that pays and that the GPU holds.
inline GeneralPlan plan_general(const GeneralDevice& device) {
  int stages = kMostStages;
  while (stages > kLeastStages && general_bytes(stages) > device.shared_per_block) --stages;
  return general_with(stages, device);
}

}  // namespace nvfp4::cuda
