// Reads and runs programs that `dlsys.infer(model, ctx=...).save_program(folder, batch)` wrote, in
// C and without Python: a header alone, over the C ABI of dlsys.h. python/dlsys/inference/save.py
// has the format.
//
//   DLSavedProgram program;
//   if (DLSavedProgramOpen(&program, "folder")) puts(program.error);
//
// Functions return a status, 0 when all went well, and leave what went wrong in `error`. Inputs and
// outputs are arrays of the program's device. A folder is trusted as a program is: arrays lie
// inside their blocks, which is checked, but kernels do what the plan says.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlsys.h"

enum { DL_PROGRAM_WORD = 256, DL_PROGRAM_ERROR = 512 };

typedef struct DLSavedBlock {
  int64_t nbytes;
  void* data;
} DLSavedBlock;

typedef struct DLSavedProgram {
  DLContext device;
  DLStream stream;
  int64_t ninputs, noutputs;
  DLArray **inputs, **outputs;
  DLProgram* program;
  DLGraph* graph;  // of a GPU, captured by the first call of DLSavedProgramReplay
  char error[DL_PROGRAM_ERROR];
  // ---- of the reader ----
  FILE* file;
  int64_t nblocks, narrays, nsteps, nvalues, nheld;
  DLSavedBlock* blocks;
  DLArray* arrays;
  DLStep* steps;
  DLValue* values;
  void** held;  // what was allocated
  char word[DL_PROGRAM_WORD];
} DLSavedProgram;

// Notes the first thing that went wrong. After it the reader reads nothing: every word is empty and
// every number 0.
static inline int DLProgramFail(DLSavedProgram* p, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  if (!*p->error) vsnprintf(p->error, sizeof p->error, format, arguments);
  va_end(arguments);
  return DL_ERROR;
}

static inline int DLProgramCheck(DLSavedProgram* p, int status) {
  return status ? DLProgramFail(p, "%s", DLGetLastError()) : DL_OK;
}

// Zeroed memory that DLSavedProgramClose frees; null after a failure.
static inline void* DLProgramAllocate(DLSavedProgram* p, int64_t count, size_t nbytes) {
  if (*p->error) return NULL;
  void** held = (void**)realloc(p->held, (size_t)(p->nheld + 1) * sizeof *held);
  if (held) p->held = held;
  void* made = !held || count < 0 || count > (int64_t)1 << 32 ? NULL : calloc(count + 1, nbytes);
  if (made)
    p->held[p->nheld++] = made;
  else
    DLProgramFail(p, "plan.txt: no memory for %ld records", (long)count);
  return made;
}

// ---- words ----

static inline const char* DLProgramWord(DLSavedProgram* p) {
  *p->word = 0;
  if (!*p->error && fscanf(p->file, "%255s", p->word) != 1)
    DLProgramFail(p, "plan.txt ends too early");
  return p->word;
}

static inline int64_t DLProgramInteger(DLSavedProgram* p) {
  char* end;
  const char* word = DLProgramWord(p);
  const long value = strtol(word, &end, 10);
  if (*end) DLProgramFail(p, "plan.txt: expected an integer, got '%s'", word);
  return *p->error ? 0 : value;
}

static inline int64_t DLProgramBelow(DLSavedProgram* p, int64_t end, const char* what) {
  const int64_t value = DLProgramInteger(p);
  if (value >= 0 && value < end) return value;
  DLProgramFail(p, "plan.txt: %s %ld is not one of %ld", what, (long)value, (long)end);
  return 0;
}

static inline int64_t DLProgramCount(DLSavedProgram* p, const char* what) {
  const char* word = DLProgramWord(p);
  if (strcmp(word, what)) DLProgramFail(p, "plan.txt: expected '%s', got '%s'", what, word);
  return DLProgramInteger(p);
}

// ---- memory ----

