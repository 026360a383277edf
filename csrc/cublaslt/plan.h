// From a problem to a launch: pin → AlgoInit → every attribute → AlgoCheck → else the heuristic →
// else a list of refusals. Plans are made once per problem and looked up afterwards.
//
// Neither torch nor the CUDA runtime is used here. The caller has made `problem.device` the current
// device before `plan` and before `run`: the cuBLASLt handle of a device is created on first use
// and belongs to it.

#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "algorithm.h"
#include "pins.h"
#include "problem.h"

namespace nvfp4::cublaslt {

struct Executable;  // cuBLASLt's side of a plan: handle, layouts, algorithm

// Immutable. Shared between threads and kept alive by whoever runs it.
struct Plan {
  std::string rung;     // kPinnedRung, kHeuristicRung; empty where every rung refused
  Algorithm algorithm;  // all nine attributes, as read back
  size_t workspace_bytes = 0;
  float waves = 0;                // cuBLASLt's estimate: 1 fills the GPU once
  std::string evidence;           // of the pin that was taken
  std::vector<Refusal> refusals;  // in the order the rungs were asked
  std::shared_ptr<const Executable> executable;

  bool ok() const { return executable != nullptr; }
};

// cuBLASLt's word on one algorithm.
struct Answer {
  std::string status;   // CUBLAS_STATUS_…: of the call or, where that succeeded, of its result
  std::string reason;   // why it can't be taken; empty where it can
  Algorithm algorithm;  // as read back; as asked for where AlgoInit refused it
  size_t workspace_bytes = 0;
  float waves = 0;
  std::shared_ptr<const Executable> executable;  // null where there is a reason

  bool ok() const { return executable != nullptr; }
};

struct Operands {
  const void* a;        // (m, k), NVFP4: two codes a byte
  const void* b;        // (n, k)
  const void* a_scale;  // NVFP4: swizzled block scales. FP8: FP32 scalar or null. Else null.
  const void* b_scale;
  const void* bias;   // (n,), null where the problem has none
  const void* alpha;  // FP32, on the side that problem.alpha says
  const void* beta;   // FP32 zero, on the same side as alpha
  void* d;            // (m, n)
  void* workspace;    // 256-byte aligned; one per stream; null where the plan needs none
  size_t workspace_bytes;
};

// Enqueues D on `stream` (a cudaStream_t). Empty on success, else what cuBLASLt refused, with m, n,
// k: retire the plan. Operands that don't fit the plan are the caller's mistake, never the plan's:
// std::invalid_argument. Thread-safe: a plan may run on several streams at once.
std::string run(const Plan& plan, const Operands& operands, void* stream);

// An algorithm's capability attributes by name; tile_ids and stages_ids are lists, empty for the
// newer engines.
using Capabilities = std::vector<std::pair<std::string, std::vector<int64_t>>>;

class Planner {
 public:
  // `library_path` empty: NVFP4_CUBLASLT_LIBRARY where set, else what the loader finds.
  explicit Planner(const std::string& library_path = "", PinPolicy policy = PinPolicy::kValidated);
  ~Planner();

  // Never throws for a refusal: look at ok() and refusals.
  std::shared_ptr<const Plan> plan(const Problem& problem);
  // The plan if it is already there; never asks cuBLASLt. For callers that are capturing a graph.
  std::shared_ptr<const Plan> cached(const Problem& problem) const;
  // cuBLASLt refused to launch a plan that had passed its check: its algorithm is never tried again
  // for this problem, and the next `plan` goes on to the next one. Until `clear`.
  void retire(const Problem& problem, const Plan& plan, const std::string& reason);
  void clear();                  // forgets plans and retirements, keeps pins and policy
  void reset(PinPolicy policy);  // as constructed: forgets user pins too

  // The newest user pin is asked first, the studied pin last. Cached plans are made anew.
  void pin(const Pin& pin);  // std::invalid_argument where an attribute is out of range
  bool unpin(const Pin& pin);
  std::vector<Pin> pins() const;
  PinPolicy policy() const;
  void set_policy(PinPolicy policy);

  // For people who explore algorithms; nothing here is cached.
  Answer check(const Problem& problem, const Algorithm& algorithm);
  std::vector<Answer> heuristic(const Problem& problem, int count, std::string* reason);
  std::vector<int> algorithm_ids(const Problem& problem, std::string* reason);
  Capabilities capabilities(const Problem& problem, int algorithm_id, std::string* reason);

  // Changes whenever a plan that was given out may not be given again.
  uint64_t generation() const;

  int64_t heuristic_queries() const;  // ever made; a plan that is there makes none

  const std::string& unavailable() const;  // why there is no cuBLASLt; empty where there is
  size_t version() const;                  // cublasLtGetVersion, 0 where unavailable
  const std::string& path() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The process's own, with the policy of NVFP4_PIN_POLICY; std::invalid_argument where that has a
// value it doesn't know.
Planner& planner();
PinPolicy policy_from_environment();

// "cublaslt-pinned: …; cublaslt-heuristic: …"
std::string to_text(const std::vector<Refusal>& refusals);
// For explain: {"problem": {…}, "ok": …, "rung": …, "algorithm": {…}, "refusals": [{…}], …}
std::string plan_to_json(const Problem& problem, const Plan& plan);

}  // namespace nvfp4::cublaslt
