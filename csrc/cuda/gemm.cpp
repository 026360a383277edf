#include "gemm.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "../check.h"
#include "../ladder.h"
#include "../nvfp4.h"
#include "../tensors.h"
#include "mid_m_plan.h"

namespace nvfp4::cuda {
namespace {

using cublaslt::Operands;
using cublaslt::Problem;

constexpr int kMaxAttempts = 16;  // refused launches before giving up on one call

int64_t bytes(DType type) { return type == DType::kFloat32 ? 4 : 2; }

template <typename T>
T* offset(T* pointer, int64_t elements, DType type) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return pointer ? reinterpret_cast<Byte*>(pointer) + elements * bytes(type) : nullptr;
}

GemmRequest request_of(const GemmParams& p) {
  const Device device = current_device();
  GemmRequest r;
  r.m = p.m;
  r.n = p.n;
  r.k = p.k;
  r.dense_a = p.a.scale == nullptr;
  r.dense_b = p.b.scale == nullptr;
  r.dense_type = r.dense_a ? p.a.type : p.b.type;
  r.a_row_stride = p.a.row_stride;
  r.b_row_stride = p.b.row_stride;
  r.out_type = p.out_type;
  if (p.bias) r.bias_type = p.bias_type;
  r.alpha_on_device = p.alpha.device != nullptr;
  r.alignment = cublaslt::alignment_of(p.a.data, p.b.data, p.a.scale, p.b.scale, p.bias, p.out);
  r.device = {device.index, device.cc_major, device.cc_minor, device.sm_count};
  return r;
}

// alpha and beta as cuBLASLt reads them: both on the host, or both on the device.
struct Scalars {
  float host_alpha = 1.0f, host_beta = 0.0f;
  const void *alpha, *beta;

  Scalars(const Scalar& scalar, cublaslt::PointerMode mode) : host_alpha(scalar.value) {
    const bool on_device = mode == cublaslt::PointerMode::kDevice;
    alpha = on_device ? static_cast<const void*>(scalar.device) : &host_alpha;
    beta = on_device ? static_cast<const void*>(device_zero()) : &host_beta;
  }
  Scalars(const Scalars&) = delete;  // holds pointers into itself
};

// Plans `problem` and runs it; a launch that cuBLASLt refuses retires its plan and takes the next.
// Empty on success, else every reason.
std::string plan_and_run(const Problem& problem, Operands operands, Stream stream) {
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    const auto plan = cublaslt::planner().plan(problem);
    if (!plan->ok()) return cublaslt::to_text(plan->refusals);
    const Workspace workspace(static_cast<int64_t>(plan->workspace_bytes));
    operands.workspace = workspace.data();
    operands.workspace_bytes = plan->workspace_bytes;
    const std::string refused = cublaslt::run(*plan, operands, stream);
    if (refused.empty()) return "";
    log_once(LogLevel::kWarning, concat(plan->rung, " refused a launch: ", refused));
    cublaslt::planner().retire(problem, *plan, refused);
  }
  return concat(kMaxAttempts, " plans in a row were refused at launch");
}

void run_epilogue(const GemmParams& p, const float* accumulators, int64_t m0, int64_t rows,
                  int64_t n0, int64_t cols, Stream stream) {
  EpilogueParams e;
  e.acc = accumulators;
  e.rows = rows;
  e.n = cols;
  e.alpha = p.alpha;
  e.bias = offset(p.bias, n0, p.bias_type);
  e.bias_type = p.bias_type;
  e.out = offset(p.out, m0 * p.n + n0, p.out_type);
  e.out_row_stride = p.n;
  e.out_type = p.out_type;
  epilogue(e, stream);
}

