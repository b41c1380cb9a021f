// Single kernel calls, and programs: lists of kernel calls that are checked once and run many
// times.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "runtime/nvtx_ranges.h"
#include "runtime/registry.h"
#include "runtime/workspace.h"

struct DLProgram {
  struct Step {
    const char* name;
    void (*invoke)(const DLValue*, DLStream);
    const DLValue* values;
    const DLArray* workspace;  // null for none
    int32_t place;
  };
  std::vector<Step> steps;
  std::string device;  // the device column of every step's kernel, "" for a program without steps
  int64_t failed_step = -1;
};

struct DLGraph {
  std::unique_ptr<dlsys::CapturedGraph> captured;
};

namespace dlsys {
namespace {

// Arguments that a caller gives: the stream is not among them.
int64_t Arity(const DLKernelEntry& kernel) { return (int64_t)strcspn(kernel.sig, "s"); }

void CheckStep(int64_t k, const DLStep& step, const DLKernelEntry& kernel, int64_t nvalues) {
  const int64_t arity = Arity(kernel);
  if (step.nargs != arity && step.nargs != arity + 1)
    Fail("step %ld (%s): %d arguments given, its signature \"%s\" takes %ld and a workspace",
         (long)k, kernel.name, step.nargs, kernel.sig, (long)arity);
  if (step.first < 0 || (int64_t)step.first + step.nargs > nvalues)
    Fail("step %ld (%s): its arguments %d to %ld lie outside the %ld values given", (long)k,
         kernel.name, step.first, (long)step.first + step.nargs - 1, (long)nvalues);
}

// The array behind a step's arguments, if there is one.
const DLArray* WorkspaceAmong(const DLStep& step, const DLKernelEntry& kernel,
                              const DLValue* values) {
  return step.nargs > Arity(kernel) ? (const DLArray*)NotNull(values[step.nargs - 1].p) : nullptr;
}

void Invoke(void (*invoke)(const DLValue*, DLStream), const DLValue* values,
            const DLArray* workspace, DLStream stream) {
  const int64_t nbytes = workspace ? Numel(workspace) * DtypeNbytes(workspace->dtype) : 0;
  const Workspace::Planned planned(workspace ? workspace->data : nullptr, nbytes);
  invoke(values, stream);
}

void AddSteps(DLProgram* program, const DLStep* steps, int64_t nsteps, const DLValue* values,
              int64_t nvalues) {
  program->steps.reserve(nsteps);
  for (int64_t k = 0; k < nsteps; k++) {
    const DLKernelEntry& kernel = KernelAt(steps[k].kernel);
    CheckStep(k, steps[k], kernel, nvalues);
    if (k == 0) program->device = kernel.device;
    if (program->device != kernel.device)
      Fail(
          "step %ld (%s): runs on %s, but the steps before it run on %s; a program keeps to one "
          "device",
          (long)k, kernel.name, kernel.device, program->device.c_str());
    const DLValue* own = values + steps[k].first;
    program->steps.push_back(
        {kernel.name, kernel.invoke, own, WorkspaceAmong(steps[k], kernel, own), steps[k].place});
  }
}

struct Running {
  DLProgram* program;
  DLStream stream;
};

void RunStep(DLProgram* program, int64_t k, DLStream stream) {
  const DLProgram::Step& step = program->steps[k];
  program->failed_step = k;
  const Range range(step.name);
  const Place place(step.place);
  Invoke(step.invoke, step.values, step.workspace, stream);
}

void RunOne(void* state, int64_t k) {
  auto* s = (Running*)state;
  RunStep(s->program, k, s->stream);
}

void CheckProgram(const DLProgram* program) {
  if (!program) Fail("null program argument");
}

void CheckStreams(const DLGraphStreams& streams, int64_t tasks) {
  if (!streams.stream || streams.nwaits < 0 || (streams.nwaits && !streams.waits))
    Fail("DLProgramCapture: null argument or negative count in the graph streams");
  for (int64_t t = 0; t < tasks; t++)
    if (streams.stream[t] < 0 || streams.stream[t] >= tasks)
      Fail("DLProgramCapture: task %ld is in graph stream %d of %ld", (long)t, streams.stream[t],
           (long)tasks);
  for (int64_t k = 0; k < streams.nwaits; k++) {
    const int32_t task = streams.waits[2 * k], earlier = streams.waits[2 * k + 1];
    const int32_t before = k ? streams.waits[2 * k - 2] : 0;
    if (task < before || task >= tasks || earlier < 0 || earlier >= task)
      Fail("DLProgramCapture: task %d cannot wait for task %d, of %ld", task, earlier, (long)tasks);
  }
}

const Device& DeviceOf(const char* function, const DLProgram* program, DLContext ctx) {
  const Device& device = FindDevice(ctx.device_type);
  if (program->device != device.name)
    Fail("%s: the program runs on %s, the context given is on %s", function,
         program->device.c_str(), device.name);
  return device;
}

}  // namespace

}  // namespace dlsys

using namespace dlsys;

