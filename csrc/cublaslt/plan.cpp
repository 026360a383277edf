#include "plan.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "faults.h"
#include "operation.h"

namespace nvfp4::cublaslt {
namespace {

// Enough to get past the answers that a known fault or a retirement rules out.
constexpr int kHeuristicAnswers = 8;
// Where M is the number of tokens it takes many values. A plan is about a kilobyte.
constexpr size_t kMaxPlans = 1 << 14;

// All that a plan depends on. The library's version is not in it: a planner has one library. Nor
// are pins and policy: a change of either forgets every plan.
using Key = std::array<int64_t, 16>;

Key key_of(const Problem& p) {
  return {p.device.index,
          p.device.cc_major,
          p.device.cc_minor,
          p.device.sm_count,
          static_cast<int64_t>(p.type),
          p.m,
          p.n,
          p.k,
          p.lda,
          p.ldb,
          p.ldd,
          static_cast<int64_t>(p.out) * 4 + (p.bias ? 1 + static_cast<int64_t>(*p.bias) : 0),
          static_cast<int64_t>(p.alpha),
          p.alignment,
          static_cast<int64_t>(p.workspace_limit),
          p.skip_pins};
}

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0;
    for (const int64_t number : key) {
      hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

std::string multiple_of(const char* what, int64_t value, int64_t unit) {
  return std::string(what) + " = " + std::to_string(value) + " is not a multiple of " +
         std::to_string(unit);
}

// The bias types cuBLASLt documents for each output; a wrong one would be read as another type.
OutType expected_bias(const Problem& problem) {
  const bool narrow = problem.type == ElementType::kNvfp4 || problem.type == ElementType::kFp8E4m3;
  return narrow && problem.out == OutType::kFp32 ? OutType::kBf16 : problem.out;
}

// What cuBLASLt needs of a problem. Until 13.3.0 it didn't look itself, and read out of bounds.
std::string malformed(const Problem& p) {
  if (p.m < 1 || p.n < 1 || p.k < 1) return "m, n and k must be at least 1";
  if (p.lda < p.k || p.ldb < p.k || p.ldd < p.n) {
    return "leading dimensions must be at least k, k and n, got " + std::to_string(p.lda) + ", " +
           std::to_string(p.ldb) + ", " + std::to_string(p.ldd);
  }
  if (p.bias && *p.bias != expected_bias(p)) {
    return std::string("bias must be ") + name(expected_bias(p)) + " for " + name(p.type) +
           " with output " + name(p.out) + ", got " + name(*p.bias);
  }
  const int64_t out_bytes = bytes(p.out);
  if (p.type == ElementType::kBf16 || p.type == ElementType::kFp16) {
    const int64_t element = std::max<int64_t>(2, out_bytes);
    if (p.alignment < element) {
      return "pointers are on " + std::to_string(p.alignment) + "-byte boundaries, elements take " +
             std::to_string(element);
    }
    return "";
  }
  const int64_t unit = p.type == ElementType::kNvfp4 ? 32 : 16;  // elements in 16 bytes
  if (p.k % unit != 0) return multiple_of("k", p.k, unit);
  if (p.lda % unit != 0) return multiple_of("lda", p.lda, unit);
  if (p.ldb % unit != 0) return multiple_of("ldb", p.ldb, unit);
  for (const auto& [what, extent] : {std::pair{"n", p.n}, std::pair{"ldd", p.ldd}}) {
    if (extent * out_bytes % 16 != 0) {
      return std::string(what) + " = " + std::to_string(extent) + " is " +
             std::to_string(extent * out_bytes) + " bytes of " + name(p.out) +
             ", not a multiple of 16";
    }
  }
  if (p.alignment < 16) {
    return "a, b, their scales, bias and d must be on 16-byte boundaries, got " +
           std::to_string(p.alignment);
  }
  return "";
}

struct Retired {
  Algorithm algorithm;
  std::string reason;
};

void refuse(Plan* plan, const char* rung, const std::string& reason, const Problem& problem) {
  plan->refusals.push_back({rung, reason + " (" + shape_text(problem) + ")"});
}

void take(Plan* plan, const char* rung, const Answer& answer) {
  plan->rung = rung;
  plan->algorithm = answer.algorithm;
  plan->workspace_bytes = answer.workspace_bytes;
  plan->waves = answer.waves;
  plan->executable = answer.executable;
}

}  // namespace

struct Planner::State {
  // Held while planning too: two threads that meet the same new problem ask cuBLASLt once.
  std::mutex mutex;
  Loaded loaded;
  PinPolicy policy;
  std::atomic<uint64_t> generation{0};  // added to once a change is made, with the mutex held
  int64_t heuristic_queries = 0;
  std::vector<Pin> user_pins;  // newest first
  std::map<int, Handle> handles;
  std::unordered_map<Key, std::shared_ptr<const Plan>, Hash> plans;
  std::unordered_map<Key, std::vector<Retired>, Hash> retired;

