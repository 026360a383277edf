#include "operation.h"

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "faults.h"

namespace nvfp4::cublaslt {
namespace {

// THE SWAP. cuBLASLt is column-major, and NVFP4 wants its A transposed and its B not. The bytes of
// a row-major (r, c) matrix are those of a column-major (c, r) one, so D = A·Bᵀ is asked for as
// Dᵀ = B·Aᵀ: operands swap sides, and with each go its scales and its leading dimension; m and n
// swap; nothing is transposed and no byte moves. From here on `a`, `b`, `m` and `n` are cuBLASLt's.
Problem column_major(Problem problem) {
  std::swap(problem.m, problem.n);
  std::swap(problem.lda, problem.ldb);
  return problem;
}

Operands column_major(Operands operands) {
  std::swap(operands.a, operands.b);
  std::swap(operands.a_scale, operands.b_scale);
  return operands;
}

cudaDataType data_type(ElementType type) {
  switch (type) {
    case ElementType::kNvfp4:
      return CUDA_R_4F_E2M1;
    case ElementType::kBf16:
      return CUDA_R_16BF;
    case ElementType::kFp16:
      return CUDA_R_16F;
    case ElementType::kFp8E4m3:
      return CUDA_R_8F_E4M3;
  }
  return CUDA_R_32F;
}

cudaDataType data_type(OutType type) {
  switch (type) {
    case OutType::kBf16:
      return CUDA_R_16BF;
    case OutType::kFp16:
      return CUDA_R_16F;
    case OutType::kFp32:
      return CUDA_R_32F;
  }
  return CUDA_R_32F;
}

Owned<cublasLtMatrixLayout_t> make_layout(const Library& library, cudaDataType type, int64_t rows,
                                          int64_t columns, int64_t leading_dimension) {
  // Created by the library, not on our stack: the structure grew between 13.1 and 13.10.
  cublasLtMatrixLayout_t layout = nullptr;
  expect_success(
      library, library.cublasLtMatrixLayoutCreate(&layout, type, rows, columns, leading_dimension),
      "cublasLtMatrixLayoutCreate");
  return {layout, library.cublasLtMatrixLayoutDestroy};
}

template <typename Value>
void set(const Library& library, cublasLtMatmulDesc_t descriptor,
         cublasLtMatmulDescAttributes_t attribute, Value value) {
  expect_success(
      library, library.cublasLtMatmulDescSetAttribute(descriptor, attribute, &value, sizeof(value)),
      "cublasLtMatmulDescSetAttribute");
}

// Made anew for every launch: 0.2 µs with all attributes, on 13.1.0 and 13.10.0. That is what lets
// threads share a plan: the descriptor carries the scale and bias pointers of one call, so a shared
// one would have to be locked from here until cublasLtMatmul returns.
Owned<cublasLtMatmulDesc_t> make_descriptor(const Library& library, const Problem& problem,
                                            const void* a_scale, const void* b_scale,
                                            const void* bias) {
  cublasLtMatmulDesc_t raw = nullptr;
  expect_success(library, library.cublasLtMatmulDescCreate(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                 "cublasLtMatmulDescCreate");
  Owned<cublasLtMatmulDesc_t> descriptor(raw, library.cublasLtMatmulDescDestroy);
  const auto set_one = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    set(library, raw, attribute, value);
  };

  set_one(CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(CUBLAS_OP_T));
  set_one(CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(CUBLAS_OP_N));
  if (problem.alpha == PointerMode::kDevice) {
    set_one(CUBLASLT_MATMUL_DESC_POINTER_MODE, static_cast<int32_t>(CUBLASLT_POINTER_MODE_DEVICE));
  }
  if (problem.type == ElementType::kNvfp4) {
    set_one(CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
            static_cast<int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3));
    set_one(CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
            static_cast<int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3));
  }
  // Only scales that the call uses: one for C or D of a BF16 output makes cuBLASLt refuse.
  if (a_scale) set_one(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, a_scale);
  if (b_scale) set_one(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, b_scale);
  if (problem.bias) {
    set_one(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(CUBLASLT_EPILOGUE_BIAS));
    set_one(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(data_type(*problem.bias)));
    set_one(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
  return descriptor;
}

// The attributes of an algorithm and the width of their storage, which cuBLASLt checks.
struct Attribute {
  const char* name;
  cublasLtMatmulAlgoConfigAttributes_t id;
  size_t bytes;
};
constexpr Attribute kTile{"tile", CUBLASLT_ALGO_CONFIG_TILE_ID, 4};
constexpr Attribute kStages{"stages", CUBLASLT_ALGO_CONFIG_STAGES_ID, 4};
constexpr Attribute kSplitK{"split_k", CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4};
constexpr Attribute kReduction{"reduction", CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4};
constexpr Attribute kSwizzle{"swizzle", CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4};
constexpr Attribute kCustom{"custom", CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4};
constexpr Attribute kInner{"inner", CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2};
constexpr Attribute kCluster{"cluster", CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2};
constexpr Attribute kId{"id", CUBLASLT_ALGO_CONFIG_ID, 4};

void set(const Library& library, cublasLtMatmulAlgo_t* algo, const Attribute& attribute,
         int value) {
  const uint16_t narrow = static_cast<uint16_t>(value);
  const void* from = attribute.bytes == 2 ? static_cast<const void*>(&narrow) : &value;
  const cublasStatus_t status =
      library.cublasLtMatmulAlgoConfigSetAttribute(algo, attribute.id, from, attribute.bytes);
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw CallFailed(
        "AlgoConfigSetAttribute " + std::string(attribute.name) + "=" + std::to_string(value),
        library.name(status));
  }
}

int get(const Library& library, const cublasLtMatmulAlgo_t& algo, const Attribute& attribute) {
  uint16_t narrow = 0;
  int value = 0;
  size_t written = 0;
  void* to = attribute.bytes == 2 ? static_cast<void*>(&narrow) : &value;
  const cublasStatus_t status = library.cublasLtMatmulAlgoConfigGetAttribute(
      &algo, attribute.id, to, attribute.bytes, &written);
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw CallFailed("AlgoConfigGetAttribute " + std::string(attribute.name), library.name(status));
  }
  return attribute.bytes == 2 ? narrow : value;
}

