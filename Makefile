# The front door. `make demo` and `make test` each do all of their own set-up (tools/setup.sh), in
# .venv and build/. Variables: PYTHON (3.10 or newer, for the virtual environment), JOBS, GPU_JOBS.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)
BIN := $(CURDIR)/$(VENV)/bin
ASAN_BUILD := build/asan
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

.PHONY: demo test test-cpp test-python test-sanitized test-gpu sanitize-gpu install clean
demo: install
	$(BIN)/plait replay data/mooncake_conversation_400.jsonl

# The package in .venv, built from this tree; fast where nothing changed.
install:
	PYTHON=$(PYTHON) tools/setup.sh $(VENV) demo

# ---- tests without a GPU ----
test: install-tests
	$(MAKE) --no-print-directory test-cpp test-python test-sanitized

.PHONY: install-tests
install-tests:
	PYTHON=$(PYTHON) tools/setup.sh $(VENV) test

# What this has installed must be found: tests that skip elsewhere, without NVRTC, cuda.h or a browser, fail.
test-cpp test-python test-sanitized: export PLAIT_TEST_STRICT := 1

test-cpp:
	$(BIN)/ctest --test-dir build/editable --output-on-failure -j $(JOBS)

# Workers times the threads of NumPy's BLAS would be more than there are cores.
test-python test-gpu: export OPENBLAS_NUM_THREADS := 1
test-python test-gpu: export OMP_NUM_THREADS := 1

test-python:
	$(BIN)/python -m pytest -q -n $(JOBS) tests --ignore=tests/gpu

# The C++ host tests once more under AddressSanitizer and UBSan; but for those that differ from others
# in nothing but when threads run.
test-sanitized:
	$(BIN)/cmake -S . -B $(ASAN_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DPLAIT_SANITIZE=ON \
	  -DPLAIT_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1"
	$(BIN)/cmake --build $(ASAN_BUILD)
	$(BIN)/ctest --test-dir $(ASAN_BUILD) --output-on-failure -j $(JOBS) \
	  -E 'Sm90Emulated[.](BoxesThatLandLate|WarpsThatFallAsleep)'

# ---- tests on a GPU ----
# On a machine without network: a Python with plait, torch and pytest, and the C++ test binary, made
# beforehand on a machine like it, then
#   PLAIT_PREBUILT=1 PYTHON=/path/to/python PLAIT_TESTS_BINARY=/path/to/plait_tests make test-gpu
PLAIT_TESTS_BINARY ?= build/editable/plait_tests
GPU_JOBS ?= 4
ifdef PLAIT_PREBUILT
GPU_PYTHON := $(PYTHON)
GPU_SETUP :=
else
GPU_PYTHON := $(BIN)/python
GPU_SETUP := install-tests
endif
# Without torch, a GPU or the C++ tests this fails. test_streams_gpu.py measures times, so it is alone.
test-gpu: export PLAIT_REQUIRE_GPU := 1
test-gpu: $(GPU_SETUP)
	@test -x '$(PLAIT_TESTS_BINARY)' || { echo "test-gpu: PLAIT_TESTS_BINARY is" \
	  "'$(PLAIT_TESTS_BINARY)', which is no program; set it to the built plait_tests" >&2; exit 1; }
	$(GPU_PYTHON) -m pytest tests/gpu -q -n $(GPU_JOBS) --ignore=tests/gpu/test_streams_gpu.py
	$(GPU_PYTHON) -m pytest tests/gpu/test_streams_gpu.py -q
	'$(PLAIT_TESTS_BINARY)' --gtest_filter='Gpu*'

# compute-sanitizer over the GPU tests named in tests/gpu/sanitize.txt: every tool runs, then fails
# if one has. Without torch's pool of memory, which would hide reads past the end of a tensor.
# racecheck leaves out the sm90 kernel: it reports what mbarriers order (a Unit handed on by q_full)
# and the join of split keys across named barriers; why those are ordered stands in kernels/sm90.
SANITIZER ?= $(firstword $(wildcard /usr/local/cuda/bin/compute-sanitizer) compute-sanitizer)
SANITIZER_TOOLS ?= memcheck synccheck racecheck
sanitize-gpu: export PYTORCH_NO_CUDA_MEMORY_CACHING := 1
sanitize-gpu: $(GPU_SETUP)
	@failed=; for tool in $(SANITIZER_TOOLS); do \
	  case $$tool in racecheck) select='not sm90 and not replay';; *) select='';; esac; \
	  echo "== $$tool"; \
	  $(SANITIZER) --tool $$tool --error-exitcode 1 --target-processes all \
	    $(GPU_PYTHON) -m pytest -q -p no:cacheprovider -k "$$select" \
	    $$(grep -v '^#' tests/gpu/sanitize.txt) || failed="$$failed $$tool"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

clean:
	rm -rf $(VENV) build