// Rungs 1 and 2. Empty on success, else why no plan is left.
std::string run_nvfp4(const GemmParams& p, const Route& route, Stream stream) {
  if (!route.separate_epilogue) {
    const Scalars scalars(p.alpha, route.problem.alpha);
    const Operands operands{p.a.data,      p.b.data,     p.a.scale, p.b.scale, p.bias,
                            scalars.alpha, scalars.beta, p.out,     nullptr,   0};
    return plan_and_run(route.problem, operands, stream);
  }
  const Workspace workspace(route.m_chunk * p.n * 4);
  auto* const accumulators = static_cast<float*>(workspace.data());
  const int64_t tiles_per_row = round_up(p.k / kBlockSize, kTileCols) / kTileCols;
  const Scalar one;
  for (int64_t m0 = 0; m0 < p.m; m0 += route.m_chunk) {
    const int64_t rows = std::min(route.m_chunk, p.m - m0);
    Problem problem = route.problem;
    problem.m = rows;
    const Scalars scalars(one, problem.alpha);
    const Operands operands{static_cast<const uint8_t*>(p.a.data) + m0 * (p.k / 2),
                            p.b.data,
                            p.a.scale + m0 / kTileRows * tiles_per_row * kTileBytes,
                            p.b.scale,
                            nullptr,
                            scalars.alpha,
                            scalars.beta,
                            accumulators,
                            nullptr,
                            0};
    const std::string reasons = plan_and_run(problem, operands, stream);
    if (!reasons.empty()) return reasons;
    run_epilogue(p, accumulators, m0, rows, 0, p.n, stream);
  }
  return "";
}

SmallMParams fused_params(const GemmParams& p) {
  SmallMParams slice;
  slice.a = p.a.data;
  slice.a_scale = p.a.scale;
  slice.a_type = p.a.type;
  slice.a_row_stride = p.a.row_stride;
  slice.b = static_cast<const uint8_t*>(p.b.data);
  slice.b_scale = p.b.scale;
  slice.n = p.n;
  slice.k = p.k;
  slice.alpha = p.alpha;
  slice.bias = p.bias;
  slice.bias_type = p.bias_type;
  slice.m = p.m;
  slice.out = p.out;
  slice.out_type = p.out_type;
  return slice;
}

void run_mid_m(const GemmParams& p, int sm_count, Stream stream) {
  const MidMPlan& plan = find_mid_m(p.m, p.n, p.k, sm_count);
  const Workspace workspace(mid_m_workspace(plan));
  gemm_mid_m(fused_params(p), workspace.data(), stream);
}

// The fused kernel for few rows, as many of them at a time as it takes.
void run_small_m(const GemmParams& p, Stream stream) {
  SmallMParams slice = fused_params(p);
  for (int64_t m0 = 0; m0 < p.m; m0 += kSmallMMax) {
    slice.m = std::min(kSmallMMax, p.m - m0);
    slice.a_row_begin = m0;
    slice.out = offset(p.out, m0 * p.n, p.out_type);
    gemm_small_m(slice, stream);
  }
}

