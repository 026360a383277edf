// Pins: rows that say "for problems like this one, on a chip like this one, take that algorithm".
// A row is only ever a proposal: AlgoCheck has the last word (plan.h).

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "algorithm.h"
#include "problem.h"

namespace nvfp4::cublaslt {

struct Pin {
  int cc_major = 0;  // exactly this compute capability
  int cc_minor = 0;
  int sm_count = 0;             // 0: any
  size_t version_min = 130000;  // of cuBLASLt, both inclusive
  size_t version_max = 139999;
  ElementType type = ElementType::kNvfp4;
  int64_t m_min = 1;
  int64_t m_max = 0;  // 0: no end
  int64_t n = 0;      // 0: any that AlgoCheck accepts
  int64_t k = 0;
  Algorithm algorithm;
  // Only where the grid of this tile fills the chip at least once: without split-K a smaller grid
  // leaves multiprocessors idle, and the heuristic knows better.
  bool fills_chip = false;
  std::string evidence;
  // A row of a pin file, which has to bring its evidence; who pins by hand vouches for the pin. Not
  // in its text, and equal pins may differ in it.
  bool from_file = false;

  bool operator==(const Pin& other) const;
};

enum class PinPolicy {
  kValidated,  // rows with evidence for this chip
  kAlways,     // and without, and the study's row on every chip with FP4 tensor cores (cc >= 10)
  kNever
};

// From "validated", "always" or "never"; std::invalid_argument names them for anything else.
PinPolicy parse_policy(const std::string& text);
const char* name(PinPolicy policy);

// The one row this library brings: the configuration the GB10 study validated.
const Pin& studied_pin();

struct Match {
  bool other_problem = false;  // the row is about another element type or shape
  std::string reason;          // empty: the row applies
};
Match match(const Pin& pin, const Problem& problem, size_t library_version, PinPolicy policy);

// One line of `key=value`, as files and the ops binary carry pins; `evidence` comes last and runs
// to the end. Keys left out keep the defaults above. std::invalid_argument names what it can't
// read.
std::string to_text(const Pin& pin);
Pin parse_pin(const std::string& text);

}  // namespace nvfp4::cublaslt
