// Ranges through NVTX with DLSYS_NVTX=1: Nsight Systems shows each step by its kernel's name.
//
// NVTX 3 is headers alone; without them in the toolkit there are no ranges. A program that is
// replayed as a CUDA graph makes its ranges once, when it is captured.
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

#include <cstdlib>
#include <cstring>

#include "runtime/nvtx_ranges.h"

namespace dlsys {
namespace cuda {
namespace {

constexpr RangeMarker kNvtx = {[](const char* name) { nvtxRangePushA(name); },
                               [] { nvtxRangePop(); }};

[[maybe_unused]] const bool marked = [] {
  const char* nvtx = getenv("DLSYS_NVTX");
  if (nvtx && strcmp(nvtx, "1") == 0) range_marker = &kNvtx;
  return true;
}();

}  // namespace
}  // namespace cuda
}  // namespace dlsys
#endif
