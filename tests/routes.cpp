// The promise: a remembered route is the one that a fresh search finds, whatever part of a request
// or of the process changes between two calls. Prints what differs.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "control.h"
#include "ladder.h"

namespace {

using nvfp4::DType;
using nvfp4::GemmRequest;
using nvfp4::Route;

int differences = 0, changes = 0;

bool same(const Route& a, const Route& b) {
  return a.rung == b.rung && a.plan == b.plan && a.kernel == b.kernel &&
         a.decoded_type == b.decoded_type && a.chunk_plan == b.chunk_plan &&
         a.m_chunk == b.m_chunk && a.n_chunk == b.n_chunk &&
         a.separate_epilogue == b.separate_epilogue;
}

void compare(const char* what, const GemmRequest& request) {
  if (same(nvfp4::find_route(request), nvfp4::make_route(request))) return;
  ++differences;
  std::printf("%s: another route is remembered than is found\n", what);
}

// After `base` is remembered; and whether the change made any difference.
void changed(const char* what, const GemmRequest& base, const GemmRequest& request) {
  const Route before = nvfp4::find_route(base);
  compare(what, request);
  if (!same(before, nvfp4::make_route(request))) ++changes;
  compare(what, base);
}

}  // namespace

int main() {
  GemmRequest h200;
  h200.m = 16, h200.n = 5376, h200.k = 14336;
  h200.device = {0, 9, 0, 132};
  GemmRequest gb10 = h200;
  gb10.m = 256;
  gb10.device = {0, 12, 1, 48};

  const std::vector<std::pair<const char*, std::function<void(GemmRequest&)>>> fields = {
      {"m", [](auto& r) { r.m = 3000; }},
      {"n", [](auto& r) { r.n = 5377; }},
      {"k", [](auto& r) { r.k = 14352; }},
      {"dense a", [](auto& r) { r.dense_a = true, r.a_row_stride = r.k; }},
      {"dense b", [](auto& r) { r.dense_b = true, r.b_row_stride = r.k; }},
      {"dense type", [](auto& r) { r.dense_a = true, r.dense_type = DType::kFloat16; }},
      {"stride of a", [](auto& r) { r.dense_a = true, r.a_row_stride = r.k + 4; }},
      {"stride of b", [](auto& r) { r.dense_b = true, r.b_row_stride = r.k + 4; }},
      {"output", [](auto& r) { r.out_type = DType::kFloat32; }},
      {"bias", [](auto& r) { r.bias_type = DType::kFloat16; }},
      {"alpha", [](auto& r) { r.alpha_on_device = true; }},
      {"alignment", [](auto& r) { r.alignment = 2; }},
      {"architecture", [](auto& r) { r.device.cc_major = 8; }},
      {"minor", [](auto& r) { r.device.cc_minor = 3; }},
      {"multiprocessors", [](auto& r) { r.device.sm_count = 20; }},
      {"device", [](auto& r) { r.device.index = 1; }},
  };
  for (GemmRequest base : {h200, gb10}) {
    for (const int64_t m : {16, 256, 4096}) {
      base.m = m;
      for (const auto& [name, change] : fields) {
        GemmRequest request = base;
        change(request);
        changed(name, base, request);
        // And beside the same change of the side that is dense.
        GemmRequest dense = base;
        dense.dense_a = true, dense.a_row_stride = base.k;
        request = dense;
        change(request);
        changed(name, dense, request);
      }
    }
  }

  GemmRequest dense = h200;  // no NVFP4 product: emulated
  dense.dense_a = true, dense.a_row_stride = dense.k;
  const auto state = [&](const char* what, const std::function<void()>& change) {
    const GemmRequest requests[] = {h200, gb10, dense};
    std::vector<Route> before;
    for (const GemmRequest& r : requests) before.push_back(nvfp4::find_route(r));
    change();
    bool any = false;
    for (int i = 0; i < 3; ++i) {
      compare(what, requests[i]);
      any |= !same(before[i], nvfp4::make_route(requests[i]));
    }
    if (any) return;
    ++differences;
    std::printf("%s: makes no difference, so this says nothing of it\n", what);
  };
  const auto control = [](const char* text) { return [=] { nvfp4::control(text); }; };
  state("policy", control("policy value=never"));
  state("policy again", control("policy value=always"));
  state("cleared plans", control("clear"));
  state("explicit tile", control("tile strips=1 k_warps=4 cluster=1 stages=5"));
  state("no explicit tile", control("tile strips=0"));
  state("fault", control("fault planner-uncapped"));
  state("no fault", control("fault none"));
  state("backend", [] { setenv("NVFP4_BACKEND", "emulated", 1); });
  state("no backend", [] { unsetenv("NVFP4_BACKEND"); });
  std::printf("%d differences; %d of the changed requests have another route\n", differences,
              changes);
  return differences == 0 && changes > 40 ? 0 : 1;
}