static inline void DLProgramReadBlocks(DLSavedProgram* p) {
  const int64_t count = DLProgramCount(p, "blocks");
  p->blocks = (DLSavedBlock*)DLProgramAllocate(p, count, sizeof *p->blocks);
  for (int64_t k = 0; !*p->error && k < count; k++) {
    DLSavedBlock* block = p->blocks + k;
    block->nbytes = DLProgramInteger(p);
    DLProgramWord(p);  // its kind: the first block is that of the weights
    if (*p->error) return;
    DLProgramCheck(p, DLMemoryAlloc(p->device, block->nbytes, p->stream, &block->data));
    if (!*p->error) p->nblocks++;
  }
}

static inline int64_t DLArrayNbytes(const DLArray* a) {
  static const int64_t itemsize[] = {4, 8, 4, 8, 1, 1, 2, 2};  // by dtype, as in dlsys.h
  int64_t n = itemsize[a->dtype];
  for (int k = 0; k < a->ndim; k++) n *= a->shape[k];
  return n;
}

static inline void DLProgramReadArrays(DLSavedProgram* p) {
  p->narrays = DLProgramCount(p, "arrays");
  p->arrays = (DLArray*)DLProgramAllocate(p, p->narrays, sizeof *p->arrays);
  for (int64_t k = 0; !*p->error && k < p->narrays; k++) {
    DLArray* a = p->arrays + k;
    const int64_t block = DLProgramBelow(p, p->nblocks, "block"), start = DLProgramInteger(p);
    a->ctx = p->device;
    a->dtype = (int32_t)DLProgramBelow(p, DL_FLOAT16 + 1, "dtype");
    a->ndim = (int32_t)DLProgramBelow(p, DL_MAX_NDIM + 1, "number of dimensions");
    a->shape = (int64_t*)DLProgramAllocate(p, a->ndim, sizeof *a->shape);
    for (int d = 0; !*p->error && d < a->ndim; d++)
      a->shape[d] = DLProgramBelow(p, (int64_t)1 << 40, "extent");
    if (*p->error) return;
    if (start < 0 || DLArrayNbytes(a) > p->blocks[block].nbytes - start)
      DLProgramFail(p, "plan.txt: array %ld overflows", (long)k);
    a->data = (char*)p->blocks[block].data + start;
  }
}

static inline DLArray* DLProgramArray(DLSavedProgram* p) {
  const int64_t k = DLProgramBelow(p, p->narrays, "array");
  return *p->error ? NULL : p->arrays + k;
}

static inline DLArray** DLProgramReadPorts(DLSavedProgram* p, const char* what, int64_t* count) {
  const int64_t n = DLProgramCount(p, what);
  DLArray** made = (DLArray**)DLProgramAllocate(p, n, sizeof *made);
  for (*count = 0; !*p->error && *count < n; ++*count) {
    DLProgramWord(p);  // its name
    made[*count] = DLProgramArray(p);
  }
  return made;
}

// ---- steps ----

static inline int32_t DLProgramKernel(DLSavedProgram* p, const char* name, const char* signature,
                                      int64_t dtype) {
  const char* device = p->device.device_type == DL_GPU ? "cuda" : "cpu";
  int64_t n;
  const DLKernelEntry* table = DLKernelTable(&n);
  for (int64_t k = 0; k < n; k++)
    if (!strcmp(table[k].device, device) && !strcmp(table[k].name, name) &&
        table[k].dtype == dtype && !strncmp(table[k].sig, signature, strlen(signature)))
      return (int32_t)k;
  DLProgramFail(p, "the library has no kernel %s (%s) for dtype %ld on %s", name, signature,
                (long)dtype, device);
  return 0;
}

static inline void* DLProgramReadList(DLSavedProgram* p) {
  DLArrayList* list = (DLArrayList*)DLProgramAllocate(p, 1, sizeof *list);
  const int64_t count = DLProgramInteger(p);
  DLArray** arrays = (DLArray**)DLProgramAllocate(p, count, sizeof *arrays);
  for (int64_t k = 0; !*p->error && k < count; k++) arrays[k] = DLProgramArray(p);
  if (*p->error) return NULL;
  list->count = count;
  list->arrays = arrays;
  return list;
}

