#include "control.h"

#include <cstdlib>
#include <map>
#include <sstream>

#include "check.h"
#include "cublaslt/json.h"
#include "cublaslt/library.h"
#include "faults_for_tests.h"
#include "ladder.h"
#include "nvfp4.h"

namespace nvfp4 {
namespace {

using cublaslt::quoted;
using Arguments = std::map<std::string, std::string>;

Arguments parse(const std::string& text) {
  Arguments arguments;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    NVFP4_CHECK(equals != std::string::npos, "control: expected key=value, got '", word, "'");
    arguments[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return arguments;
}

int64_t integer(const Arguments& arguments, const char* key, int64_t fallback) {
  const auto found = arguments.find(key);
  if (found == arguments.end()) return fallback;
  char* end = nullptr;
  const long long value = std::strtoll(found->second.c_str(), &end, 10);
  NVFP4_CHECK(end != found->second.c_str() && *end == '\0', key, " must be an integer, got '",
              found->second, "'");
  return value;
}

std::string text(const Arguments& arguments, const char* key, const char* fallback) {
  const auto found = arguments.find(key);
  return found == arguments.end() ? fallback : found->second;
}

DType parse_type(const std::string& name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kFloat16;
  NVFP4_CHECK(false, "a dtype must be float32, bfloat16 or float16, got '", name, "'");
  return DType::kFloat32;
}

GemmRequest parse_request(const Arguments& arguments) {
  GemmRequest r;
  r.m = integer(arguments, "m", 0);
  r.n = integer(arguments, "n", 0);
  r.k = integer(arguments, "k", 0);
  NVFP4_CHECK(r.m > 0 && r.n > 0 && r.k > 0, "m, n and k must be positive, got ", r.m, ", ", r.n,
              ", ", r.k);
  NVFP4_CHECK(r.k % kBlockSize == 0, "k must be a multiple of ", kBlockSize, ", got ", r.k,
              ": pad K");
  const std::string a = text(arguments, "a", "nvfp4");
  const std::string b = text(arguments, "b", "nvfp4");
  r.dense_a = a != "nvfp4";
  r.dense_b = b != "nvfp4";
  NVFP4_CHECK(!r.dense_a || !r.dense_b, "one operand must be nvfp4, got a=", a, " and b=", b);
  if (r.dense_a || r.dense_b) r.dense_type = parse_type(r.dense_a ? a : b);
  r.a_row_stride = r.b_row_stride = r.k;
  r.out_type = parse_type(text(arguments, "out", "bfloat16"));
  const std::string bias = text(arguments, "bias", "none");
  if (bias != "none") r.bias_type = parse_type(bias);
  r.alpha_on_device = text(arguments, "alpha", "host") == "device";
  r.alignment = static_cast<uint32_t>(integer(arguments, "alignment", cublaslt::kMaxAlignment));
  const int64_t cc = integer(arguments, "cc", 0);  // 10 * major + minor
  r.device = {static_cast<int>(integer(arguments, "device", 0)), static_cast<int>(cc / 10),
              static_cast<int>(cc % 10), static_cast<int>(integer(arguments, "sm", 1))};
  return r;
}

const char* kernel_name(const Route& route) {
  if (route.rung == nullptr) return "none";
  if (route.rung != kEmulatedRung) return "cublasLtMatmul";
  switch (route.kernel) {
    case EmulatedKernel::kSmallM:
      return "gemm_small_m";
    case EmulatedKernel::kSmallMHopper:
      return "gemm_small_m_hopper";
    case EmulatedKernel::kMidM:
      return "gemm_mid_m";
    case EmulatedKernel::kDecode:
      return "decode + cublasLtMatmul";
    case EmulatedKernel::kSlices:
      return "gemm_small_m in slices of rows";
  }
  return "none";
}

void set_fault(const std::string& name) {
  std::string names;
  for (size_t i = 0; i < kFaultNames.size(); ++i) {
    if (name == kFaultNames[i]) return active_fault.store(static_cast<Fault>(i));
    names += concat(i ? ", " : "", kFaultNames[i]);
  }
  NVFP4_CHECK(false, "fault must be one of ", names, ", got '", name, "'");
}

std::string explain(const GemmRequest& r) {
  const Route route = make_route(r);
  std::string list;
  for (const auto& refusal : refusals(r, route)) {
    list += concat(list.empty() ? "" : ", ", "{\"rung\": ", quoted(refusal.rung),
                   ", \"reason\": ", quoted(refusal.reason), "}");
  }
  std::string plan = "null";
  if (route.rung == kEmulatedRung) {
    if (route.chunk_plan) {
      plan = cublaslt::plan_to_json(chunk_problem(r, route, route.m_chunk, route.n_chunk),
                                    *route.chunk_plan);
    }
  } else if (route.rung != nullptr) {
    plan = cublaslt::plan_to_json(route.problem, *route.plan);
  }
  return concat("{\"rung\": ", route.rung ? quoted(route.rung) : "null",
                ", \"kernel\": ", quoted(kernel_name(route)),
                ", \"workspace_bytes\": ", workspace_bytes(r, route),
                ", \"m_chunk\": ", route.m_chunk, ", \"n_chunk\": ", route.n_chunk,
                ", \"plan\": ", plan, ", \"refusals\": [", list, "]}");
}

}  // namespace

std::string control(std::string request) {
  const size_t space = request.find(' ');
  const std::string command = request.substr(0, space);
  const std::string rest = space == std::string::npos ? "" : request.substr(space + 1);
  if (command == "fallback") {
    cublaslt::set_fallback_path(rest);
    return "{\"ok\": true}";
  }
  if (command == "backend") {
    return concat("{\"forced\": ", quoted(std::string(forced_rung())), "}");
  }
  if (command == "build") {
    return concat("{\"version\": ", quoted(NVFP4_VERSION),
                  ", \"cuda\": ", kHasCudaKernels ? "true" : "false", "}");
  }
  auto& planner = cublaslt::planner();
  if (command == "explain") return explain(parse_request(parse(rest)));
  if (command == "library") {
    return concat("{\"version\": ", planner.version(), ", \"path\": ", quoted(planner.path()),
                  ", \"unavailable\": ", quoted(planner.unavailable()), "}");
  }
  if (command == "policy") {
    const Arguments arguments = parse(rest);
    if (arguments.count("value")) planner.set_policy(cublaslt::parse_policy(arguments.at("value")));
    return concat("{\"policy\": ", quoted(cublaslt::name(planner.policy())), "}");
  }
  if (command == "pins") {
    std::string list;
    for (const cublaslt::Pin& pin : planner.pins()) {
      list += (list.empty() ? "" : ", ") + quoted(cublaslt::to_text(pin));
    }
    return concat("{\"pins\": [", list, "]}");
  }
  if (command == "pin" || command == "row") {
    cublaslt::Pin pin = cublaslt::parse_pin(rest);
    pin.from_file = command == "row";
    planner.pin(pin);
    return "{\"ok\": true}";
  }
  if (command == "unpin") {
    return planner.unpin(cublaslt::parse_pin(rest)) ? "{\"ok\": true}" : "{\"ok\": false}";
  }
  if (command == "clear") {
    planner.clear();
    return "{\"ok\": true}";
  }
  if (command == "queries") return concat("{\"heuristic\": ", planner.heuristic_queries(), "}");
  if (command == "fault") {
    set_fault(rest);
    forget_routes();
    return "{\"ok\": true}";
  }
  if (command == "tile") {
    const Arguments tile = parse(rest);
    const auto part = [&](const char* key) { return static_cast<int16_t>(integer(tile, key, 0)); };
    explicit_tile = ExplicitTile{part("strips"), part("k_warps"), part("cluster"), part("stages")};
    forget_routes();
    return "{\"ok\": true}";
  }
  NVFP4_CHECK(false, "control: unknown command '", command, "'");
  return "";
}

}  // namespace nvfp4
