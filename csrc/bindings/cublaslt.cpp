// Python module `_cublaslt`: the planner and cuBLASLt's own answers, on raw pointers, without
// torch.
//
// For people who explore algorithms, and for tests that need no GPU: device properties are given,
// not asked. Results are dicts and lists; every status is a name. Problems, algorithms and pins are
// objects with keyword constructors and `as_dict`, so that they travel to child processes.

#include <cublasLt.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "cublaslt/faults.h"
#include "cublaslt/operation.h"
#include "cublaslt/plan.h"

namespace py = pybind11;
using namespace py::literals;
namespace lt = nvfp4::cublaslt;

namespace {

// A plan that no rung chose: the caller named its algorithm.
constexpr const char* kExplicitRung = "cublaslt-explicit";

using Unlocked = py::call_guard<py::gil_scoped_release>;

template <typename Pointer>
Pointer pointer(uintptr_t address) {
  return reinterpret_cast<Pointer>(address);
}

py::dict to_dict(const lt::DeviceInfo& device) {
  return py::dict("index"_a = device.index, "cc_major"_a = device.cc_major,
                  "cc_minor"_a = device.cc_minor, "sm_count"_a = device.sm_count);
}

py::dict to_dict(const lt::Algorithm& a) {
  return py::dict("id"_a = a.id, "tile"_a = a.tile, "stages"_a = a.stages, "split_k"_a = a.split_k,
                  "reduction"_a = a.reduction, "swizzle"_a = a.swizzle, "custom"_a = a.custom,
                  "inner"_a = a.inner, "cluster"_a = a.cluster);
}

py::dict to_dict(const lt::Problem& p) {
  const py::object bias = p.bias ? py::object(py::str(lt::name(*p.bias))) : py::none();
  return py::dict("type"_a = lt::name(p.type), "m"_a = p.m, "n"_a = p.n, "k"_a = p.k,
                  "lda"_a = p.lda, "ldb"_a = p.ldb, "ldd"_a = p.ldd, "out"_a = lt::name(p.out),
                  "bias"_a = bias, "alpha"_a = lt::name(p.alpha), "alignment"_a = p.alignment,
                  "workspace_limit"_a = p.workspace_limit, "device"_a = to_dict(p.device),
                  "skip_pins"_a = p.skip_pins);
}

py::dict to_dict(const lt::Pin& pin) {
  return py::dict("type"_a = lt::name(pin.type), "cc_major"_a = pin.cc_major,
                  "cc_minor"_a = pin.cc_minor, "sm_count"_a = pin.sm_count,
                  "version_min"_a = pin.version_min, "version_max"_a = pin.version_max,
                  "m_min"_a = pin.m_min, "m_max"_a = pin.m_max, "n"_a = pin.n, "k"_a = pin.k,
                  "algorithm"_a = to_dict(pin.algorithm), "fills_chip"_a = pin.fills_chip,
                  "evidence"_a = pin.evidence);
}

std::shared_ptr<const lt::Plan> explicit_plan(const lt::Answer& answer) {
  auto plan = std::make_shared<lt::Plan>();
  plan->rung = kExplicitRung;
  plan->algorithm = answer.algorithm;
  plan->workspace_bytes = answer.workspace_bytes;
  plan->waves = answer.waves;
  plan->executable = answer.executable;
  return plan;
}

// `plan` is there to be run, where the answer was yes.
py::dict to_dict(const lt::Answer& answer) {
  return py::dict("ok"_a = answer.ok(), "status"_a = answer.status, "reason"_a = answer.reason,
                  "algorithm"_a = to_dict(answer.algorithm),
                  "workspace_bytes"_a = answer.workspace_bytes, "waves"_a = answer.waves,
                  "plan"_a = answer.ok() ? py::cast(explicit_plan(answer)) : py::none());
}

py::list to_list(const lt::Plan& plan) {
  py::list refusals;
  for (const lt::Refusal& refusal : plan.refusals) {
    refusals.append(py::make_tuple(refusal.rung, refusal.reason));
  }
  return refusals;
}

lt::DeviceInfo make_device(int cc_major, int cc_minor, int sm_count, int index) {
  return {index, cc_major, cc_minor, sm_count};
}

lt::Problem make_problem(const std::string& type, int64_t m, int64_t n, int64_t k,
                         const lt::DeviceInfo& device, std::optional<int64_t> lda,
                         std::optional<int64_t> ldb, std::optional<int64_t> ldd,
                         const std::string& out, const std::optional<std::string>& bias,
                         const std::string& alpha, uint32_t alignment, size_t workspace_limit,
                         bool skip_pins) {
  if (alignment == 0 || alignment > lt::kMaxAlignment || (alignment & (alignment - 1)) != 0) {
    throw std::invalid_argument("alignment must be a power of two up to 256, got " +
                                std::to_string(alignment));
  }
  lt::Problem p;
  p.type = lt::parse_element_type(type);
  p.m = m;
  p.n = n;
  p.k = k;
  p.lda = lda.value_or(k);
  p.ldb = ldb.value_or(k);
  p.ldd = ldd.value_or(n);
  p.out = lt::parse_out_type("out", out);
  if (bias) p.bias = lt::parse_out_type("bias", *bias);
  p.alpha = lt::parse_pointer_mode(alpha);
  p.alignment = alignment;
  p.workspace_limit = workspace_limit;
  p.device = device;
  p.skip_pins = skip_pins;
  return p;
}

lt::Algorithm make_algorithm(int id, int tile, int stages, int split_k, int reduction, int swizzle,
                             int custom, std::optional<int> inner, std::optional<int> cluster) {
  return {id, tile, stages, split_k, reduction, swizzle, custom, inner, cluster};
}

lt::Pin make_pin(const lt::Algorithm& algorithm, int cc_major, int cc_minor,
                 const std::string& type, int sm_count, size_t version_min, size_t version_max,
                 int64_t m_min, int64_t m_max, int64_t n, int64_t k, bool fills_chip,
                 const std::string& evidence) {
  lt::Pin pin;
  pin.cc_major = cc_major;
  pin.cc_minor = cc_minor;
  pin.sm_count = sm_count;
  pin.version_min = version_min;
  pin.version_max = version_max;
  pin.type = lt::parse_element_type(type);
  pin.m_min = m_min;
  pin.m_max = m_max;
  pin.n = n;
  pin.k = k;
  pin.algorithm = algorithm;
  pin.fills_chip = fills_chip;
  pin.evidence = evidence;
  return pin;
}

// The addresses of one launch. Made once and run many times, so that a timing loop in Python calls
// little besides cublasLtMatmul.
struct Launch {
  lt::Operands operands;
  float alpha;
  float beta = 0;
  void* stream;
};

Launch make_launch(uintptr_t a, uintptr_t b, uintptr_t d, uintptr_t a_scale, uintptr_t b_scale,
                   uintptr_t bias, float alpha, uintptr_t alpha_pointer, uintptr_t beta_pointer,
                   uintptr_t workspace, size_t workspace_bytes, uintptr_t stream) {
  Launch launch;
  launch.alpha = alpha;
  launch.stream = pointer<void*>(stream);
  launch.operands = {pointer<const void*>(a),
                     pointer<const void*>(b),
                     pointer<const void*>(a_scale),
                     pointer<const void*>(b_scale),
                     pointer<const void*>(bias),
                     pointer<const void*>(alpha_pointer),
                     pointer<const void*>(beta_pointer),
                     pointer<void*>(d),
                     pointer<void*>(workspace),
                     workspace_bytes};
  return launch;
}

std::string run(const lt::Plan& plan, const Launch& launch) {
  lt::Operands operands = launch.operands;
  const bool device_alpha = operands.alpha != nullptr;
  if (plan.ok() && device_alpha != (plan.executable->problem.alpha == lt::PointerMode::kDevice)) {
    throw std::invalid_argument(device_alpha
                                    ? "the plan takes alpha on the host, got alpha_pointer"
                                    : "the plan takes alpha on the device, got no alpha_pointer");
  }
  if (!device_alpha) {
    operands.alpha = &launch.alpha;
    operands.beta = &launch.beta;
  }
  return lt::run(plan, operands, launch.stream);
}

// The ladder as the ops walk it: a launch that is refused retires its plan and the next one is
// tried. Returns the plan that ran; raises with every refusal where none did.
std::shared_ptr<const lt::Plan> matmul(lt::Planner& planner, const lt::Problem& problem,
                                       const Launch& launch) {
  while (true) {
    auto plan = planner.plan(problem);
    if (!plan->ok()) throw std::runtime_error(lt::to_text(plan->refusals));
    const std::string reason = run(*plan, launch);
    if (reason.empty()) return plan;
    planner.retire(problem, *plan, reason);
  }
}

py::dict library_dict(const lt::Planner& planner) {
  return py::dict("version"_a = planner.version(),
                  "version_text"_a = lt::version_text(planner.version()), "path"_a = planner.path(),
                  "unavailable"_a = planner.unavailable(), "header_version"_a = CUBLAS_VERSION);
}

void bind_values(py::module_& m) {
  py::class_<lt::DeviceInfo>(m, "DeviceInfo")
      .def(py::init(&make_device), "cc_major"_a, "cc_minor"_a, "sm_count"_a, "index"_a = 0)
      .def_readonly("index", &lt::DeviceInfo::index)
      .def_readonly("cc_major", &lt::DeviceInfo::cc_major)
      .def_readonly("cc_minor", &lt::DeviceInfo::cc_minor)
      .def_readonly("sm_count", &lt::DeviceInfo::sm_count)
      .def("as_dict", [](const lt::DeviceInfo& self) { return to_dict(self); });

  py::class_<lt::Problem>(m, "Problem",
                          "D (m, n) = out(alpha * A (m, k) @ B (n, k).T + bias), row-major, "
                          "leading dimensions in elements.")
      .def(py::init(&make_problem), "type"_a, "m"_a, "n"_a, "k"_a, "device"_a, py::kw_only(),
           "lda"_a = py::none(), "ldb"_a = py::none(), "ldd"_a = py::none(), "out"_a = "bf16",
           "bias"_a = py::none(), "alpha"_a = "host", "alignment"_a = lt::kMaxAlignment,
           "workspace_limit"_a = 0, "skip_pins"_a = false)
      .def("as_dict", [](const lt::Problem& self) { return to_dict(self); });

  py::class_<lt::Algorithm>(m, "Algorithm")
      .def(py::init(&make_algorithm), py::kw_only(), "id"_a, "tile"_a, "stages"_a, "split_k"_a = 1,
           "reduction"_a = 0, "swizzle"_a = 0, "custom"_a = 0, "inner"_a = py::none(),
           "cluster"_a = py::none())
      .def_readwrite("id", &lt::Algorithm::id)
      .def_readwrite("tile", &lt::Algorithm::tile)
      .def_readwrite("stages", &lt::Algorithm::stages)
      .def_readwrite("split_k", &lt::Algorithm::split_k)
      .def_readwrite("reduction", &lt::Algorithm::reduction)
      .def_readwrite("swizzle", &lt::Algorithm::swizzle)
      .def_readwrite("custom", &lt::Algorithm::custom)
      .def_readwrite("inner", &lt::Algorithm::inner)
      .def_readwrite("cluster", &lt::Algorithm::cluster)
      .def("as_dict", [](const lt::Algorithm& self) { return to_dict(self); })
      .def("__eq__", [](const lt::Algorithm& a, const lt::Algorithm& b) { return a == b; })
      .def("__repr__", [](const lt::Algorithm& self) { return lt::to_text(self); });

  py::class_<lt::Pin>(m, "Pin", "A row of the pin table; 0 means any, for sm_count, m_max, n, k.")
      .def(py::init(&make_pin), "algorithm"_a, "cc_major"_a, "cc_minor"_a, py::kw_only(),
           "type"_a = "nvfp4", "sm_count"_a = 0, "version_min"_a = lt::Pin{}.version_min,
           "version_max"_a = lt::Pin{}.version_max, "m_min"_a = 1, "m_max"_a = 0, "n"_a = 0,
           "k"_a = 0, "fills_chip"_a = false, "evidence"_a = "")
      .def_static("parse", &lt::parse_pin, "text"_a)
      .def_readwrite("from_file", &lt::Pin::from_file)
      .def("as_dict", [](const lt::Pin& self) { return to_dict(self); })
      .def("__eq__", [](const lt::Pin& a, const lt::Pin& b) { return a == b; })
      .def("__str__", [](const lt::Pin& self) { return lt::to_text(self); });
}

void bind_plan(py::module_& m) {
  py::class_<lt::Plan, std::shared_ptr<lt::Plan>> plan(m, "Plan");
  plan.def_property_readonly("ok", &lt::Plan::ok)
      .def_property_readonly("rung",
                             [](const lt::Plan& self) -> std::optional<std::string> {
                               if (!self.ok()) return std::nullopt;
                               return self.rung;
                             })
      .def_property_readonly("algorithm",
                             [](const lt::Plan& self) -> py::object {
                               if (!self.ok()) return py::none();
                               return to_dict(self.algorithm);
                             })
      .def_readonly("workspace_bytes", &lt::Plan::workspace_bytes)
      .def_readonly("waves", &lt::Plan::waves)
      .def_readonly("evidence", &lt::Plan::evidence)
      .def_property_readonly("refusals", [](const lt::Plan& self) { return to_list(self); })
      .def("to_json", [](const lt::Plan& self, const lt::Problem& problem) {
        return lt::plan_to_json(problem, self);
      });
  plan.def(
      "run",
      [](const lt::Plan& self, const Launch& operands) {
        const std::string reason = run(self, operands);
        if (!reason.empty()) throw std::runtime_error(reason);
      },
      "operands"_a, Unlocked(),
      "Enqueue. RuntimeError with the status name where cuBLASLt refuses, ValueError where the "
      "operands don't fit the plan.");

  py::class_<Launch>(m, "Operands",
                     "Addresses as integers, 0 where there is none. alpha is a host value unless "
                     "alpha_pointer and beta_pointer (a zero) give device addresses.")
      .def(py::init(&make_launch), py::kw_only(), "a"_a, "b"_a, "d"_a, "a_scale"_a = 0,
           "b_scale"_a = 0, "bias"_a = 0, "alpha"_a = 1.0f, "alpha_pointer"_a = 0,
           "beta_pointer"_a = 0, "workspace"_a = 0, "workspace_bytes"_a = 0, "stream"_a = 0);
}

void bind_planner(py::module_& m) {
  py::class_<lt::Planner> planner(m, "Planner");
  planner
      .def(py::init([](const std::string& library, const std::string& policy) {
             return std::make_unique<lt::Planner>(library, lt::parse_policy(policy));
           }),
           "library"_a = "", "policy"_a = "validated",
           "A planner of one's own, over the library at that path.")
      .def(
          "plan",
          [](lt::Planner& self, const lt::Problem& problem) {
            return std::const_pointer_cast<lt::Plan>(self.plan(problem));
          },
          "problem"_a, Unlocked())
      .def(
          "cached",
          [](lt::Planner& self, const lt::Problem& problem) {
            return std::const_pointer_cast<lt::Plan>(self.cached(problem));
          },
          "problem"_a)
      .def("retire", &lt::Planner::retire, "problem"_a, "plan"_a, "reason"_a)
      .def("clear", &lt::Planner::clear)
      .def(
          "reset",
          [](lt::Planner& self, const std::string& policy) {
            self.reset(lt::parse_policy(policy));
          },
          "policy"_a = "validated")
      .def("pin", &lt::Planner::pin, "pin"_a)
      .def("unpin", &lt::Planner::unpin, "pin"_a)
      .def_property_readonly("pins", &lt::Planner::pins)
      .def_property(
          "policy", [](const lt::Planner& self) { return lt::name(self.policy()); },
          [](lt::Planner& self, const std::string& text) {
            self.set_policy(lt::parse_policy(text));
          })
      .def_property_readonly("library", &library_dict)
      .def_property_readonly("heuristic_queries", &lt::Planner::heuristic_queries)
      .def(
          "check",
          [](lt::Planner& self, const lt::Problem& problem, const lt::Algorithm& algorithm) {
            return to_dict(self.check(problem, algorithm));
          },
          "problem"_a, "algorithm"_a,
          "AlgoInit, every attribute, AlgoCheck: a dict with the status, and a plan to run.")
      .def(
          "heuristic",
          [](lt::Planner& self, const lt::Problem& problem, int count) {
            std::string reason;
            py::list answers;
            for (const lt::Answer& answer : self.heuristic(problem, count, &reason)) {
              answers.append(to_dict(answer));
            }
            return py::dict("reason"_a = reason, "answers"_a = answers);
          },
          "problem"_a, "count"_a = 8)
      .def(
          "algorithm_ids",
          [](lt::Planner& self, const lt::Problem& problem) {
            std::string reason;
            const std::vector<int> ids = self.algorithm_ids(problem, &reason);
            return py::dict("reason"_a = reason, "ids"_a = ids);
          },
          "problem"_a)
      .def(
          "capabilities",
          [](lt::Planner& self, const lt::Problem& problem, int algorithm_id) {
            std::string reason;
            py::dict values;
            for (const auto& [name, value] : self.capabilities(problem, algorithm_id, &reason)) {
              values[py::str(name)] = value;
            }
            return py::dict("reason"_a = reason, "values"_a = values);
          },
          "problem"_a, "algorithm_id"_a)
      .def(
          "matmul",
          [](lt::Planner& self, const lt::Problem& problem, const Launch& operands) {
            return std::const_pointer_cast<lt::Plan>(matmul(self, problem, operands));
          },
          "problem"_a, "operands"_a, Unlocked(),
          "Plan and run, retiring what a launch refuses. Returns the plan that ran.");
}

}  // namespace