Algorithm read_back(const Library& library, const cublasLtMatmulAlgo_t& algo) {
  const auto get_one = [&](const Attribute& attribute) { return get(library, algo, attribute); };
  Algorithm algorithm;
  algorithm.id = get_one(kId);
  algorithm.tile = get_one(kTile);
  algorithm.stages = get_one(kStages);
  algorithm.split_k = get_one(kSplitK);
  algorithm.reduction = get_one(kReduction);
  algorithm.swizzle = get_one(kSwizzle);
  algorithm.custom = get_one(kCustom);
  algorithm.inner = get_one(kInner);
  algorithm.cluster = get_one(kCluster);
  return algorithm;
}

// A pointer that is never followed. Heuristic and AlgoCheck want block scales to be there, and read
// the expected alignment off the bias pointer's value.
const void* placeholder(uint32_t alignment) {
  return reinterpret_cast<const void*>((uintptr_t{1} << 40) + alignment);
}

std::string with_shape(const std::string& text, const Problem& cublaslt_problem) {
  return text + " (" + shape_text(column_major(cublaslt_problem)) + ")";
}

// Empty where a launch may follow `pointers`.
std::string bad_operands(const Executable& executable, const Operands& operands) {
  const Problem& problem = executable.problem;
  if (!operands.a || !operands.b || !operands.d || !operands.alpha || !operands.beta) {
    return "a, b, d, alpha and beta must not be null";
  }
  if (problem.type == ElementType::kNvfp4 && (!operands.a_scale || !operands.b_scale)) {
    return "NVFP4 needs both block scale pointers, got null";
  }
  if (problem.bias.has_value() != (operands.bias != nullptr)) {
    return problem.bias ? "the plan has a bias, got null" : "the plan has no bias, got one";
  }
  const uint32_t alignment = alignment_of(operands.a, operands.b, operands.a_scale,
                                          operands.b_scale, operands.bias, operands.d);
  if (alignment < problem.alignment) {
    return "the plan is for pointers on " + std::to_string(problem.alignment) +
           "-byte boundaries, got " + std::to_string(alignment);
  }
  if (operands.workspace_bytes < executable.workspace_bytes ||
      (executable.workspace_bytes != 0 && !operands.workspace)) {
    return "the plan needs " + std::to_string(executable.workspace_bytes) +
           " bytes of workspace, got " + std::to_string(operands.workspace_bytes);
  }
  if (alignment_of(operands.workspace) < kWorkspaceAlignment) {
    return "workspace must be on a 256-byte boundary";
  }
  return "";
}

}  // namespace

Handle make_handle(const Library& library) {
  cublasLtHandle_t handle = nullptr;
  expect_success(library, library.cublasLtCreate(&handle), "cublasLtCreate");
  return {handle, library.cublasLtDestroy};
}

