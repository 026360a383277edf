// The ladder a CUDA gemm goes down: which backend takes a problem, and why those above did not.
//
//   1 cublaslt-pinned     a pin that AlgoCheck accepts
//   2 cublaslt-heuristic  cuBLASLt's own choice
//   3 emulated            exact decode, then BF16 or FP16 tensor cores: any GPU from cc 8.0 on
//   4 a named error that lists every rung's reason
//
// `make_route` decides; cuda/gemm.cpp does what it says and `explain` (control.h) tells it, so
// what is explained is what runs.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cublaslt/plan.h"
#include "kernels.h"

namespace nvfp4 {

inline constexpr char kEmulatedRung[] = "emulated";
inline constexpr char kCpuRung[] = "cpu";

// Bytes that decoded operands of the emulated rung and cuBLASLt's own workspace may take together.
constexpr int64_t kWorkspaceBudget = int64_t{256} << 20;
constexpr size_t kCublasltWorkspace = size_t{16} << 20;
// Rows of FP32 accumulators that a native NVFP4 GEMM leaves to the separate epilogue at a time: a
// multiple of 128, so that a chunk starts on a tile of scales.
constexpr int64_t kEpilogueRows = 2048;

#if defined(NVFP4_WITH_CUDA)
inline constexpr bool kHasCudaKernels = true;
#else
inline constexpr bool kHasCudaKernels = false;
#endif
// Those with Hopper's own instructions: code for any other target than sm_90a has husks of them.
#if defined(NVFP4_WITH_HOPPER)
inline constexpr bool kHasHopperKernels = true;
#else
inline constexpr bool kHasHopperKernels = false;
#endif

// The rung that NVFP4_BACKEND forces now; empty where it forces none.
std::string_view forced_rung();

struct GemmRequest {
  int64_t m = 0, n = 0, k = 0;
  bool dense_a = false, dense_b = false;
  DType dense_type = DType::kBFloat16;         // of the dense side
  int64_t a_row_stride = 0, b_row_stride = 0;  // of a dense side
  DType out_type = DType::kBFloat16;
  std::optional<DType> bias_type;
  bool alpha_on_device = false;
  uint32_t alignment = cublaslt::kMaxAlignment;  // of everything cuBLASLt is given
  cublaslt::DeviceInfo device{};
};

enum class EmulatedKernel {
  kSmallM,        // one fused kernel: reads a packed B once
  kSmallMHopper,  // the same on Hopper, for aligned operands; more rows where n is small
  kMidM,          // the same for more rows, on Hopper, with A's image in a workspace
  kDecode,        // decode a chunk, then cuBLASLt; see chunk sizes
  kSlices,        // the fused kernel, kSmallMMax rows at a time: where cuBLASLt can't be had
};

struct Route {
  const char* rung = nullptr;  // null where every rung refused
  // The NVFP4 problem of the first m_chunk rows, and the plan that took or refused it. Null where
  // it was not asked.
  cublaslt::Problem problem{};
  std::shared_ptr<const cublaslt::Plan> plan;
  // The rung below: decoded operands, in chunks of m_chunk x n_chunk of D.
  EmulatedKernel kernel = EmulatedKernel::kSmallM;
  cublaslt::ElementType decoded_type = cublaslt::ElementType::kBf16;
  std::shared_ptr<const cublaslt::Plan> chunk_plan;  // of the first chunk, for kDecode and kSlices
  int64_t m_chunk = 0, n_chunk = 0;
  // cuBLASLt can't apply this bias: it writes FP32, and a kernel of ours does alpha, bias,
  // rounding.
  bool separate_epilogue = false;
};

Route make_route(const GemmRequest& request);

// The same, remembered by thread: one look-up for a warm call. Valid until the thread's next call.
const Route& find_route(const GemmRequest& request);
// What else a route depends on has changed: explicit tiles and faults. Planners say so themselves.
void forget_routes();

// The BF16 or FP16 problem of one chunk of the emulated rung: rows x cols of D.
cublaslt::Problem chunk_problem(const GemmRequest& request, const Route& route, int64_t rows,
                                int64_t cols);

// Bytes of workspace that `route` takes beside the output.
int64_t workspace_bytes(const GemmRequest& request, const Route& route);

// Every rung's reason, top to bottom, down to the one that took it.
std::vector<cublaslt::Refusal> refusals(const GemmRequest& request, const Route& route);

// Throws where NVFP4_BACKEND forces a rung other than the CPU's.
void check_cpu_allowed();

// NVFP4_LOG, read once: each message once a process; warnings always, others where asked for.
enum class LogLevel { kWarning, kInfo, kDebug };
bool logs(LogLevel level);
void log_once(LogLevel level, const std::string& message);

}  // namespace nvfp4