// Chunks of D: decode B's rows, decode A's, multiply on BF16 or FP16 tensor cores.
std::string run_decoded(const GemmParams& p, const GemmRequest& request, const Route& route,
                        Stream stream) {
  const DType decoded =
      route.decoded_type == cublaslt::ElementType::kFp16 ? DType::kFloat16 : DType::kBFloat16;
  const Workspace workspace{request.dense_b ? 0 : route.n_chunk * p.k * 2,
                            request.dense_a ? 0 : route.m_chunk * p.k * 2,
                            route.separate_epilogue ? route.m_chunk * route.n_chunk * 4 : 0};
  void *const b_decoded = workspace.part(0), *const a_decoded = workspace.part(1);
  auto* const accumulators = static_cast<float*>(workspace.part(2));
  // Rows of an operand from `begin` on, where they are dense already.
  const auto dense_rows = [](const Operand& operand, int64_t begin) {
    return offset(operand.data, begin * operand.row_stride, operand.type);
  };
  const auto packed_rows = [](const Operand& operand, int64_t begin, int64_t rows, void* space) {
    return DequantizePairParams::Side{static_cast<const uint8_t*>(operand.data), operand.scale,
                                      begin, rows, space};
  };
  for (int64_t n0 = 0; n0 < p.n; n0 += route.n_chunk) {
    const int64_t cols = std::min(route.n_chunk, p.n - n0);
    const void* b = request.dense_b ? dense_rows(p.b, n0) : b_decoded;
    for (int64_t m0 = 0; m0 < p.m; m0 += route.m_chunk) {
      const int64_t rows = std::min(route.m_chunk, p.m - m0);
      const void* a = request.dense_a ? dense_rows(p.a, m0) : a_decoded;
      DequantizePairParams d;
      d.k = p.k;
      d.out_type = decoded;
      if (!request.dense_a) d.a = packed_rows(p.a, m0, rows, a_decoded);
      if (!request.dense_b && m0 == 0) d.b = packed_rows(p.b, n0, cols, b_decoded);
      dequantize_pair(d, stream);
      void* out = offset(p.out, m0 * p.n + n0, p.out_type);
      const void* bias = offset(p.bias, n0, p.bias_type);
      Problem problem = chunk_problem(request, route, rows, cols);
      Operands operands{a, b, nullptr, nullptr, bias, nullptr, nullptr, out, nullptr, 0};
      Scalar alpha = p.alpha;
      if (route.separate_epilogue) {
        operands.bias = nullptr;
        operands.d = accumulators;
        alpha = Scalar{};
      }
      problem.alignment = cublaslt::alignment_of(operands.a, operands.b, operands.bias, operands.d);
      const Scalars scalars(alpha, problem.alpha);
      operands.alpha = scalars.alpha;
      operands.beta = scalars.beta;
      const std::string reasons = plan_and_run(problem, operands, stream);
      if (!reasons.empty()) return reasons;
      if (route.separate_epilogue) run_epilogue(p, accumulators, m0, rows, n0, cols, stream);
    }
  }
  return "";
}

void log_route(const GemmRequest& r, const Route& route) {
  // Where FP4 tensor cores exist, falling to the emulated rung is worth a warning.
  const bool unexpected =
      route.rung == kEmulatedRung && r.device.cc_major >= 10 && !r.dense_a && !r.dense_b;
  const LogLevel level = unexpected ? LogLevel::kWarning : LogLevel::kInfo;
  if (!logs(level)) return;
  std::string message = concat("gemm m=", r.m, " n=", r.n, " k=", r.k, " runs on ", route.rung);
  for (const auto& refusal : refusals(r, route)) {
    message += concat("; ", refusal.rung, ": ", refusal.reason);
  }
  log_once(level, message);
}

}  // namespace

void gemm(const GemmParams& p, Stream stream) {
  const GemmRequest request = request_of(p);
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    const Route& route = find_route(request);
    if (route.rung == nullptr) {
      std::string reasons;
      for (const auto& refusal : refusals(request, route)) {
        reasons += concat(reasons.empty() ? "" : "; ", refusal.rung, ": ", refusal.reason);
      }
      throw std::runtime_error(concat("no backend takes this gemm (m = ", p.m, ", n = ", p.n,
                                      ", k = ", p.k, ") on this GPU: ", reasons));
    }
    log_route(request, route);
    if (route.rung != kEmulatedRung) {
      if (run_nvfp4(p, route, stream).empty()) return;
      continue;  // every plan of the rung is retired by now: the next route is the next rung
    }
    if (route.kernel == EmulatedKernel::kSmallMHopper) {
      return gemm_small_m_hopper(fused_params(p), stream);
    }
    if (route.kernel == EmulatedKernel::kMidM) {
      return run_mid_m(p, request.device.sm_count, stream);
    }
    if (route.kernel == EmulatedKernel::kDecode) {
      const std::string reasons = run_decoded(p, request, route, stream);
      if (reasons.empty()) return;
      if (request.dense_b)
        throw std::runtime_error(concat("no backend takes this gemm: ", reasons));
      log_once(LogLevel::kWarning, concat("emulated rung without cuBLASLt: ", reasons));
    }
    return run_small_m(p, stream);
  }
  throw std::runtime_error(
      concat("every plan was refused at launch (m = ", p.m, ", n = ", p.n, ", k = ", p.k, ")"));
}

}  // namespace nvfp4::cuda
