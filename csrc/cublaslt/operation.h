// One problem in cuBLASLt's terms: descriptors, the questions one can ask about it, the launch.
// Everything that calls cuBLASLt is in operation.cpp; what to do with the answers is in plan.cpp.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "library.h"
#include "plan.h"

namespace nvfp4::cublaslt {

template <typename Descriptor>
using Owned = std::shared_ptr<std::remove_pointer_t<Descriptor>>;
using Handle = Owned<cublasLtHandle_t>;

// Throws CallFailed. The caller has made the device current that the handle is for.
Handle make_handle(const Library& library);

// What cuBLASLt keeps of a problem between planning and every launch. Read only once built, so any
// number of threads may launch from it.
struct Layouts {
  Owned<cublasLtMatrixLayout_t> a, b, d;  // cuBLASLt's A, B and D: see `column_major`
};

struct Executable {
  std::shared_ptr<const Library> library;
  Handle handle;
  Problem problem;
  Layouts layouts;
  cublasLtMatmulAlgo_t algo;
  size_t workspace_bytes;
};

class Operation {
 public:
  // Throws CallFailed where a descriptor can't be made.
  Operation(std::shared_ptr<const Library> library, Handle handle, const Problem& problem);

  // AlgoInit, every attribute, AlgoCheck. Never throws for a refusal.
  Answer check(const Algorithm& algorithm) const;
  // Up to `count` answers, best first, none of them judged beyond cuBLASLt's own status. `reason`
  // says why there are none.
  std::vector<Answer> heuristic(int count, std::string* reason) const;

  std::vector<int> algorithm_ids() const;
  Capabilities capabilities(int algorithm_id) const;

 private:
  cublasLtMatmulAlgo_t init(int algorithm_id) const;
  Answer accepted(const cublasLtMatmulHeuristicResult_t& result, const char* call) const;

  std::shared_ptr<const Library> library_;
  Handle handle_;
  Problem problem_;
  Layouts layouts_;
  Owned<cublasLtMatmulDesc_t> descriptor_;
};

}  // namespace nvfp4::cublaslt
