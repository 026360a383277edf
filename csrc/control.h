// What algorithms.py asks the planner that the ops use, as torch.ops.nvfp4._control: requests
// `command key=value ...`, answered in JSON.
//
//   explain m= n= k= [a=nvfp4|bfloat16|float16] [b=the same] [out=] [bias=] [alpha=host|device]
//   [alignment=]
//           cc= sm= [device=]           -> route, as JSON
//   backend                             -> the rung that NVFP4_BACKEND forces, or ""
//   fallback PATH                       -> where to look for cuBLASLt after the loader's own places
//   build                               -> version, whether CUDA kernels are in
//   library                             -> which cuBLASLt, or why none
//   policy [value=]                     -> the pin policy, set first where a value is given
//   pins                                -> every pin, newest first, each as its text form
//   pin TEXT / unpin TEXT               -> {"ok": ...}
//   row TEXT                            -> the same as pin, of a pin file
//   clear                               -> forgets plans and retirements
//   queries                             -> how often cuBLASLt's heuristic was asked, ever
//   fault NAME                          -> a deliberate fault, for negative controls: none ends it
//   tile [strips= k_warps= cluster= stages=]
//                                       -> a tile for CUDA planners; without arguments their own
#pragma once

#include <string>

namespace nvfp4 {

std::string control(std::string request);

}  // namespace nvfp4
