// Writes what NVTX would show: a line for each range that begins (+ name) and that ends (-), to the
// file named by NVTX_LISTENER_OUT. NVTX loads it itself, see NVTX_INJECTION64_PATH.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>

namespace {

FILE* out = nullptr;
int depth = 0;

int Push(const char* name) {
  fprintf(out, "+ %s\n", name);
  fflush(out);
  return depth++;
}

int Pop() {
  fprintf(out, "-\n");
  fflush(out);
  return --depth;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_table) {
  const char* path = getenv("NVTX_LISTENER_OUT");
  const auto* callbacks = (const NvtxExportTableCallbacks*)get_table(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (!path || !callbacks ||
      !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) ||
      size <= NVTX_CBID_CORE_RangePop || !(out = fopen(path, "w")))
    return 0;
  *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)Push;
  *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)Pop;
  return 1;
}
