// The test double of cuBLASLt with a temper: LAB_DOUBLE in the environment says which algorithms
// kill, hang, are refused, are slow or give other bytes, so that child processes meet them too.
//
//   LAB_DOUBLE = item ; item ; …          first matching item of a stage wins
//   item       = set:KEY=VALUE            as fake_configure; VALUE runs to the end of the item
//              | STAGE:NAME=N,NAME=N:ACTION[=N]
//   STAGE      = check | run              AlgoCheck or the launch
//   NAME       = an attribute of the algorithm; no condition matches every algorithm
//   ACTION     = pass | refuse | crash | hang | slow=MICROSECONDS | wrong
//
// "wrong" flips the lowest bit of D's last element. "crash" is SIGSEGV, as of a wild read.

#include <cublasLt.h>

#define cublasLtMatmulAlgoCheck plain_algo_check
#define cublasLtMatmul plain_matmul
#include "../fake_cublaslt/fake_cublaslt.cpp"
#undef cublasLtMatmulAlgoCheck
#undef cublasLtMatmul

#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <utility>

namespace {

struct Rule {
  std::string stage;
  std::vector<std::pair<int, int>> conditions;  // attribute, value
  std::string action;
  int argument = 0;
};

int attribute_of(const std::string& name) {
  static const std::map<std::string, int> ids = {
      {"id", CUBLASLT_ALGO_CONFIG_ID},
      {"tile", CUBLASLT_ALGO_CONFIG_TILE_ID},
      {"split_k", CUBLASLT_ALGO_CONFIG_SPLITK_NUM},
      {"reduction", CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME},
      {"swizzle", CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING},
      {"custom", CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION},
      {"stages", CUBLASLT_ALGO_CONFIG_STAGES_ID},
      {"inner", CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID},
      {"cluster", CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID}};
  return ids.at(name);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

Rule parse_rule(const std::string& item) {
  const auto parts = split(item, ':');
  Rule rule;
  rule.stage = parts.at(0);
  for (const std::string& condition : split(parts.at(1), ',')) {
    const auto sides = split(condition, '=');
    rule.conditions.emplace_back(attribute_of(sides.at(0)), std::stoi(sides.at(1)));
  }
  const auto action = split(parts.at(2), '=');
  rule.action = action.at(0);
  if (action.size() > 1) rule.argument = std::stoi(action[1]);
  return rule;
}

std::vector<Rule> read_rules() {
  std::vector<Rule> rules;
  const char* text = std::getenv("LAB_DOUBLE");
  for (const std::string& item : split(text ? text : "", ';')) {
    if (item.rfind("set:", 0) == 0) {
      const size_t equals = item.find('=');
      fake_configure(item.substr(4, equals - 4).c_str(), item.substr(equals + 1).c_str());
    } else {
      rules.push_back(parse_rule(item));
    }
  }
  return rules;
}

const std::vector<Rule>& rules() {
  static const std::vector<Rule> all = read_rules();
  return all;
}
[[maybe_unused]] const size_t read_at_load = rules().size();

const Rule* rule_for(const char* stage, const Algo& algo) {
  for (const Rule& rule : rules()) {
    bool hit = rule.stage == stage;
    for (const auto& [attribute, value] : rule.conditions) {
      hit = hit && algo.values[attribute] == value;
    }
    if (hit) return &rule;
  }
  return nullptr;
}

// The part of a rule that comes before the call; false where the call is refused.
bool before(const Rule* rule) {
  if (!rule) return true;
  if (rule->action == "crash") std::raise(SIGSEGV);
  while (rule->action == "hang") sleep(1);
  if (rule->action == "slow") usleep(rule->argument);
  return rule->action != "refuse";
}

void forget_records() {
  Lock lock(mutex);
  if (records.size() > 4096) records.clear();
}

}  // namespace

EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t descriptor,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              const cublasLtMatmulAlgo_t* algo,
                                              cublasLtMatmulHeuristicResult_t* result) {
  forget_records();
  if (!before(rule_for("check", *unwrap(algo)))) return CUBLAS_STATUS_NOT_SUPPORTED;
  return plain_algo_check(handle, descriptor, a, b, c, d, algo, result);
}

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t descriptor,
                                     const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t a_layout, const void* b,
                                     cublasLtMatrixLayout_t b_layout, const void* beta,
                                     const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                                     cublasLtMatrixLayout_t d_layout,
                                     const cublasLtMatmulAlgo_t* algo, void* workspace,
                                     size_t workspace_bytes, cudaStream_t stream) {
  forget_records();
  const Rule* rule = rule_for("run", *unwrap(algo));
  if (!before(rule)) return CUBLAS_STATUS_NOT_SUPPORTED;
  const cublasStatus_t status =
      plain_matmul(handle, descriptor, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d,
                   d_layout, algo, workspace, workspace_bytes, stream);
  if (status == CUBLAS_STATUS_SUCCESS && rule && rule->action == "wrong") {
    const Layout& out = *unwrap(d_layout);
    const size_t last = (out.columns - 1) * out.leading_dimension + out.rows - 1;
    const size_t bytes = out.type == CUDA_R_32F ? 4 : 2;
    static_cast<unsigned char*>(d)[last * bytes] ^= 1;
  }
  return status;
}