  // Why no rung can take this problem; empty where one may. `*transient` where asking again later
  // may get another answer.
  std::string impossible(const Problem& problem, bool* transient) {
    if (!loaded.library) return loaded.reason;
    std::string reason = malformed(problem);
    if (reason.empty()) reason = known_fault(problem, nullptr, loaded.library->version);
    if (!reason.empty() || handles.count(problem.device.index)) return reason;
    try {
      handles[problem.device.index] = make_handle(*loaded.library);
      return "";
    } catch (const CallFailed& failure) {
      *transient = true;  // memory may be free, or the driver there, the next time
      return failure.what();
    }
  }

  // Throws CallFailed, and std::invalid_argument where the problem can't be asked about.
  Operation operation(const Problem& problem) {
    bool transient = false;
    const std::string reason = impossible(problem, &transient);
    if (!reason.empty()) throw CallFailed(reason, "");
    return Operation(loaded.library, handles.at(problem.device.index), problem);
  }

  const std::string* retirement(const Key& key, const Algorithm& algorithm) const {
    const auto found = retired.find(key);
    if (found == retired.end()) return nullptr;
    for (const Retired& one : found->second) {
      if (one.algorithm == algorithm) return &one.reason;
    }
    return nullptr;
  }

  void ask_pins(const Operation& operation, const Problem& problem, const Key& key, Plan* plan) {
    if (problem.skip_pins) return refuse(plan, kPinnedRung, "the caller skips pins", problem);
    if (policy == PinPolicy::kNever) {
      return refuse(plan, kPinnedRung, "pin policy is never", problem);
    }
    std::vector<Pin> pins = user_pins;
    pins.push_back(studied_pin());
    bool any = false;
    for (const Pin& pin : pins) {
      const Match match = cublaslt::match(pin, problem, loaded.library->version, policy);
      if (match.other_problem) continue;
      any = true;
      if (!match.reason.empty()) {
        refuse(plan, kPinnedRung, match.reason, problem);
        continue;
      }
      const Answer answer = operation.check(pin.algorithm);
      const std::string* launch = retirement(key, answer.algorithm);
      if (answer.ok() && !launch) {
        take(plan, kPinnedRung, answer);
        plan->evidence = pin.evidence;
        return;
      }
      refuse(plan, kPinnedRung, launch ? "retired: " + *launch : answer.reason, problem);
    }
    if (!any) {
      refuse(plan, kPinnedRung,
             "none of " + std::to_string(pins.size()) + " pins is for " + name(problem.type) +
                 " problems of this shape",
             problem);
    }
  }

  void ask_heuristic(const Operation& operation, const Problem& problem, const Key& key,
                     Plan* plan) {
    std::string reason;
    ++heuristic_queries;
    for (const Answer& answer : operation.heuristic(kHeuristicAnswers, &reason)) {
      const std::string* launch = retirement(key, answer.algorithm);
      if (answer.ok() && !launch) return take(plan, kHeuristicRung, answer);
      refuse(plan, kHeuristicRung, launch ? "retired: " + *launch : answer.reason, problem);
    }
    if (!reason.empty()) refuse(plan, kHeuristicRung, reason, problem);
  }

  std::shared_ptr<const Plan> make(const Problem& problem, const Key& key, bool* transient) {
    auto plan = std::make_shared<Plan>();
    std::string reason = impossible(problem, transient);
    if (reason.empty()) {
      try {
        const Operation operation = this->operation(problem);
        ask_pins(operation, problem, key, plan.get());
        if (!plan->ok()) ask_heuristic(operation, problem, key, plan.get());
      } catch (const CallFailed& failure) {
        reason = failure.what();
      }
    }
    if (!reason.empty()) {
      for (const char* rung : {kPinnedRung, kHeuristicRung}) {
        refuse(plan.get(), rung, reason, problem);
      }
    }
    return plan;
  }
};

Planner::Planner(const std::string& library_path, PinPolicy policy)
    : state_(std::make_unique<State>()) {
  state_->loaded = load_library(library_path);
  state_->policy = policy;
}

Planner::~Planner() = default;

std::shared_ptr<const Plan> Planner::plan(const Problem& problem) {
  const Key key = key_of(problem);
  std::lock_guard<std::mutex> lock(state_->mutex);
  const auto found = state_->plans.find(key);
  if (found != state_->plans.end()) return found->second;
  bool transient = false;
  auto plan = state_->make(problem, key, &transient);
  if (transient) {
    ++state_->generation;
    return plan;
  }
  if (state_->plans.size() >= kMaxPlans) state_->plans.clear();
  state_->plans.emplace(key, plan);
  return plan;
}

std::shared_ptr<const Plan> Planner::cached(const Problem& problem) const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const auto found = state_->plans.find(key_of(problem));
  return found == state_->plans.end() ? nullptr : found->second;
}

void Planner::retire(const Problem& problem, const Plan& plan, const std::string& reason) {
  const Key key = key_of(problem);
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (!state_->retirement(key, plan.algorithm)) {
    state_->retired[key].push_back({plan.algorithm, reason});
  }
  state_->plans.erase(key);
  ++state_->generation;
}

void Planner::clear() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->plans.clear();
  state_->retired.clear();
  ++state_->generation;
}