Operation::Operation(std::shared_ptr<const Library> library, Handle handle,
                     const Problem& row_major)
    : library_(std::move(library)), handle_(std::move(handle)), problem_(column_major(row_major)) {
  const Problem& p = problem_;
  layouts_.a = make_layout(*library_, data_type(p.type), p.k, p.m, p.lda);  // (m, k) transposed
  layouts_.b = make_layout(*library_, data_type(p.type), p.k, p.n, p.ldb);
  layouts_.d = make_layout(*library_, data_type(p.out), p.m, p.n, p.ldd);
  const void* scale = p.type == ElementType::kNvfp4 ? placeholder(p.alignment) : nullptr;
  descriptor_ = make_descriptor(*library_, p, scale, scale, placeholder(p.alignment));
}

cublasLtMatmulAlgo_t Operation::init(int algorithm_id) const {
  cublasLtMatmulAlgo_t algo{};
  expect_success(*library_,
                 library_->cublasLtMatmulAlgoInit(handle_.get(), CUBLAS_COMPUTE_32F, CUDA_R_32F,
                                                  data_type(problem_.type),
                                                  data_type(problem_.type), data_type(problem_.out),
                                                  data_type(problem_.out), algorithm_id, &algo),
                 "AlgoInit");
  return algo;
}

Answer Operation::check(const Algorithm& asked) const {
  Answer refused;
  refused.algorithm = asked;
  refused.reason = out_of_range(asked, library_->version);
  if (!refused.reason.empty()) return refused;
  try {
    cublasLtMatmulAlgo_t algo = init(asked.id);
    set(*library_, &algo, kTile, asked.tile);
    set(*library_, &algo, kStages, asked.stages);
    set(*library_, &algo, kSplitK, asked.split_k);
    set(*library_, &algo, kReduction, asked.reduction);
    set(*library_, &algo, kSwizzle, asked.swizzle);
    set(*library_, &algo, kCustom, asked.custom);
    if (asked.inner) set(*library_, &algo, kInner, *asked.inner);
    if (asked.cluster) set(*library_, &algo, kCluster, *asked.cluster);
    refused.algorithm = read_back(*library_, algo);

    // AlgoCheck fills neither `algo` nor, where it fails, `state`: start from "not accepted".
    cublasLtMatmulHeuristicResult_t result{};
    result.state = CUBLAS_STATUS_NOT_INITIALIZED;
    expect_success(*library_,
                   library_->cublasLtMatmulAlgoCheck(
                       handle_.get(), descriptor_.get(), layouts_.a.get(), layouts_.b.get(),
                       layouts_.d.get(), layouts_.d.get(), &algo, &result),
                   "AlgoCheck");
    result.algo = algo;
    return accepted(result, "AlgoCheck");
  } catch (const CallFailed& failure) {
    refused.status = failure.status;
    refused.reason = std::string(failure.what()) + " for " + to_text(refused.algorithm);
    return refused;
  }
}

std::vector<Answer> Operation::heuristic(int count, std::string* reason) const {
  try {
    cublasLtMatmulPreference_t raw = nullptr;
    expect_success(*library_, library_->cublasLtMatmulPreferenceCreate(&raw),
                   "cublasLtMatmulPreferenceCreate");
    Owned<cublasLtMatmulPreference_t> preference(raw, library_->cublasLtMatmulPreferenceDestroy);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      expect_success(
          *library_,
          library_->cublasLtMatmulPreferenceSetAttribute(raw, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{problem_.workspace_limit});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem_.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem_.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem_.alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem_.alignment);

    std::vector<cublasLtMatmulHeuristicResult_t> results(count);
    for (auto& result : results) result.state = CUBLAS_STATUS_NOT_INITIALIZED;
    int found = 0;
    expect_success(*library_,
                   library_->cublasLtMatmulAlgoGetHeuristic(
                       handle_.get(), descriptor_.get(), layouts_.a.get(), layouts_.b.get(),
                       layouts_.d.get(), layouts_.d.get(), raw, count, results.data(), &found),
                   "heuristic");
    if (found == 0) *reason = "heuristic returned 0 algorithms";
    std::vector<Answer> answers;
    for (int i = 0; i < found && i < count; ++i) {
      answers.push_back(accepted(results[i], "heuristic"));
    }
    return answers;
  } catch (const CallFailed& failure) {
    *reason = failure.what();
    return {};
  }
}

