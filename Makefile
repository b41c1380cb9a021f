# dlsys: `make mnist` trains, `make test` tests; `make help` lists the rest.
#
# PYTHON=python3.12  the interpreter that makes .venv
# VENV=              use PYTHON itself and install nothing
# CUDA=off           leave the CUDA device out
# TEST_JOBS=3        processes of tests, as many as cores otherwise
# ARGS=...           arguments for mnist, test, test-gpu and bench
# V=1                print the compilers' command lines

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
LIB ?= python/dlsys/libdlsys.so
CUDA ?= auto
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
TEST_JOBS ?= $(JOBS)
ARGS ?=
Q := $(if $(V),,@)

# The architectures of a wheel; the last one is also kept as PTX for the chips to come.
WHEEL_ARCHS ?= 75 80 86 89 90a 100 120
TEST_ARCH := 90a

# A value as one word of the shell, whatever characters it has. Files of this folder go by relative
# paths, since make itself splits what has blanks, and the folder may have any name.
quoted = '$(subst ','\'',$(1))'
absolute = $(if $(filter /%,$(1)),$(1),"$$PWD"/$(1))

# The native library is for Linux: elsewhere it is tried only with a CXX on the command line.
SYSTEM ?= $(shell uname -s)
ifneq ($(SYSTEM),Linux)
CXX :=
else ifeq ($(origin CXX),default)
CXX := $(shell for c in g++ clang++ c++; do command -v $$c >/dev/null && echo $$c && break; done)
endif
ifneq ($(VENV),)
RUN := $(VENV)/bin/python
READY = $(VENV)/.ready-$(1)
else
RUN = PYTHONPATH="$$PWD/python$${PYTHONPATH:+:$$PYTHONPATH}" $(call quoted,$(PYTHON))
READY =
endif
SUBMAKE = $(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j$(JOBS))
TOOLCHAIN = $(call quoted,$(or $(if $(VENV),$(wildcard $(VENV)/bin/python)),$(PYTHON))) \
  python/dlsys/runtime/toolchain.py

# Asked for only where needed, and once: these start processes.
NVCC = $(eval NVCC := $$(shell $$(TOOLCHAIN) nvcc))$(NVCC)
CUDA_INCLUDE = $(eval CUDA_INCLUDE := $$(shell $$(TOOLCHAIN) include))$(CUDA_INCLUDE)
CUDA_LIBS = $(eval CUDA_LIBS := $$(shell $$(TOOLCHAIN) libs))$(CUDA_LIBS)
NCCL_INCLUDE = $(eval NCCL_INCLUDE := $$(shell $$(TOOLCHAIN) nccl))$(NCCL_INCLUDE)
GPU_ARCHS = $(eval GPU_ARCHS := $$(shell \
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
  grep -E '^[0-9]+\.[0-9]+$$$$' | tr -d . | sed 's/^90$$$$/90a/' | sort -u))$(GPU_ARCHS)
