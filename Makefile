# Every target does all its own set-up in .venv and is quick when repeated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread a process: tests and demo use one process a core.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1

.PHONY: install test demo bench figures aot tune gpu-test gpu-sanitize check clean

install: $(STAMP)

# torch first and pinned, so that no other requirement pulls another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt --editable '.[dev]'
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

demo: $(STAMP)
	$(BIN)/futurebridge demo

bench: $(STAMP)
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-disable-gc -p no:xdist -s

# The README's tables, from committed result files.
figures: $(STAMP)
	$(BIN)/python -m benchmarks.figures

# Every kernel compiled for three architectures, no GPU needed: registers, stack, shared memory, predicted time.
aot: $(STAMP)
	$(BIN)/python -m benchmarks.aot

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