static inline void* DLProgramReadBytes(DLSavedProgram* p) {
  DLBytes* bytes = (DLBytes*)DLProgramAllocate(p, 1, sizeof *bytes);
  const int64_t count = DLProgramInteger(p);
  unsigned char* data = (unsigned char*)DLProgramAllocate(p, count, 1);
  if (!count) DLProgramWord(p);
  for (int64_t k = 0; !*p->error && k < count; k++)
    if (fscanf(p->file, " %2hhx", data + k) != 1)
      DLProgramFail(p, "plan.txt: expected %ld bytes", (long)count);
  if (*p->error) return NULL;
  bytes->nbytes = count;
  bytes->data = data;
  return bytes;
}

static inline DLValue DLProgramReadValue(DLSavedProgram* p) {
  DLValue value;
  memset(&value, 0, sizeof value);
  switch (*DLProgramWord(p)) {
    case 'i':
    case 'o':
      value.p = DLProgramArray(p);
      break;
    case 'I':
    case 'O':
      value.p = DLProgramReadList(p);
      break;
    case 'b':
      value.p = DLProgramReadBytes(p);
      break;
    case 'l':
      value.i = DLProgramInteger(p);
      break;
    case 'f':
      value.f = strtof(DLProgramWord(p), NULL);
      break;
    default:
      DLProgramFail(p, "plan.txt: unknown kind of argument");
  }
  return value;
}

static inline void DLProgramReadSteps(DLSavedProgram* p) {
  char name[DL_PROGRAM_WORD], signature[DL_PROGRAM_WORD];
  p->nsteps = DLProgramCount(p, "steps");
  p->steps = (DLStep*)DLProgramAllocate(p, p->nsteps, sizeof *p->steps);
  for (int64_t k = 0; !*p->error && k < p->nsteps; k++) {
    strcpy(name, DLProgramWord(p));
    strcpy(signature, DLProgramWord(p));
    const int32_t kernel = DLProgramKernel(p, name, signature, DLProgramInteger(p));
    const int64_t n = DLProgramBelow(p, DL_PROGRAM_WORD, "number of arguments");
    DLValue* values = (DLValue*)realloc(p->values, (size_t)(p->nvalues + n + 1) * sizeof *values);
    if (!values) DLProgramFail(p, "plan.txt: no memory for %ld arguments", (long)n);
    if (*p->error) return;
    p->values = values;
    p->steps[k].kernel = kernel;
    p->steps[k].first = (int32_t)p->nvalues;
    p->steps[k].nargs = (int32_t)n;
    for (int64_t j = 0; j < n; j++) p->values[p->nvalues++] = DLProgramReadValue(p);
  }
}

// ---- the program ----

static inline FILE* DLProgramFile(DLSavedProgram* p, const char* folder, const char* name,
                                  const char* mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s%s%s", folder, *folder ? "/" : "", name);
  FILE* file = fopen(path, mode);
  if (!file) DLProgramFail(p, "%s cannot be opened", path);
  return file;
}

// Fills memory of the program's device from a file of so many bytes; folder may be "".
static inline int DLSavedProgramLoad(DLSavedProgram* p, const char* folder, const char* name,
                                     void* to, int64_t nbytes) {
  const DLContext host = {0, DL_CPU};
  FILE* file = DLProgramFile(p, folder, name, "rb");
  char* data = (char*)malloc((size_t)nbytes + 1);
  if (file && data) {
    if ((int64_t)fread(data, 1, (size_t)nbytes + 1, file) != nbytes)
      DLProgramFail(p, "%s: not %ld bytes", name, (long)nbytes);
    else
      DLProgramCheck(p, DLMemoryCopy(to, p->device, data, host, nbytes, p->stream));
  } else if (file) {
    DLProgramFail(p, "%s: no memory for %ld bytes", name, (long)nbytes);
  }
  free(data);
  if (file) fclose(file);
  return *p->error ? DL_ERROR : DL_OK;
}