void Planner::reset(PinPolicy policy) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->plans.clear();
  state_->retired.clear();
  state_->user_pins.clear();
  state_->policy = policy;
  ++state_->generation;
}

void Planner::pin(const Pin& pin) {
  const size_t version = state_->loaded.library ? state_->loaded.library->version : CUBLAS_VERSION;
  const std::string reason = out_of_range(pin.algorithm, version);
  if (!reason.empty()) throw std::invalid_argument("pin: " + reason);
  unpin(pin);
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->user_pins.insert(state_->user_pins.begin(), pin);
  state_->plans.clear();
  ++state_->generation;
}

bool Planner::unpin(const Pin& pin) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  auto& pins = state_->user_pins;
  const auto found = std::find(pins.begin(), pins.end(), pin);
  if (found == pins.end()) return false;
  pins.erase(found);
  state_->plans.clear();
  ++state_->generation;
  return true;
}

std::vector<Pin> Planner::pins() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::vector<Pin> pins = state_->user_pins;
  pins.push_back(studied_pin());
  return pins;
}

PinPolicy Planner::policy() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->policy;
}

void Planner::set_policy(PinPolicy policy) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->policy = policy;
  state_->plans.clear();
  ++state_->generation;
}

Answer Planner::check(const Problem& problem, const Algorithm& algorithm) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  try {
    return state_->operation(problem).check(algorithm);
  } catch (const CallFailed& failure) {
    Answer refused;
    refused.algorithm = algorithm;
    refused.status = failure.status;
    refused.reason = failure.what();
    return refused;
  }
}

std::vector<Answer> Planner::heuristic(const Problem& problem, int count, std::string* reason) {
  if (count < 1)
    throw std::invalid_argument("count must be at least 1, got " + std::to_string(count));
  std::lock_guard<std::mutex> lock(state_->mutex);
  try {
    const Operation operation = state_->operation(problem);
    ++state_->heuristic_queries;
    return operation.heuristic(count, reason);
  } catch (const CallFailed& failure) {
    *reason = failure.what();
    return {};
  }
}

std::vector<int> Planner::algorithm_ids(const Problem& problem, std::string* reason) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  try {
    return state_->operation(problem).algorithm_ids();
  } catch (const CallFailed& failure) {
    *reason = failure.what();
    return {};
  }
}

Capabilities Planner::capabilities(const Problem& problem, int algorithm_id, std::string* reason) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  try {
    return state_->operation(problem).capabilities(algorithm_id);
  } catch (const CallFailed& failure) {
    *reason = failure.what();
    return {};
  }
}

uint64_t Planner::generation() const { return state_->generation.load(std::memory_order_acquire); }

int64_t Planner::heuristic_queries() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->heuristic_queries;
}

const std::string& Planner::unavailable() const { return state_->loaded.reason; }

size_t Planner::version() const {
  return state_->loaded.library ? state_->loaded.library->version : 0;
}

const std::string& Planner::path() const {
  static const std::string none;
  return state_->loaded.library ? state_->loaded.library->path : none;
}

PinPolicy policy_from_environment() {
  const char* text = std::getenv("NVFP4_PIN_POLICY");
  return text && *text ? parse_policy(text) : PinPolicy::kValidated;
}

Planner& planner() {
  // Never destroyed: at exit the driver may be gone before cublasLtDestroy is called.
  static Planner* const instance = new Planner("", policy_from_environment());
  return *instance;
}

std::string to_text(const std::vector<Refusal>& refusals) {
  std::string text;
  for (const Refusal& refusal : refusals) {
    text += (text.empty() ? "" : "; ") + refusal.rung + ": " + refusal.reason;
  }
  return text;
}

}  // namespace nvfp4::cublaslt
