// Runs a program that `dlsys.infer(model, ctx=...).save_program(folder, batch)` wrote, without
// Python: reads the plan, lays out memory, and calls the kernels of libdlsys.so through its C API.
// python/dlsys/inference/save.py describes the two files.
//
//   cc -O2 -Isrc/include run_program.c python/dlsys/libdlsys.so -Wl,-rpath,$PWD/python/dlsys -o run
//   ./run FOLDER INPUT... OUTPUT... [RUNS]     raw row-major files, one for each input and output
//
// With RUNS it runs so many times more, as one captured graph on a GPU, and prints the time of one.
#include <dlsys.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WORD = 256 };

typedef struct {
  long nbytes;
  void* data;
} Block;

typedef struct {
  DLContext device;
  DLStream stream;
  long nblocks, narrays, ninputs, noutputs, nsteps, nvalues;
  Block* blocks;
  DLArray* arrays;
  DLArray **inputs, **outputs;
  DLStep* steps;
  DLValue* values;
} Program;

static void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  exit(1);
}

static void check(int status) {
  if (status) fail("%s", DLGetLastError());
}

static void* allocate(long count, size_t nbytes) {
  void* made = count < 0 || count > 1L << 32 ? NULL : calloc(count ? count : 1, nbytes);
  if (!made) fail("plan.txt: no memory for %ld records", count);
  return made;
}

static FILE* open_file(const char* folder, const char* name, const char* mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s%s%s", folder, *folder ? "/" : "", name);
  FILE* file = fopen(path, mode);
  if (!file) fail("%s cannot be opened", path);
  return file;
}

static const char* word(FILE* file) {
  static char text[WORD];
  if (fscanf(file, "%255s", text) != 1) fail("plan.txt ends too early");
  return text;
}

static long integer(FILE* file) {
  char* end;
  const char* text = word(file);
  const long value = strtol(text, &end, 10);
  if (*end) fail("plan.txt: expected an integer, got '%s'", text);
  return value;
}

static long integer_below(FILE* file, long end, const char* what) {
  const long value = integer(file);
  if (value < 0 || value >= end) fail("plan.txt: %s %ld is not one of %ld", what, value, end);
  return value;
}

static long count(FILE* file, const char* what) {
  const char* text = word(file);
  if (strcmp(text, what)) fail("plan.txt: expected '%s', got '%s'", what, text);
  return integer(file);
}

static DLArray* array(Program* p, FILE* file) {
  return p->arrays + integer_below(file, p->narrays, "array");
}

static void read_blocks(Program* p, FILE* file) {
  p->blocks = allocate(p->nblocks = count(file, "blocks"), sizeof(Block));
  for (long k = 0; k < p->nblocks; k++) {
    p->blocks[k].nbytes = integer(file);
    word(file);  // its kind: the first block is that of the weights
    check(DLMemoryAlloc(p->device, p->blocks[k].nbytes, p->stream, &p->blocks[k].data));
  }
}

static long nbytes_of(const DLArray* a) {
  static const long itemsize[] = {4, 8, 4, 8, 1, 1, 2, 2};  // by dtype, as in dlsys.h
  long n = itemsize[a->dtype];
  for (int k = 0; k < a->ndim; k++) n *= a->shape[k];
  return n;
}

static void read_arrays(Program* p, FILE* file) {
  p->arrays = allocate(p->narrays = count(file, "arrays"), sizeof(DLArray));
  for (long k = 0; k < p->narrays; k++) {
    DLArray* a = p->arrays + k;
    const Block* block = p->blocks + integer_below(file, p->nblocks, "block");
    const long start = integer(file);
    a->ctx = p->device;
    a->dtype = integer_below(file, DL_FLOAT16 + 1, "dtype");
    a->ndim = integer_below(file, DL_MAX_NDIM + 1, "number of dimensions");
    a->shape = allocate(a->ndim, sizeof(int64_t));
    for (int d = 0; d < a->ndim; d++) a->shape[d] = integer_below(file, 1L << 40, "extent");
    if (start < 0 || nbytes_of(a) > block->nbytes - start) fail("plan.txt: array %ld overflows", k);
    a->data = (char*)block->data + start;
  }
}

static DLArray** read_ports(Program* p, FILE* file, const char* what, long* n) {
  DLArray** made = allocate(*n = count(file, what), sizeof *made);
  for (long k = 0; k < *n; k++) {
    word(file);  // its name
    made[k] = array(p, file);
  }
  return made;
}

static int kernel_number(Program* p, const char* name, const char* signature, long dtype) {
  const char* device = p->device.device_type == DL_GPU ? "cuda" : "cpu";
  int64_t n;
  const DLKernelEntry* table = DLKernelTable(&n);
  for (int k = 0; k < n; k++)
    if (!strcmp(table[k].device, device) && !strcmp(table[k].name, name) &&
        table[k].dtype == dtype && !strncmp(table[k].sig, signature, strlen(signature)))
      return k;
  fail("the library has no kernel %s (%s) for dtype %ld on %s", name, signature, dtype, device);
  return -1;
}

static void* read_list(Program* p, FILE* file) {
  DLArrayList* list = allocate(1, sizeof *list);
  DLArray** arrays = allocate(list->count = integer(file), sizeof *arrays);
  for (long k = 0; k < list->count; k++) arrays[k] = array(p, file);
  list->arrays = arrays;
  return list;
}