PYBIND11_MODULE(_cublaslt, m) {
  m.doc() = "cuBLASLt as nvfp4_linear plans it: enumerate, check, plan and run on raw pointers.";
  bind_values(m);
  bind_plan(m);
  bind_planner(m);
  m.def("planner", &lt::planner, py::return_value_policy::reference,
        "This module's process-wide planner, with the policy of NVFP4_PIN_POLICY.");
  m.def("studied_pin", &lt::studied_pin, py::return_value_policy::copy);
  m.def("out_of_range", &lt::out_of_range, "algorithm"_a, "library_version"_a,
        "Empty, or the attribute that this version of cuBLASLt must not be given.");
  m.def(
      "known_fault",
      [](const lt::Problem& problem, const std::optional<lt::Algorithm>& algorithm,
         size_t version) {
        return lt::known_fault(problem, algorithm ? &*algorithm : nullptr, version);
      },
      "problem"_a, "algorithm"_a, "library_version"_a);
  m.def("heuristic_breaks_capture", &lt::heuristic_breaks_capture, "library_version"_a);
  m.def("tile_name", &lt::tile_name, "tile"_a);
  m.def("stages_name", &lt::stages_name, "stages"_a);
  m.def("cluster_name", &lt::cluster_name, "cluster"_a);
  m.def("inner_name", &lt::inner_name, "inner"_a);
  m.attr("HEADER_VERSION") = CUBLAS_VERSION;
  m.attr("TILE_END") = static_cast<int>(CUBLASLT_MATMUL_TILE_END);
  m.attr("STAGES_END") = static_cast<int>(CUBLASLT_MATMUL_STAGES_END);
  m.attr("CLUSTER_END") = static_cast<int>(CUBLASLT_CLUSTER_SHAPE_END);
  m.attr("INNER_END") = static_cast<int>(CUBLASLT_MATMUL_INNER_SHAPE_END);
}