Answer Operation::accepted(const cublasLtMatmulHeuristicResult_t& result, const char* call) const {
  Answer answer;
  answer.algorithm = read_back(*library_, result.algo);
  answer.status = library_->name(result.state);
  answer.workspace_bytes = result.workspaceSize;
  answer.waves = result.wavesCount;
  if (result.state != CUBLAS_STATUS_SUCCESS) {
    answer.reason = std::string(call) + " state " + answer.status;
  } else if (result.workspaceSize > problem_.workspace_limit) {
    answer.reason = "needs " + std::to_string(result.workspaceSize) +
                    " bytes of workspace, the limit is " + std::to_string(problem_.workspace_limit);
  } else {
    answer.reason = known_fault(column_major(problem_), &answer.algorithm, library_->version);
  }
  if (!answer.reason.empty()) {
    answer.reason += " for " + to_text(answer.algorithm);
    return answer;
  }
  answer.executable = std::make_shared<const Executable>(
      Executable{library_, handle_, problem_, layouts_, result.algo, result.workspaceSize});
  return answer;
}

std::vector<int> Operation::algorithm_ids() const {
  std::vector<int> ids(256);
  int found = 0;
  expect_success(*library_,
                 library_->cublasLtMatmulAlgoGetIds(
                     handle_.get(), CUBLAS_COMPUTE_32F, CUDA_R_32F, data_type(problem_.type),
                     data_type(problem_.type), data_type(problem_.out), data_type(problem_.out),
                     static_cast<int>(ids.size()), ids.data(), &found),
                 "AlgoGetIds");
  ids.resize(found);
  return ids;
}

Capabilities Operation::capabilities(int algorithm_id) const {
  const cublasLtMatmulAlgo_t algo = init(algorithm_id);
  const auto read = [&](cublasLtMatmulAlgoCapAttributes_t attribute, void* to, size_t bytes) {
    size_t written = 0;
    expect_success(
        *library_,
        library_->cublasLtMatmulAlgoCapGetAttribute(&algo, attribute, to, bytes, &written),
        "AlgoCapGetAttribute");
    return written;
  };

  Capabilities all;
  for (const auto& [name, attribute] : {std::pair{"tile_ids", CUBLASLT_ALGO_CAP_TILE_IDS},
                                        std::pair{"stages_ids", CUBLASLT_ALGO_CAP_STAGES_IDS}}) {
    std::vector<uint32_t> ids(read(attribute, nullptr, 0) / sizeof(uint32_t));
    if (!ids.empty()) read(attribute, ids.data(), ids.size() * sizeof(uint32_t));
    all.emplace_back(name, std::vector<int64_t>(ids.begin(), ids.end()));
  }
  for (const auto& [name, attribute] : {
           std::pair{"split_k", CUBLASLT_ALGO_CAP_SPLITK_SUPPORT},
           std::pair{"reduction_mask", CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK},
           std::pair{"swizzle", CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT},
           std::pair{"custom_max", CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX},
           std::pair{"pointer_mode_mask", CUBLASLT_ALGO_CAP_POINTER_MODE_MASK},
           std::pair{"epilogue_mask", CUBLASLT_ALGO_CAP_EPILOGUE_MASK},
           std::pair{"min_alignment_a", CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES},
           std::pair{"min_alignment_b", CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES},
           std::pair{"min_alignment_d", CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES},
       }) {
    int32_t value = 0;
    read(attribute, &value, sizeof(value));
    all.emplace_back(name, std::vector<int64_t>{value});
  }
  return all;
}

std::string run(const Plan& plan, const Operands& row_major, void* stream) {
  if (!plan.ok()) throw std::invalid_argument("no plan to run: " + to_text(plan.refusals));
  const Executable& executable = *plan.executable;
  const Library& library = *executable.library;
  const Operands operands = column_major(row_major);
  const std::string bad = bad_operands(executable, operands);
  if (!bad.empty()) throw std::invalid_argument(with_shape(bad, executable.problem));
  try {
    const auto descriptor = make_descriptor(library, executable.problem, operands.a_scale,
                                            operands.b_scale, operands.bias);
    // C is D under the same layout: with beta = 0 it is never read, and cuBLASLt since 13.1 takes
    // C == D only where the two layouts are one.
    expect_success(library,
                   library.cublasLtMatmul(executable.handle.get(),                       //
                                          descriptor.get(),                              //
                                          operands.alpha,                                //
                                          operands.a, executable.layouts.a.get(),        //
                                          operands.b, executable.layouts.b.get(),        //
                                          operands.beta,                                 //
                                          operands.d, executable.layouts.d.get(),        // C
                                          operands.d, executable.layouts.d.get(),        // D
                                          &executable.algo,                              //
                                          operands.workspace, operands.workspace_bytes,  //
                                          static_cast<cudaStream_t>(stream)),
                   "cublasLtMatmul");
    return "";
  } catch (const CallFailed& failure) {
    return with_shape(std::string(failure.what()) + " for " + to_text(plan.algorithm),
                      executable.problem);
  }
}

}  // namespace nvfp4::cublaslt
