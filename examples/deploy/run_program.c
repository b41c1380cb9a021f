// Runs a program that `dlsys.infer(model, ctx=...).save_program(folder, batch)` wrote, without
// Python, through dlsys_program.h.
//
//   cc -O2 -Isrc/include run_program.c python/dlsys/libdlsys.so -Wl,-rpath,$PWD/python/dlsys -o run
//   ./run FOLDER INPUT... OUTPUT... [RUNS]     raw row-major files, one for each input and output
//
// With RUNS it runs so many times more, as one captured graph on a GPU, and prints the time of one.
#include <dlsys_program.h>
#include <time.h>

static int fail(const char* text) {
  fprintf(stderr, "%s\n", text);
  return 1;
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int time_runs(DLSavedProgram* p, long runs) {
  const double start = seconds();
  for (long k = 0; k < runs; k++)
    if (DLSavedProgramReplay(p)) return DL_ERROR;
  if (DLSavedProgramWait(p)) return DL_ERROR;
  printf("%.3f us a run\n", 1e6 * (seconds() - start) / runs);
  return DL_OK;
}

static int run(DLSavedProgram* p, char** files, const char* runs) {
  for (long k = 0; k < p->ninputs; k++) {
    DLArray* x = p->inputs[k];
    if (DLSavedProgramLoad(p, "", files[k], x->data, DLArrayNbytes(x))) return DL_ERROR;
  }
  if (DLSavedProgramRun(p)) return DL_ERROR;
  for (long k = 0; k < p->noutputs; k++)
    if (DLSavedProgramStore(p, files[p->ninputs + k], p->outputs[k])) return DL_ERROR;
  return runs ? time_runs(p, atol(runs)) : DL_OK;
}

int main(int argc, char** argv) {
  DLSavedProgram p;
  char text[128];
  if (argc < 2) return fail("usage: run FOLDER INPUT... OUTPUT... [RUNS]");
  if (DLSavedProgramOpen(&p, argv[1])) return fail(p.error);
  const long files = p.ninputs + p.noutputs;
  if (argc == 2 + files || argc == 3 + files) {
    run(&p, argv + 2, argc == 3 + files ? argv[argc - 1] : NULL);
  } else {
    snprintf(text, sizeof text, "expected %ld inputs and %ld outputs as files", (long)p.ninputs,
             (long)p.noutputs);
    DLProgramFail(&p, "%s", text);
  }
  const int failed = *p.error != 0;
  if (failed) fail(p.error);
  DLSavedProgramClose(&p);
  return failed;
}