# nvcc has a shell of its own for the paths of what it compiles, and puts them between double quotes.
OBEYED := $(shell case "$$PWD$$TMPDIR" in (*[\"\$$\`\\]*) echo yes;; esac)
ifneq ($(OBEYED)$(filter off,$(CUDA)),)
NVCC :=
GPU_ARCHS :=
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two installations into one environment must not overlap; the native build runs one level down.
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif
.PHONY: help mnist test test-full test-quick test-gpu test-emulated emulator interface asan ready libraries shared-libraries test-library nvvm architectures asan-library ubsan tsan fuzz fuzz-campaign soak onnx lib optional-lib native cxx wheel lint format docs gallery bench clean FORCE

help:
	@echo "make mnist      train the MLP on MNIST on the best device here"
	@echo "make test       build what this machine can build and run all tests, the longest on some cases"
	@echo "make test-full  all of them on all of their cases, and those of the GPU on an emulated one"
	@echo "make test-quick the library alone, no slow test, no large array: under a minute on 2 cores"
	@echo "make test-gpu   the same on a GPU; a skipped test is a failure"
	@echo "make emulator   the native library with a GPU that the CPU emulates, to try kernels without one"
	@echo "make test-emulated  the tests of the GPU on it"
	@echo "make asan       the tests of the CPU kernels under AddressSanitizer; EMULATED=1 and the GPU's"
	@echo "make ubsan      the same under UndefinedBehaviorSanitizer; make tsan under ThreadSanitizer"
	@echo "make fuzz       random operators, files, options, kills, new draws; SECONDS=600 SEED=1 ARGS=operators"
	@echo "make soak       100,000 training steps of Tensors, whose memory must stay flat; ARGS=--device gpu"
	@echo "make onnx       every operator as an ONNX file elsewhere, onnx's backend tests here, damaged files"
	@echo "make lib        the native library for this machine: CPU, and its GPU if nvcc is found"
	@echo "make wheel      a wheel for every supported GPU, in dist/"
	@echo "make architectures  every CUDA file to nvcc's intermediate language, for each GPU of a wheel"
	@echo "make lint       ruff, mypy, clang-format; make format mends what they can mend"
	@echo "make docs       the site of docs/ with the reference, in $(BUILD)/docs, to be read offline"
	@echo "make gallery    the pictures of docs/gallery.md, in some minutes on two cores; ARGS=style one of them"
	@echo "make bench      the benchmarks; with PEERS=1 against PyTorch and JAX, which it installs"
	@echo "make clean      remove everything that make made, .venv too"

# ---- what a person runs ----

mnist: $(call READY,run)
	+@$(SUBMAKE) optional-lib
	$(RUN) mnist_dlsys.py -m mlp -l --hints $(ARGS)

test: $(call READY,test) test-library
	@$(RUN) tests/run.py -j $(TEST_JOBS) --sample $(ARGS)

# Every case of every test, the GPU's on an emulated one, where the others take a sample.
test-full: $(call READY,test) test-library emulator
	@status=0; $(RUN) tests/run.py -j $(TEST_JOBS) $(ARGS) || status=1; \
	DLSYS_LIBRARY=$(call absolute,$(EMULATED_LIB)) \
	  $(RUN) tests/run.py -j $(TEST_JOBS) --needs gpu $(ARGS) || status=1; \
	exit $$status

# Without a GPU the CUDA files are still compiled, so that a broken one is seen.
test-library:
	+@$(SUBMAKE) $(if $(CXX),native,no-lib) $(if $(CXX),$(if $(NVCC),$(if $(GPU_ARCHS),,nvvm)))

# What .ci/run needs. The sanitized library shares no object with the others and is made beside them,
# so that no core waits for the last object of one.
libraries:
	+@$(SUBMAKE) shared-libraries asan-library
shared-libraries:
	+@$(SUBMAKE) test-library
	+@$(SUBMAKE) emulator
FOR_CI := lint,docs,test
ready: $(call READY,$(FOR_CI))
	@$(if $(VENV),touch $(call READY,lint) $(call READY,docs) $(call READY,test))

# All tests but those that are marked slow (tests/support/devices.py), such as whole trainings, installations
# and kills, and but the rows of the operator table with large arrays.
test-quick: $(call READY,test)
	+@$(SUBMAKE) optional-lib
	@$(RUN) tests/run.py -j $(TEST_JOBS) --quick $(ARGS)

test-gpu: $(call READY,test)
	@$(if $(GPU_ARCHS),,echo "make test-gpu: nvidia-smi shows no GPU on this machine"; exit 1)
	+@$(SUBMAKE) lib
	@DLSYS_REQUIRE_GPU=1 DLSYS_TEST_LARGE=1 $(RUN) tests/run.py -j $(TEST_JOBS) $(ARGS)

# The tests that need a GPU, by what is noted in their code, on one that the CPU emulates
# (src/emulator/): what its kernels compute, not how fast.
EMULATED_LIB := $(BUILD)/emulated/libdlsys.so
emulator: cxx
	+@$(SUBMAKE) native EMULATED=1 CUDA=off LIB=$(EMULATED_LIB)

# What src/ declares and Python reads; after a change to it.
interface: native
	@$(RUN) -m dlsys.runtime.interface $(LIB)

test-emulated: $(call READY,test) emulator
	@DLSYS_LIBRARY=$(call absolute,$(EMULATED_LIB)) \
	  $(RUN) tests/run.py -j $(TEST_JOBS) --needs gpu --sample $(ARGS)

# Every buffer has a block of its own and of its true size, so that each overrun is seen. With
# EMULATED=1 those of the GPU's kernels too. Frames of the sanitizer's own stack, which it takes to
# see uses after a return, are not aligned for vectors of 64 bytes. Leaks of the library are counted
# when the tests are done (tests/support/leaks.py); they are found where Python allocates with malloc.
# The loops of all sanitized libraries are compiled for this processor alone: no other version runs.
ONE_ISA := -march=native -DDLSYS_ONE_ISA
# Checks that are calls compile in half the time of those that are inlined, and code that is not
# optimized in half of that again, which only long loops miss. Nor has anything to be inlined where
# one version is compiled.
CHECKS := --param asan-instrumentation-with-call-threshold=0 -Dalways_inline=unused
ASAN_LEVEL ?= $(if $(LONG_LOOPS),-O1,-O0)
ASAN_TESTS ?= test_operators test_operator_limits test_gpu_op test_state
ASAN_LIB := $(BUILD)/asan$(if $(EMULATED),-emulated)/libdlsys.so
asan: $(call READY,test) asan-library
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=leak_check_at_exit=0:allocator_may_return_null=1:detect_stack_use_after_return=0 \
	  PYTHONMALLOC=malloc DLSYS_DEBUG_ARENA=separate \
	  DLSYS_LIBRARY=$(call absolute,$(ASAN_LIB)) $(RUN) tests/run.py -j $(TEST_JOBS) $(ASAN_TESTS)

asan-library: cxx
	+@$(SUBMAKE) native CUDA=off BUILD=$(BUILD)/asan LIB=$(ASAN_LIB) EMULATED=$(EMULATED) \
	  CXX_LEVEL='$(value ASAN_LEVEL)' EMULATED_LEVEL='$$(CXX_LEVEL)' \
	  CXXFLAGS="-g1 -fsanitize=address $(CHECKS) -fno-omit-frame-pointer $(ONE_ISA)" \
	  LDFLAGS=-fsanitize=address

# Undefined arithmetic, shifts, bounds and alignment; the first of them ends the run.
UBSAN_TESTS ?= $(ASAN_TESTS)
UBSAN_LIB := $(BUILD)/ubsan$(if $(EMULATED),-emulated)/libdlsys.so
ubsan: $(call READY,test)
	+@$(SUBMAKE) native CUDA=off BUILD=$(BUILD)/ubsan LIB=$(UBSAN_LIB) EMULATED=$(EMULATED) \
	  CXXFLAGS="-O1 -g -fsanitize=undefined -fno-sanitize-recover=all -fno-omit-frame-pointer $(ONE_ISA)" \
	  LDFLAGS=-fsanitize=undefined
	@UBSAN_OPTIONS=print_stacktrace=1 DLSYS_DEBUG_ARENA=separate \
	  DLSYS_LIBRARY=$(abspath $(UBSAN_LIB)) $(RUN) tests/run.py $(UBSAN_TESTS)

# Several threads even where there is one core. The interpreter and numpy are not instrumented: what
# their own threads do is theirs. Addresses as the tool wants them: setarch -R.
TSAN_TESTS ?= $(ASAN_TESTS) test_runtime test_prefetch
TSAN_LIB := $(BUILD)/tsan$(if $(EMULATED),-emulated)/libdlsys.so
tsan: $(call READY,test)
	+@$(SUBMAKE) native CUDA=off BUILD=$(BUILD)/tsan LIB=$(TSAN_LIB) EMULATED=$(EMULATED) \
	  CXXFLAGS="-O1 -g -fsanitize=thread -fno-omit-frame-pointer $(ONE_ISA)" LDFLAGS=-fsanitize=thread
	@LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" DLSYS_THREADS=4 OPENBLAS_NUM_THREADS=1 \
	  TSAN_OPTIONS="halt_on_error=0 exitcode=66 report_signal_unsafe=0 ignore_noninstrumented_modules=1:die_after_fork=0" \
	  DLSYS_LIBRARY=$(abspath $(TSAN_LIB)) \
	  setarch $$(uname -m) -R env $(RUN) tests/run.py $(TSAN_TESTS)

# SECONDS=... of all generators together; without ARGS, the tests that draw their cases do so anew
# then, which takes half a minute; SEED=... draws the same again; ARGS=... names of
# generators and further options: $(PYTHON) tests/fuzz --help. PEERS=1 installs PyTorch.
FUZZ_READY := $(call READY,test) $(if $(PEERS),$(call READY,peers))
fuzz: $(FUZZ_READY)
	+@$(SUBMAKE) optional-lib
	@status=0; \
	$(RUN) tests/fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(ARGS) || status=1; \
	$(if $(ARGS),,DLSYS_TEST_SEED=$(or $(SEED),drawn) DLSYS_TENSOR_PROGRAMS=2000 $(RUN) tests/run.py -j $(TEST_JOBS) --drawn || status=1;) \
	exit $$status

# The counts of docs/reliability.md, in about 25 minutes on two cores; ARGS=--sanitizers theirs.
fuzz-campaign: $(FUZZ_READY)
	+@$(SUBMAKE) optional-lib
	@status=0; $(RUN) benchmarks reliability $(if $(SEED),--seed $(SEED)) $(ARGS) || status=1; \
	  $(RUN) benchmarks table; exit $$status

# Less than a minute on one core; the status is not 0 where memory grows.
soak: $(call READY,run)
	+@$(SUBMAKE) lib
	@$(RUN) benchmarks soak $(ARGS)

# Some minutes on one core; the status is not 0 where a runtime gives something else.
onnx: $(call READY,test)
	@$(RUN) benchmarks onnx_export $(ARGS)
	@$(RUN) benchmarks onnx_backend
	@$(RUN) benchmarks onnx_mutations

bench: $(call READY,$(if $(PEERS),peers,run))
	+@$(SUBMAKE) lib
	$(RUN) benchmarks $(ARGS)

NATIVE_FILES := $(foreach e,h cc cu cuh,$(wildcard src/*.$(e) src/*/*.$(e) src/*/*/*.$(e) src/*/*/*/*.$(e))) \
  $(wildcard examples/*/*.c)

lint: $(call READY,lint)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy python/dlsys mnist_dlsys.py
	$(if $(VENV),$(VENV)/bin/)clang-format --dry-run -Werror $(NATIVE_FILES)

format: $(call READY,lint)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(if $(VENV),$(VENV)/bin/)clang-format -i $(NATIVE_FILES)

# A warning, such as of a link that leads nowhere, is an error.
docs: $(call READY,docs)
	@rm -rf $(BUILD)/docs
	@$(RUN) -m sphinx -W --keep-going -q -E -c docs/site -d $(BUILD)/docs-trees docs $(BUILD)/docs
	@$(RUN) docs/site/check.py $(BUILD)/docs
	@echo "docs: $(BUILD)/docs/index.html"

# Without a network and without a GPU; ARGS=names of works, --device gpu.
gallery: $(call READY,test)
	+@$(SUBMAKE) optional-lib
	@$(RUN) docs/site/gallery.py $(ARGS)

wheel: $(call READY,run)
	@$(if $(NVCC),,echo "make wheel: no nvcc; install one with $(RUN) -m pip install '.[gpu]'"; exit 1)
	+@$(SUBMAKE) native LIB=$(BUILD)/wheel/libdlsys.so CUDA_ARCHS="$(WHEEL_ARCHS)" \
	  CUDA_PTX=$(lastword $(WHEEL_ARCHS))
	DLSYS_BUILD_LIBRARY=$(call absolute,$(BUILD)/wheel/libdlsys.so) \
	  $(RUN) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls -l dist

clean:
	rm -rf $(VENV) $(BUILD) dist python/*.egg-info $(LIB) .mypy_cache .ruff_cache .pytest_cache
	find $(wildcard python tests benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the Python environment: one stamp for each set of extras ----

$(VENV)/bin/python:
	$(call quoted,$(PYTHON)) -m venv --clear $(VENV)

$(VENV)/.ready-%: $(VENV)/bin/python pyproject.toml setup.py
	@echo "installing dlsys into $(VENV) ($*)"
	@DLSYS_BUILD_LIBRARY=none $(VENV)/bin/python -m pip install --quiet \
	  --disable-pip-version-check --no-compile --editable '.$(patsubst [run],,[$*])'
	@touch $@

# ---- the native library ----
# Objects go to the linker directly: through an archive the kernels' registrations would be dropped.

CXXFLAGS ?=
CXX_LEVEL ?= -O3
NVCCFLAGS ?=
NVCC_LEVEL := -O3
LDFLAGS ?=
BASE_CXXFLAGS := -std=c++17 -fPIC -pthread -Isrc -fno-math-errno -fno-trapping-math \
  -fvisibility=hidden -fvisibility-inlines-hidden -Wall -Wextra
BASE_NVCCFLAGS = -std=c++17 $(NVCC_LEVEL) -Isrc -Xfatbin -compress-all --threads $(JOBS) $(GENCODE) \
  -DDLSYS_CUDA_ARCHS=\"$(ARCH_TEXT)\" $(if $(CUDA_INCLUDE),-I$(call quoted,$(CUDA_INCLUDE))) -ccbin $(CXX) \
  -Xcompiler -fPIC,-pthread,-fvisibility=hidden,-fvisibility-inlines-hidden,-Wall,-Wextra

# With EMULATED=1 src/cuda/ becomes C++, over the GPU of src/emulator/; the rest is compiled once for
# both libraries. Kernels look at threadIdx all the time, which GNU's dialect finds in half the time.
EMULATED ?=
EMULATED_CXXFLAGS = -Isrc/emulator $(BASE_CXXFLAGS) -march=native -ffp-contract=off \
  $(if $(findstring clang,$(CXX)),,-mtls-dialect=gnu2) -fno-strict-aliasing -Wno-unknown-pragmas \
  -Wno-unused-parameter -Wno-sign-compare -DDLSYS_EMULATED -DDLSYS_CUDA_ARCHS=\"emulated\"
# Tests run long loops in products, convolutions and attention, of which those of sm_90 are in
# src/emulator/tensor_cores.cc; the rest compiles in half the time.
LONG_LOOPS = $(if $(findstring hopper,$<)$(findstring flash,$<),,$(strip \
  $(foreach room,gemm conv attention quantized,$(findstring /$(room)/,$<))))
EMULATED_LEVEL = $(if $(filter src/emulator/%,$<),-O3,$(if $(LONG_LOOPS),-O1,-O0))

CUDA_ARCHS ?= $(if $(GPU_ARCHS),$(if $(NVCC),$(GPU_ARCHS)))
CUDA_PTX ?=
GENCODE = $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
  $(foreach a,$(CUDA_PTX),-gencode arch=compute_$(a),code=compute_$(a))
NO_NVCC = $(if $(GPU_ARCHS),$(if $(NVCC),,yes))
EMPTY :=
ARCH_TEXT = $(subst $(EMPTY) $(EMPTY),+,$(strip $(CUDA_ARCHS:%=sm_%) $(CUDA_PTX:%=compute_%)))

# A link to the folder of nvcc.
NVCC_HERE := $(BUILD)/obj/nvcc

sources = $(foreach at,* */* */*/* */*/*/*,$(wildcard src/$(at).$(1)))
OBJECTS_CXX := $(patsubst src/%,$(BUILD)/obj/%.o,$(filter-out src/emulator/%,$(call sources,cc)))
OBJECTS_CUDA := $(patsubst src/%,$(BUILD)/obj/%.o,$(call sources,cu))
OBJECTS_EMULATED := $(patsubst src/%,$(BUILD)/obj/emulated/%.o,\
  $(call sources,cu) $(filter src/emulator/%,$(call sources,cc)))
# Files of a room are read at once, since most of the time goes to what all files include; not those
# that have a name of their own which another file of the room has too.
NVVM_ROOMS := boxes collective conv conv/channels_last gemm gemm/hopper loss norm optim pointwise \
  quantized random reduce runtime
NVVM_ALONE := $(patsubst %,src/cuda/%.cu,boxes/soft_nms conv/pooling conv/channels_last/depthwise \
  conv/channels_last/groups conv/channels_last/hopper conv/channels_last/wgrad \
  conv/channels_last/wgrad_halo gemm/matvec norm/fused_layer_norm \
  norm/layer_norm quantized/product)
NVVM_HERE := $(BUILD)/obj/nvvm/$(TEST_ARCH)
nvvm_room = $(filter-out $(NVVM_ALONE),$(wildcard src/cuda/$(1)/*.cu))
NVVM := $(NVVM_ROOMS:%=$(NVVM_HERE)/cuda/%/room.cu.ltoir) \
  $(patsubst src/%,$(NVVM_HERE)/%.ltoir,$(filter-out \
  $(foreach room,$(NVVM_ROOMS),$(call nvvm_room,$(room))),$(call sources,cu)))
OBJECTS = $(OBJECTS_CXX) $(if $(EMULATED),$(OBJECTS_EMULATED),$(if $(CUDA_ARCHS),$(OBJECTS_CUDA)))
LINK_CXX = $(CXX) -shared -pthread -Wl,--version-script=src/exports.map -Wl,-z,defs \
  -Wl,-z,nodelete
LINK_CUDA = $(NVCC_HERE)/nvcc -shared -cudart static -ccbin $(CXX) $(GENCODE) \
  $(if $(CUDA_LIBS),-L$(call quoted,$(CUDA_LIBS))) -Xcompiler -pthread \
  -Xlinker --version-script=src/exports.map -Xlinker -z,defs -Xlinker -z,nodelete
LINK = $(if $(CUDA_ARCHS),$(LINK_CUDA),$(LINK_CXX))

cxx:
	@$(if $(CXX),command -v $(CXX) >/dev/null,false)

lib: $(if $(CXX),,no-lib)
	+@$(if $(CXX),$(SUBMAKE) native,exit 1)

native: $(LIB)
	@echo "native library: $(LIB), CPU$(if $(EMULATED), and an emulated GPU)$(if $(CUDA_ARCHS), and CUDA for $(ARCH_TEXT))"
	@$(if $(OBEYED),echo "native library: without the GPU: nvcc would obey what stands in the name of this folder; move it")
	@$(if $(NO_NVCC),echo "native library: the GPU needs nvcc: pip install '.[gpu]' in this folder")

COMMA := ,
no-lib:
	@echo "native library: not built, $(if $(filter Linux,$(SYSTEM)),no C++ compiler here (g++$(COMMA) clang++$(COMMA) c++),it is for Linux); numpy does the work"

ifeq ($(CXX),)
optional-lib: no-lib
else
optional-lib:
	+@$(SUBMAKE) lib || $(SUBMAKE) lib CUDA_ARCHS= || \
	  echo "native library: it did not build, the messages are above; numpy does the work"
endif

$(LIB): $(OBJECTS) src/exports.map $(BUILD)/obj/$(if $(EMULATED),emulated-)link.flags $(if $(CUDA_ARCHS),| $(NVCC_HERE))
	@mkdir -p $(@D)
	@echo "linking $@"
	$(Q)$(LINK) $(LDFLAGS) -o $@.new $(OBJECTS) -ldl
	@mv -f $@.new $@

$(BUILD)/obj/emulated/%.o: src/% $(BUILD)/obj/emulated.flags
	@mkdir -p $(@D)
	@echo "compiling $< for the emulator"
	$(Q)$(CXX) $(EMULATED_CXXFLAGS) $(EMULATED_LEVEL) $(CXXFLAGS) \
	  $(if $(filter %.cu,$<),$(call with,emulated/,$(EMULATED_LEVEL))) -MMD -MP -x c++ -c $< -o $@

# Which boxes stay is numpy's choice to the bit (src/math/boxes.h).
$(BUILD)/obj/cpu/boxes/%.o: BASE_CXXFLAGS += -ffp-contract=off

$(BUILD)/obj/%.cc.o: src/%.cc $(BUILD)/obj/cxx.flags
	@mkdir -p $(@D)
	@echo "compiling $<"
	$(Q)$(CXX) $(BASE_CXXFLAGS) $(CXX_LEVEL) $(CXXFLAGS) \
	  $(call with,,$(CXX_LEVEL)) -MMD -MP -c $< -o $@

# With PRECOMPILED=1 what nearly all files include is parsed once for each level of optimization.
PRECOMPILED ?=
with = $(if $(PRECOMPILED),-include $(BUILD)/obj/$(1)precompiled$(firstword $(2)).h -Winvalid-pch)
ifneq ($(PRECOMPILED),)
LEVELS := $(if $(findstring LONG_LOOPS,$(value CXX_LEVEL)),-O0 -O1,$(firstword $(CXX_LEVEL)))
PRECOMPILED_CXX := $(LEVELS:%=$(BUILD)/obj/precompiled%.h.gch)
PRECOMPILED_EMULATED := $(patsubst %,$(BUILD)/obj/emulated/precompiled%.h.gch,-O0 -O1)
$(OBJECTS_CXX): $(PRECOMPILED_CXX)
$(OBJECTS_EMULATED): $(PRECOMPILED_EMULATED)
$(PRECOMPILED_CXX): $(BUILD)/obj/precompiled%.h.gch: src/cpu/runtime/parallel.h $(BUILD)/obj/cxx.flags
	@mkdir -p $(@D) && echo '#include "$(<:src/%=%)"' >$(basename $@)
	$(Q)$(CXX) $(BASE_CXXFLAGS) $* $(CXXFLAGS) -MMD -MP -x c++-header -c $(basename $@) -o $@
$(PRECOMPILED_EMULATED): $(BUILD)/obj/emulated/precompiled%.h.gch: src/cuda/runtime/launch.cuh \
    $(BUILD)/obj/emulated.flags
	@mkdir -p $(@D) && echo '#include "$(<:src/%=%)"' >$(basename $@)
	$(Q)$(CXX) $(EMULATED_CXXFLAGS) $* $(CXXFLAGS) -MMD -MP -x c++-header -c $(basename $@) -o $@
endif

$(BUILD)/obj/%.cu.o: src/%.cu $(BUILD)/obj/cuda.flags | $(NVCC_HERE)
	@mkdir -p $(@D)
	@echo "compiling $< for $(ARCH_TEXT)"
	$(Q)$(NVCC_HERE)/nvcc $(BASE_NVCCFLAGS) $(NCCL_FLAGS) $(NVCCFLAGS) -MMD -MP -c $< -o $@

# Kernels that sum over ranks (src/cuda/collective/device_api.cuh) need NCCL's headers.
OVER_RANKS := $(addprefix $(BUILD)/obj/cuda/,collective/device_api.cu.o collective/rank_sums.cu.o \
    collective/window.cu.o gemm/weight_update.cu.o optim/all_reduce_update.cu.o)
$(OVER_RANKS): $(BUILD)/obj/nccl.flags
$(OVER_RANKS): private NCCL_FLAGS = $(if $(NCCL_INCLUDE),-isystem $(call quoted,$(NCCL_INCLUDE)))

# Whether nvcc can compile the CUDA files, in a fraction of the time: to its intermediate language,
# which is what link-time optimization keeps. Nothing is assembled or linked: a symbol that is missing
# here is missing in the emulator's library too.
$(NVVM): GENCODE = -gencode arch=compute_$(TEST_ARCH),code=lto_$(TEST_ARCH)
$(NVVM): NVCC_LEVEL = -O0 -Xcicc -O0
nvvm: $(NVVM)
	@echo "CUDA files: $(words $(call sources,cu)) compiled to NVVM IR for sm_$(TEST_ARCH), not assembled and not linked"

# The same for each chip of a wheel, whose code differs by what the chip can do.
architectures:
	+@$(foreach a,$(WHEEL_ARCHS),$(SUBMAKE) nvvm TEST_ARCH=$(a) &&) true

# The preprocessor notes what a file includes while it reads it; nvcc's -MMD reads all a second time.
# Constants of kernels for sm_90a are not referenced on other chips, of which nvcc warns.
COMPILE_NVVM = $(Q)$(NVCC_HERE)/nvcc $(BASE_NVCCFLAGS) $(NVCCFLAGS) \
  $(if $(filter 90a,$(TEST_ARCH)),,-diag-suppress 177) \
  -Xcompiler -MMD,-MP,-MF,$(basename $@).d,-MT,$@ -ltoir $< -o $@
$(NVVM_HERE)/%.ltoir: src/% $(BUILD)/obj/cuda.flags | $(NVCC_HERE)
	@mkdir -p $(@D)
	@echo "compiling $< to NVVM IR"
	$(COMPILE_NVVM)

$(NVVM_HERE)/%/room.cu.ltoir: $(NVVM_HERE)/%/room.cu $(BUILD)/obj/cuda.flags | $(NVCC_HERE)
	@echo "compiling src/$*/ to NVVM IR"
	$(COMPILE_NVVM)

$(NVVM_ROOMS:%=$(NVVM_HERE)/cuda/%/room.cu): $(NVVM_HERE)/%/room.cu: FORCE
	@mkdir -p $(@D)
	@printf '#include "%s"\n' $(patsubst src/%,%,$(call nvvm_room,$(*:cuda/%=%))) >$@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

# Its own path is one of those that nvcc puts between double quotes.
$(NVCC_HERE): FORCE
	@mkdir -p $(@D)
	@ln -sfn "$$(dirname $(call quoted,$(NVCC)))" $@

# Rewritten only when a command line changes, which then rebuilds what was made with the old one.
$(BUILD)/obj/cxx.flags: export FLAGS = $(CXX) $(BASE_CXXFLAGS) $(value CXX_LEVEL) $(CXXFLAGS) $(PRECOMPILED)
$(BUILD)/obj/cuda.flags: export FLAGS = $(NVCC) $(BASE_NVCCFLAGS) $(NVCCFLAGS)
$(BUILD)/obj/nccl.flags: export FLAGS = $(NCCL_INCLUDE)
$(BUILD)/obj/emulated.flags: export FLAGS = $(CXX) $(EMULATED_CXXFLAGS) $(value EMULATED_LEVEL) $(CXXFLAGS) $(PRECOMPILED)
$(BUILD)/obj/link.flags $(BUILD)/obj/emulated-link.flags: export FLAGS = $(LINK) $(LDFLAGS) $(OBJECTS)
$(BUILD)/obj/%.flags: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' "$$FLAGS" | cmp -s - $@ || printf '%s\n' "$$FLAGS" > $@

-include $(addsuffix .d,$(basename $(OBJECTS_CXX) $(OBJECTS_CUDA) $(OBJECTS_EMULATED) $(NVVM) \
  $(PRECOMPILED_CXX) $(PRECOMPILED_EMULATED)))