// Frees all that a program holds.
static inline void DLSavedProgramClose(DLSavedProgram* p) {
  if (p->graph) DLGraphFree(p->graph);
  if (p->program) DLProgramFree(p->program);
  for (int64_t k = 0; k < p->nblocks; k++) DLMemoryFree(p->device, p->blocks[k].data);
  for (int64_t k = 0; k < p->nheld; k++) free(p->held[k]);
  free(p->held);
  free(p->values);
  if (p->stream) DLStreamFree(p->device, p->stream);
  p->graph = NULL, p->program = NULL, p->nblocks = p->nheld = 0;
  p->held = NULL, p->values = NULL, p->stream = NULL;
}

// Reads a folder: the plan, whose steps become a program, and the weights.
static inline int DLSavedProgramOpen(DLSavedProgram* p, const char* folder) {
  memset(p, 0, sizeof *p);
  p->file = DLProgramFile(p, folder, "plan.txt", "r");
  if (!p->file) return DL_ERROR;
  if (DLProgramCount(p, "dlsys-program") != 1)
    DLProgramFail(p, "plan.txt is of another version of the format");
  uint64_t made = 0xcbf29ce484222325;  // FNV-1a
  for (const char* c = DLInterface(); *c; c++) made = (made ^ (unsigned char)*c) * 0x100000001b3;
  if (made != strtoull(DLProgramWord(p), NULL, 16))
    DLProgramFail(p, "plan.txt is of another version of the library");
  p->device.device_type = strcmp(DLProgramWord(p), "cuda") ? DL_CPU : DL_GPU;
  if (!*p->error) DLProgramCheck(p, DLStreamCreate(p->device, &p->stream));
  DLProgramReadBlocks(p);
  DLProgramReadArrays(p);
  p->inputs = DLProgramReadPorts(p, "inputs", &p->ninputs);
  p->outputs = DLProgramReadPorts(p, "outputs", &p->noutputs);
  DLProgramReadSteps(p);
  fclose(p->file);
  if (!*p->error && !p->nblocks) DLProgramFail(p, "plan.txt: expected a block of weights");
  if (!*p->error)
    DLSavedProgramLoad(p, folder, "weights.bin", p->blocks[0].data, p->blocks[0].nbytes);
  if (!*p->error)
    DLProgramCheck(p, DLProgramCreate(p->steps, p->nsteps, p->values, p->nvalues, &p->program));
  if (!*p->error) return DL_OK;
  DLSavedProgramClose(p);
  return DL_ERROR;
}

// Queues one run on the program's stream, step by step.
static inline int DLSavedProgramRun(DLSavedProgram* p) {
  return DLProgramCheck(p, DLProgramRun(p->program, p->stream));
}

// The same, on a GPU by one launch of a captured graph. One DLSavedProgramRun has to come before.
static inline int DLSavedProgramReplay(DLSavedProgram* p) {
  if (p->device.device_type != DL_GPU) return DLSavedProgramRun(p);
  if (!p->graph && DLProgramCheck(p, DLProgramCapture(p->program, p->device, p->stream, NULL, 0,
                                                      NULL, 0, NULL, &p->graph)))
    return DL_ERROR;
  return DLProgramCheck(p, DLGraphReplay(p->graph, p->stream, 1));
}

// Waits for what was queued.
static inline int DLSavedProgramWait(DLSavedProgram* p) {
  return DLProgramCheck(p, DLStreamSynchronize(p->device, p->stream));
}

// Writes an array of the program's device, once it is there, to a file.
static inline int DLSavedProgramStore(DLSavedProgram* p, const char* path, const DLArray* a) {
  const DLContext host = {0, DL_CPU};
  const int64_t nbytes = DLArrayNbytes(a);
  char* data = (char*)malloc((size_t)nbytes + 1);
  FILE* file = NULL;
  if (!data) return DLProgramFail(p, "%s: no memory for %ld bytes", path, (long)nbytes);
  if (!DLProgramCheck(p, DLMemoryCopy(data, host, a->data, p->device, nbytes, p->stream)))
    file = DLProgramFile(p, "", path, "wb");
  if (file) {
    const int64_t written = (int64_t)fwrite(data, 1, (size_t)nbytes, file);
    if (fclose(file) || written != nbytes) DLProgramFail(p, "%s: disk full", path);
  }
  free(data);
  return *p->error ? DL_ERROR : DL_OK;
}