static void* read_bytes(FILE* file) {
  DLBytes* bytes = allocate(1, sizeof *bytes);
  unsigned char* data = allocate(bytes->nbytes = integer(file), 1);
  if (!bytes->nbytes) word(file);
  for (long k = 0; k < bytes->nbytes; k++)
    if (fscanf(file, " %2hhx", data + k) != 1) fail("plan.txt: expected %ld bytes", bytes->nbytes);
  bytes->data = data;
  return bytes;
}

static DLValue read_value(Program* p, FILE* file) {
  DLValue value = {0};
  switch (word(file)[0]) {
    case 'i':
    case 'o':
      value.p = array(p, file);
      break;
    case 'I':
    case 'O':
      value.p = read_list(p, file);
      break;
    case 'b':
      value.p = read_bytes(file);
      break;
    case 'l':
      value.i = integer(file);
      break;
    case 'f':
      value.f = strtof(word(file), NULL);
      break;
    default:
      fail("plan.txt: unknown kind of argument");
  }
  return value;
}

static void read_steps(Program* p, FILE* file) {
  p->steps = allocate(p->nsteps = count(file, "steps"), sizeof(DLStep));
  for (long k = 0; k < p->nsteps; k++) {
    char name[WORD], signature[WORD];
    strcpy(name, word(file));
    strcpy(signature, word(file));
    const int kernel = kernel_number(p, name, signature, integer(file));
    const long n = integer_below(file, WORD, "number of arguments");
    p->steps[k] = (DLStep){kernel, p->nvalues, n, 0};
    p->values = realloc(p->values, (p->nvalues + n + 1) * sizeof(DLValue));
    for (long j = 0; j < n; j++) p->values[p->nvalues++] = read_value(p, file);
  }
}

static void check_interface(const char* hash) {
  uint64_t made = 0xcbf29ce484222325;  // FNV-1a
  for (const char* c = DLInterface(); *c; c++) made = (made ^ (unsigned char)*c) * 0x100000001b3;
  if (made != strtoull(hash, NULL, 16)) fail("plan.txt is of another version of the library");
}

static void read_program(Program* p, const char* folder) {
  FILE* file = open_file(folder, "plan.txt", "r");
  if (count(file, "dlsys-program") != 1) fail("plan.txt is of another version of the format");
  check_interface(word(file));
  p->device = (DLContext){0, strcmp(word(file), "cuda") ? DL_CPU : DL_GPU};
  check(DLStreamCreate(p->device, &p->stream));
  read_blocks(p, file);
  read_arrays(p, file);
  p->inputs = read_ports(p, file, "inputs", &p->ninputs);
  p->outputs = read_ports(p, file, "outputs", &p->noutputs);
  read_steps(p, file);
  fclose(file);
}

static void copy_in(Program* p, const char* folder, const char* name, void* to, long nbytes) {
  const DLContext host = {0, DL_CPU};
  FILE* file = open_file(folder, name, "rb");
  char* data = allocate(nbytes + 1, 1);
  if ((long)fread(data, 1, nbytes + 1, file) != nbytes) fail("%s: not %ld bytes", name, nbytes);
  check(DLMemoryCopy(to, p->device, data, host, nbytes, p->stream));
  free(data);
  fclose(file);
}

static void copy_out(Program* p, const char* path, const DLArray* a) {
  const DLContext host = {0, DL_CPU};
  const long nbytes = nbytes_of(a);
  char* data = allocate(nbytes, 1);
  check(DLMemoryCopy(data, host, a->data, p->device, nbytes, p->stream));
  FILE* file = open_file("", path, "wb");
  if ((long)fwrite(data, 1, nbytes, file) != nbytes || fclose(file)) fail("%s: disk full", path);
  free(data);
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void time_runs(Program* p, DLProgram* program, long runs) {
  DLGraph* graph = NULL;
  if (p->device.device_type == DL_GPU)
    check(DLProgramCapture(program, p->device, p->stream, NULL, 0, NULL, 0, NULL, &graph));
  const double start = seconds();
  for (long k = 0; k < runs; k++)
    check(graph ? DLGraphReplay(graph, p->stream, 1) : DLProgramRun(program, p->stream));
  check(DLStreamSynchronize(p->device, p->stream));
  printf("%.3f us a run\n", 1e6 * (seconds() - start) / runs);
  if (graph) check(DLGraphFree(graph));
}

int main(int argc, char** argv) {
  Program p = {0};
  DLProgram* program;
  if (argc < 2) fail("usage: %s FOLDER INPUT... OUTPUT... [RUNS]", argv[0]);
  read_program(&p, argv[1]);
  const long files = p.ninputs + p.noutputs;
  if (argc != 2 + files && argc != 3 + files)
    fail("expected %ld inputs and %ld outputs as files", p.ninputs, p.noutputs);
  copy_in(&p, argv[1], "weights.bin", p.blocks[0].data, p.blocks[0].nbytes);
  for (long k = 0; k < p.ninputs; k++)
    copy_in(&p, "", argv[2 + k], p.inputs[k]->data, nbytes_of(p.inputs[k]));
  check(DLProgramCreate(p.steps, p.nsteps, p.values, p.nvalues, &program));
  check(DLProgramRun(program, p.stream));
  for (long k = 0; k < p.noutputs; k++) copy_out(&p, argv[2 + p.ninputs + k], p.outputs[k]);
  if (argc == 3 + files) time_runs(&p, program, atol(argv[argc - 1]));
  check(DLProgramFree(program));
  return 0;
}