DLSYS_API int DLKernelCall(const DLStep* step, const DLValue* values, int64_t nvalues,
                           DLStream stream) {
  return Guard([&] {
    if (!step || !values) Fail("DLKernelCall: null argument");
    const DLKernelEntry& kernel = KernelAt(step->kernel);
    CheckStep(0, *step, kernel, nvalues);
    const Place place(step->place);
    const DLValue* own = values + step->first;
    Invoke(kernel.invoke, own, WorkspaceAmong(*step, kernel, own), stream);
  });
}

DLSYS_API int DLKernelFits(int64_t kernel, const DLValue* values, int64_t* fits) {
  return Guard([&] {
    const DLKernelEntry& entry = KernelAt(kernel);
    if (!values || !fits) Fail("DLKernelFits: %s: null argument", entry.name);
    *fits = 1;
    if (!entry.fits) return;
    try {
      *fits = entry.fits(values);
    } catch (const Error& error) {
      if (error.status != DL_ERROR) throw;
      *fits = 0;
    }
  });
}

DLSYS_API int DLKernelWorkspace(int64_t kernel, const DLValue* values, int64_t* nbytes) {
  return Guard([&] {
    const DLKernelEntry& entry = KernelAt(kernel);
    if (!values || !nbytes) Fail("DLKernelWorkspace: %s: null argument", entry.name);
    const Workspace::Query query;
    entry.invoke(values, nullptr);
    *nbytes = query.nbytes();
  });
}

DLSYS_API int DLProgramCreate(const DLStep* steps, int64_t nsteps, const DLValue* values,
                              int64_t nvalues, DLProgram** out) {
  return Guard([&] {
    if (nsteps < 0 || nvalues < 0 || !out || (nsteps && !steps) || (nvalues && !values))
      Fail("DLProgramCreate: null argument or negative count");
    auto program = std::make_unique<DLProgram>();
    AddSteps(program.get(), steps, nsteps, values, nvalues);
    *out = program.release();
  });
}

DLSYS_API int DLProgramRun(DLProgram* program, DLStream stream) {
  return Guard([&] {
    CheckProgram(program);
    const int64_t n = (int64_t)program->steps.size();
    for (int64_t k = 0; k < n; k++) RunStep(program, k, stream);
    program->failed_step = -1;
  });
}

DLSYS_API int DLProgramProfile(DLProgram* program, DLContext ctx, DLStream stream, double* ms) {
  return Guard([&] {
    CheckProgram(program);
    if (program->steps.empty()) return;
    if (!ms) Fail("DLProgramProfile: null ms argument");
    const Device& device = DeviceOf("DLProgramProfile", program, ctx);
    Running state{program, stream};
    device.profile(ctx.device_id, stream, (int64_t)program->steps.size(), RunOne, &state, ms);
    program->failed_step = -1;
    if (device.raise_fault) device.raise_fault(ctx.device_id);
  });
}

DLSYS_API int64_t DLProgramFailedStep(const DLProgram* program) {
  return program ? program->failed_step : -1;
}

DLSYS_API int DLProgramCapture(DLProgram* program, DLContext ctx, DLStream stream,
                               const DLCopy* inputs, int64_t ninputs, const DLCopy* outputs,
                               int64_t noutputs, const DLGraphStreams* streams, DLGraph** out) {
  return Guard([&] {
    CheckProgram(program);
    if (!out || ninputs < 0 || noutputs < 0 || (ninputs && !inputs) || (noutputs && !outputs))
      Fail("DLProgramCapture: null argument or negative count");
    const Device& device = DeviceOf("DLProgramCapture", program, ctx);
    if (!device.capture)
      FailWith(DL_UNAVAILABLE, "DLProgramCapture: programs of %s are not captured", device.name);
    const int64_t count = (int64_t)program->steps.size();
    if (streams) CheckStreams(*streams, count + 2);
    Running state{program, stream};
    auto made = std::make_unique<DLGraph>();
    made->captured =
        device.capture(ctx.device_id, stream,
                       {count, RunOne, &state, inputs, ninputs, outputs, noutputs, streams});
    program->failed_step = -1;
    *out = made.release();
  });
}

DLSYS_API int DLGraphReplay(DLGraph* graph, DLStream stream, int64_t times) {
  return Guard([&] {
    if (!graph) Fail("DLGraphReplay: null graph argument");
    graph->captured->Replay(stream, times);
  });
}

DLSYS_API int DLGraphReplayAndWait(DLGraph* graph, DLStream stream) {
  return Guard([&] {
    if (!graph) Fail("DLGraphReplayAndWait: null graph argument");
    graph->captured->Replay(stream, 1);
    graph->captured->Wait();
  });
}

DLSYS_API int DLGraphDescribe(const DLGraph* graph, DLGraphInfo* out) {
  return Guard([&] {
    if (!graph || !out) Fail("DLGraphDescribe: null argument");
    graph->captured->Describe(out);
  });
}

DLSYS_API int DLGraphFree(DLGraph* graph) {
  return Guard([&] { delete graph; });
}

DLSYS_API int DLProgramFree(DLProgram* program) {
  return Guard([&] { delete program; });
}
