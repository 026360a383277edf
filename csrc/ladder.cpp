#include "ladder.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include "check.h"
#include "cuda/mid_m_plan.h"
#include "cuda/small_m_hopper_plan.h"
#include "environment.h"
#include "faults_for_tests.h"
#include "nvfp4.h"
#include "recent.h"

namespace nvfp4 {
namespace {

using cublaslt::ElementType;
using cublaslt::kHeuristicRung;
using cublaslt::kPinnedRung;
using cublaslt::OutType;
using cublaslt::Plan;
using cublaslt::PointerMode;
using cublaslt::Problem;
using cublaslt::Refusal;

OutType out_type(DType type) {
  switch (type) {
    case DType::kBFloat16:
      return OutType::kBf16;
    case DType::kFloat16:
      return OutType::kFp16;
    default:
      return OutType::kFp32;
  }
}

Problem base_problem(const GemmRequest& r, ElementType type, int64_t m, int64_t n, bool epilogue) {
  Problem p{};
  p.type = type;
  p.m = m;
  p.n = n;
  p.k = r.k;
  p.lda = p.ldb = r.k;
  p.ldd = r.n;
  p.out = epilogue ? OutType::kFp32 : out_type(r.out_type);
  if (!epilogue && r.bias_type) p.bias = out_type(*r.bias_type);
  // A separate epilogue applies alpha itself; cuBLASLt gets 1 from the host.
  p.alpha = r.alpha_on_device && !epilogue ? PointerMode::kDevice : PointerMode::kHost;
  p.alignment = r.alignment;
  p.workspace_limit = kCublasltWorkspace;
  p.device = r.device;
  return p;
}

bool has_emulation(const cublaslt::DeviceInfo& device) {
  return kHasCudaKernels && device.cc_major >= 8;
}

// Rows of A to decode at a time, at most `most`: the ones with which the products take the fewest
// waves of tiles, counted in cuBLASLt's usual 128 x 256. On an H200, with 5376 columns, chunks of
// 3200 rows (3.98 waves) are 7 % faster in all than chunks of 2816 or 3328 (3.5 and 4.14).
int64_t choose_rows(int64_t m, int64_t n, int64_t most, int sm_count) {
  constexpr int64_t kRows = 128, kCols = 256;
  if (m <= most) return m;
  const auto waves = [&](int64_t rows) {
    const int64_t tiles = round_up(rows, kRows) / kRows * (round_up(n, kCols) / kCols);
    const int64_t sms = std::max(sm_count, 1);
    return round_up(tiles, sms) / sms;
  };
  int64_t best = most, best_waves = 0;
  // A chunk starts on a tile of scales.
  for (int64_t rows = most; rows >= std::max<int64_t>(most / 2, kTileRows); rows -= kTileRows) {
    const int64_t total = m / rows * waves(rows) + (m % rows ? waves(m % rows) : 0);
    if (best_waves != 0 && total >= best_waves) continue;
    best = rows;
    best_waves = total;
  }
  return best;
}

// Columns of B to decode at a time, at most `most`: as few parts as that allows, of one size where
// whole tiles allow it, so that no product is left with a narrow rest.
int64_t choose_columns(int64_t n, int64_t most) {
  constexpr int64_t kCols = 256;  // of cuBLASLt's usual tile
  const int64_t parts = (n + most - 1) / most;
  return std::min(round_up((n + parts - 1) / parts, kCols), std::min(n, most));
}

// Decoded B should stay whole (it is read once a chunk of A), and A fills what is left.
void choose_chunks(const GemmRequest& r, Route* route) {
  const int64_t row_bytes = 2 * r.k;
  const int64_t budget = kWorkspaceBudget - static_cast<int64_t>(kCublasltWorkspace);
  const auto rows_in = [&](int64_t bytes) {
    return std::max<int64_t>(bytes / row_bytes / kTileRows * kTileRows, kTileRows);
  };
  const int64_t b_share = r.dense_a ? budget : budget * 3 / 4;
  route->n_chunk = r.dense_b ? r.n : choose_columns(r.n, rows_in(b_share));
  const int64_t b_bytes = r.dense_b ? 0 : route->n_chunk * row_bytes;
  int64_t rows = rows_in(budget - b_bytes);
  if (route->separate_epilogue) {  // FP32 accumulators of a chunk, in the budget's stead of A
    const int64_t fit = (budget / 8) / (4 * route->n_chunk) / kTileRows * kTileRows;
    rows = std::min(r.dense_a ? r.m : rows, std::max<int64_t>(fit, kTileRows));
  } else if (r.dense_a) {
    rows = r.m;
  }
  route->m_chunk = choose_rows(r.m, route->n_chunk, rows, r.device.sm_count);
}

// What the fused kernels for Hopper ask for.
bool suits_hopper(const GemmRequest& r) {
  return kHasHopperKernels && !r.dense_b && r.device.cc_major == 9 && r.device.cc_minor == 0 &&
         r.k > 0 && r.k % (2 * kBlockSize) == 0 && r.alignment >= 16 &&
         (!r.dense_a || r.a_row_stride % 8 == 0);
}

bool hopper_pays(const GemmRequest& r) {
  static thread_local Recent<3, bool> found;
  return found.find({r.n, r.k, r.device.sm_count},
                    [&] { return cuda::hopper_pays(r.n, r.k, r.device.sm_count); });
}

// Explicit tiles, and the fault in a planner, are gemm_small_m's.
bool takes_small_m_hopper(const GemmRequest& r) {
  return cuda::hopper_slices_pay(r.m, r.n, r.device.sm_count) && suits_hopper(r) &&
         r.k < (int64_t{1} << 24) && hopper_pays(r) &&
         explicit_tile.load(std::memory_order_relaxed).strips == 0 &&
         !has_fault(Fault::kPlannerUncapped);
}

bool takes_mid_m(const GemmRequest& r) {
  return r.m <= cuda::kMidMMax && suits_hopper(r) &&
         cuda::find_mid_m(r.m, r.n, r.k, r.device.sm_count).ok();
}

void find_emulated(const GemmRequest& r, Route* route) {
  if (!has_emulation(r.device)) return;
  route->rung = kEmulatedRung;
  const DType decoded = r.dense_a || r.dense_b          ? r.dense_type
                        : r.out_type == DType::kFloat16 ? DType::kFloat16
                                                        : DType::kBFloat16;
  route->decoded_type = decoded == DType::kFloat16 ? ElementType::kFp16 : ElementType::kBf16;
  if (takes_small_m_hopper(r)) {
    route->kernel = EmulatedKernel::kSmallMHopper;
    return;
  }
  if (!r.dense_b && r.m <= cuda::kSmallMMax) {
    route->kernel = EmulatedKernel::kSmallM;
    return;
  }
  if (takes_mid_m(r)) {
    route->kernel = EmulatedKernel::kMidM;
    return;
  }
  route->kernel = EmulatedKernel::kDecode;
  // First as cuBLASLt would do it all; then with alpha, bias and rounding left to us.
  for (const bool epilogue : {false, true}) {
    const bool mixed = r.out_type != DType::kFloat32 && r.out_type != decoded;
    if (!epilogue && (mixed || (r.bias_type && *r.bias_type != r.out_type))) continue;
    route->separate_epilogue = epilogue;
    choose_chunks(r, route);
    const Problem problem = chunk_problem(r, *route, route->m_chunk, route->n_chunk);
    route->chunk_plan = cublaslt::planner().plan(problem);
    if (route->chunk_plan->ok()) return;
  }
  route->separate_epilogue = false;
  route->kernel = EmulatedKernel::kSlices;
  if (r.dense_b) route->rung = nullptr;  // the fused kernel is for a packed B
}

}  // namespace

std::string_view forced_rung() {
  static thread_local EnvironmentVariable variable("NVFP4_BACKEND");
  const char* text = variable.text();
  if (text == nullptr || *text == '\0') return {};
  for (const char* rung : {kPinnedRung, kHeuristicRung, kEmulatedRung, kCpuRung}) {
    if (std::string_view(text) == rung) return rung;
  }
  NVFP4_CHECK(false, "NVFP4_BACKEND must be ", kPinnedRung, ", ", kHeuristicRung, ", ",
              kEmulatedRung, " or ", kCpuRung, ", got '", text, "': unset it to try every rung");
  return {};
}

Problem chunk_problem(const GemmRequest& r, const Route& route, int64_t rows, int64_t cols) {
  Problem p = base_problem(r, route.decoded_type, rows, cols, route.separate_epilogue);
  if (r.dense_a) p.lda = r.a_row_stride;
  if (r.dense_b) p.ldb = r.b_row_stride;
  if (route.separate_epilogue) p.ldd = cols;
  return p;
}

namespace {

Route make_route(const GemmRequest& r, std::string_view forced) {
  Route route;
  const bool packed = !r.dense_a && !r.dense_b;
  if (packed && forced != kEmulatedRung && forced != kCpuRung) {
    // A bias that cuBLASLt can't add leaves alpha, bias and rounding to us, in chunks of rows.
    for (const bool epilogue : {false, true}) {
      if (epilogue && !r.bias_type) break;
      const int64_t rows = epilogue ? std::min(r.m, kEpilogueRows) : r.m;
      Problem problem = base_problem(r, ElementType::kNvfp4, rows, r.n, epilogue);
      problem.skip_pins = forced == kHeuristicRung;
      const auto plan = cublaslt::planner().plan(problem);
      if (!epilogue || plan->ok()) {
        route.problem = problem;
        route.plan = plan;
        route.separate_epilogue = epilogue;
        route.m_chunk = rows;
      }
      if (plan->ok() && (forced.empty() || plan->rung == forced)) {
        route.rung = plan->rung == kPinnedRung ? kPinnedRung : kHeuristicRung;
        return route;
      }
    }
    route.separate_epilogue = false;
  }
  if (forced.empty() || forced == kEmulatedRung) find_emulated(r, &route);
  return route;
}

std::atomic<uint64_t> forgotten{0};  // how often routes were

// A rung is known by its name's length.
static_assert(sizeof(kCpuRung) < sizeof(kEmulatedRung));
static_assert(sizeof(kEmulatedRung) < sizeof(kPinnedRung));
static_assert(sizeof(kPinnedRung) < sizeof(kHeuristicRung));

constexpr size_t kRoutes = 256;
using RouteKey = std::array<int64_t, 9>;

// All that a route depends on, with how often its plans have changed.
RouteKey key_of(const GemmRequest& r, std::string_view forced, uint64_t generation) {
  int64_t options = r.bias_type ? 1 + static_cast<int64_t>(*r.bias_type) : 0;
  for (const int64_t option :
       {static_cast<int64_t>(r.out_type), static_cast<int64_t>(r.dense_type), int64_t{r.dense_a},
        int64_t{r.dense_b}, int64_t{r.alpha_on_device}}) {
    options = options * 4 + option;
  }
  options = options * 64 + static_cast<int64_t>(forced.size());
  const int64_t device =
      ((r.device.index * int64_t{256} + r.device.cc_major) * 256 + r.device.cc_minor) * 65536 +
      r.device.sm_count;
  return {r.m,
          r.n,
          r.k,
          options,
          r.a_row_stride,
          r.b_row_stride,
          r.alignment,
          device,
          static_cast<int64_t>(generation)};
}

}  // namespace

Route make_route(const GemmRequest& r) { return make_route(r, forced_rung()); }

const Route& find_route(const GemmRequest& r) {
  static thread_local Recent<std::tuple_size_v<RouteKey>, Route, kRoutes> routes;
  const std::string_view forced = forced_rung();
  // Read before the plans are: what changes meanwhile makes the next call look again.
  const uint64_t generation =
      forgotten.load(std::memory_order_acquire) + cublaslt::planner().generation();
  return routes.find(key_of(r, forced, generation), [&] { return make_route(r, forced); });
}

void forget_routes() { forgotten.fetch_add(1, std::memory_order_release); }

int64_t workspace_bytes(const GemmRequest& r, const Route& route) {
  if (route.rung == nullptr) return 0;
  if (route.rung != kEmulatedRung) {
    const int64_t accumulators = route.separate_epilogue ? 4 * route.m_chunk * r.n : 0;
    return accumulators + static_cast<int64_t>(route.plan->workspace_bytes);
  }
  if (route.kernel == EmulatedKernel::kMidM) {
    return cuda::mid_m_workspace(cuda::find_mid_m(r.m, r.n, r.k, r.device.sm_count));
  }
  if (route.kernel != EmulatedKernel::kDecode) return 0;
  const int64_t decoded =
      2 * r.k * ((r.dense_b ? 0 : route.n_chunk) + (r.dense_a ? 0 : route.m_chunk));
  const int64_t accumulators = route.separate_epilogue ? 4 * route.m_chunk * route.n_chunk : 0;
  return decoded + accumulators + static_cast<int64_t>(route.chunk_plan->workspace_bytes);
}

std::vector<Refusal> refusals(const GemmRequest& r, const Route& route) {
  std::vector<Refusal> all;
  const std::string_view forced = forced_rung();
  const auto say = [&](const char* rung, const std::string& reason) {
    all.push_back({rung, reason});
  };
  const std::string by_force = concat("NVFP4_BACKEND=", forced, " forces another rung");
  if (r.dense_a || r.dense_b) {
    for (const char* rung : {kPinnedRung, kHeuristicRung}) {
      say(rung, "cuBLASLt has no GEMM of one NVFP4 and one dense operand");
    }
  } else if (route.plan) {
    all = route.plan->refusals;
    const bool taken = route.rung != nullptr && route.plan->rung == route.rung;
    if (route.plan->ok() && !taken) say(route.plan->rung.c_str(), by_force);
  } else {
    for (const char* rung : {kPinnedRung, kHeuristicRung}) say(rung, by_force);
  }
  if (route.rung == nullptr) {
    if (!forced.empty() && forced != kEmulatedRung) {
      say(kEmulatedRung, by_force);
    } else if (!kHasCudaKernels) {
      say(kEmulatedRung,
          "this build has no CUDA kernels: rebuild where nvcc (CUDA 13) is installed");
    } else if (has_emulation(r.device)) {
      say(kEmulatedRung,
          "needs cuBLASLt for a dense B: " + cublaslt::to_text(route.chunk_plan->refusals));
    } else {
      say(kEmulatedRung, concat("needs compute capability >= 8.0, found ", r.device.cc_major, ".",
                                r.device.cc_minor));
    }
    say(kCpuRung, "the operands are on a GPU: move them with .cpu()");
  }
  return all;
}

void check_cpu_allowed() {
  const std::string_view forced = forced_rung();
  NVFP4_CHECK(
      forced.empty() || forced == kCpuRung, "NVFP4_BACKEND=", forced,
      " needs CUDA operands, and these are on the CPU: move them with .cuda(), or unset it");
}

bool logs(LogLevel level) {
  static const LogLevel most = [] {
    const char* text = std::getenv("NVFP4_LOG");
    const std::string_view wanted = text ? text : "";
    return wanted == "debug"  ? LogLevel::kDebug
           : wanted == "info" ? LogLevel::kInfo
                              : LogLevel::kWarning;
  }();
  return level <= most;
}

void log_once(LogLevel level, const std::string& message) {
  if (!logs(level)) return;
  static std::mutex mutex;
  static std::set<std::string> seen;
  std::lock_guard<std::mutex> lock(mutex);
  if (seen.insert(message).second) std::fprintf(stderr, "nvfp4_linear: %s\n", message.c_str());
}

}  // namespace nvfp4
