#include "faults.h"

#include <cstdlib>

#include "library.h"

namespace nvfp4::cublaslt {
namespace {

// Versions are cuBLAS's own (cublasLtGetVersion), which run ahead of the toolkit's: CUDA 13.2 ships
// 13.3.0, 13.4 ships 13.7.0, 13.4 Update 1 ships 13.8.0.
//
// Not in the table, because no choice of ours avoids it: algorithm 66 on 10.x and 11.x before
// 13.1.1 and 13.2.2 may go wrong beside a foreign kernel that uses tensor memory.
struct Fault {
  const char* what;
  bool (*hits)(const Problem& problem, const Algorithm& algorithm, size_t version);
  bool any_algorithm;
};

bool is_b300(const DeviceInfo& device) { return device.cc_major == 10 && device.cc_minor == 3; }
bool is_rubin(const DeviceInfo& device) { return device.cc_major == 10 && device.cc_minor == 7; }

constexpr Fault kFaults[] = {
    {"NVFP4 on compute capability 10.3 with n % 64 != 0 (cuBLASLt's m) gives wrong results before "
     "cuBLASLt 13.3.0",
     [](const Problem& problem, const Algorithm&, size_t version) {
       return version < 130300 && problem.type == ElementType::kNvfp4 && is_b300(problem.device) &&
              problem.n % 64 != 0;
     },
     true},
    {"algorithm 66 with stages 768xAUTO gives wrong NVFP4 results on compute capability 10.3 and "
     "10.7 from cuBLASLt 13.5.1 until 13.6.2, and from 13.7.0 until 13.8.0",
     [](const Problem& problem, const Algorithm& algorithm, size_t version) {
       const bool affected =
           (version >= 130501 && version < 130602) || (version >= 130700 && version < 130800);
       return affected && problem.type == ElementType::kNvfp4 && algorithm.id == 66 &&
              stages_name(algorithm.stages) == "768xAUTO" &&
              (is_b300(problem.device) || is_rubin(problem.device));
     },
     false},
    {"algorithm 66 with a split-K that leaves a remainder of k, and slices that are whole stages, "
     "may give wrong results on compute capability 9.0, 10.x and 11.x before cuBLASLt 13.8.0",
     [](const Problem& problem, const Algorithm& algorithm, size_t version) {
       const int major = problem.device.cc_major;
       const int64_t stage = std::atoi(stages_name(algorithm.stages).c_str());  // 64 of 64xAUTO
       return version < 130800 && algorithm.id == 66 && major >= 9 && major <= 11 &&
              algorithm.split_k != 0 && problem.k % algorithm.split_k != 0 &&
              (stage == 0 || problem.k / algorithm.split_k % stage == 0);
     },
     false},
};

}  // namespace

std::string known_fault(const Problem& problem, const Algorithm* algorithm, size_t version) {
  for (const Fault& fault : kFaults) {
    if (!algorithm && !fault.any_algorithm) continue;
    if (fault.hits(problem, algorithm ? *algorithm : Algorithm{}, version)) {
      return std::string("known fault: ") + fault.what + ", found " + version_text(version);
    }
  }
  return "";
}

bool heuristic_breaks_capture(size_t version) { return version >= 130501 && version < 130601; }

}  // namespace nvfp4::cublaslt
