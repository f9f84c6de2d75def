# The front door. `make demo` and `make test` each do all of their own set-up (tools/setup.sh), in
# .venv and build/. Variables: PYTHON (3.10 or newer, for the virtual environment), JOBS.
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

test-cpp:
	$(BIN)/ctest --test-dir build/editable --output-on-failure -j $(JOBS)

test-python:
	$(BIN)/python -m pytest -q -n $(JOBS) tests --ignore=tests/gpu

# The C++ host tests once more under AddressSanitizer and UBSan.
test-sanitized:
	$(BIN)/cmake -S . -B $(ASAN_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DPLAIT_SANITIZE=ON \
	  -DPLAIT_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1"
	$(BIN)/cmake --build $(ASAN_BUILD)
	$(BIN)/ctest --test-dir $(ASAN_BUILD) --output-on-failure -j $(JOBS)

# ---- tests on a GPU ----
# On a machine without network: a Python with plait, torch and pytest, and the C++ test binary, made
# beforehand on a machine like it, then
#   PLAIT_PREBUILT=1 PYTHON=/path/to/python PLAIT_TESTS=/path/to/plait_tests make test-gpu
PLAIT_TESTS ?= build/editable/plait_tests
ifdef PLAIT_PREBUILT
GPU_PYTHON := $(PYTHON)
GPU_SETUP :=
else
GPU_PYTHON := $(BIN)/python
GPU_SETUP := install-tests
endif
test-gpu: $(GPU_SETUP)
	$(GPU_PYTHON) -m pytest tests/gpu -q
	$(PLAIT_TESTS) --gtest_filter='Gpu*'

# compute-sanitizer over the GPU tests named in tests/gpu/sanitize.txt: every tool runs, then fails
# if one has. Without torch's pool of memory, which would hide reads past the end of a tensor.
SANITIZER ?= $(firstword $(wildcard /usr/local/cuda/bin/compute-sanitizer) compute-sanitizer)
SANITIZER_TOOLS ?= memcheck synccheck racecheck
sanitize-gpu: export PYTORCH_NO_CUDA_MEMORY_CACHING := 1
sanitize-gpu: $(GPU_SETUP)
	@failed=; for tool in $(SANITIZER_TOOLS); do \
	  echo "== $$tool"; \
	  $(SANITIZER) --tool $$tool --error-exitcode 1 --target-processes all \
	    $(GPU_PYTHON) -m pytest -q -p no:cacheprovider $$(grep -v '^#' tests/gpu/sanitize.txt) \
	    || failed="$$failed $$tool"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

clean:
	rm -rf $(VENV) build
