# Every target creates the virtual environment if it is missing, and updates it when its inputs change.
# One recipe at a time, because each uses all cores.
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
V7     := .venv-v7
STEPS  ?= 200
VERSION ?= 2.8.0
MINUTES ?= 10
TARGET ?= v5e
# Two test processes of up to 4 GB each. Neighboring tests run in the same process, because they share programs.
WORKERS ?= 2
PYTEST_ARGS ?=
HUNT_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests and benchmarks start hundreds of processes, and each would compile our files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo aot aot-v7 test test-all test-browser test-compat check format bench bench-v5e bench-units bench-chips bench-checkpoint measurements zoo pages hunt wheel clean

help:
	@echo "make demo              train a small GPT through kp_tpu and show what the backend did (STEPS=$(STEPS))"
	@echo "make aot               compile a GPT with a TPU's compiler, without a TPU (TARGET=$(TARGET))"
	@echo "make aot-v7            install the compiler for v7 in a separate environment"
	@echo "make test              the tests, about 20 minutes on two cores"
	@echo "make test-all          also the slow tests, and the wheel in an empty environment"
	@echo "make test-browser      the tests that look at all pages in a new Chromium; screenshots go to out/pages/"
	@echo "make test-compat       the tests of an earlier torch_xla, in a separate environment (VERSION=$(VERSION))"
	@echo "make check             ruff (lint and format) and mypy"
	@echo "make format            fix what ruff can fix"
	@echo "make bench             speed and memory, compared with stock openxla and eager (an hour)"
	@echo "make bench-v5e         models of transformers, timm and diffusers by a v5e's compiler, compared with openxla"
	@echo "make bench-units       our own small models by a v5e's compiler, at each level"
	@echo "make bench-chips       the gain of the attention passes, by the compilers of v5e, v5p and v6e"
	@echo "make bench-checkpoint  the memory of a training step by checkpoint mode, by a v5e's compiler"
	@echo "make measurements      write the tables of README.md and docs from bench/results/*.json"
	@echo "make zoo               write docs/zoo.md: programs, graph breaks, fallbacks and errors of each model"
	@echo "make pages             write docs/pages: five example pages of explain, aot and plan"
	@echo "make hunt              compare random programs with eager in float64, in every configuration (MINUTES=$(MINUTES))"
	@echo "make wheel             build dist/*.whl"
	@echo "make clean             remove what was built, except the virtual environment"

setup: $(READY)

$(READY): pyproject.toml setup.cfg setup.py constraints.txt $(wildcard kp_dynamo/disk_cache/native/*)
	@echo "Setting up $(VENV): some minutes and 8 GB the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[tpu,test,bench,friends]"
	@touch $@

demo: $(READY)
	$(BIN)/python -m demo --steps $(STEPS)

aot: $(READY)
	@mkdir -p out
	$(BIN)/python -m kp_dynamo aot demo/aot_gpt.py:make --target $(TARGET) --html out/aot.html
	@echo "The same with pictures: out/aot.html"

# v7 needs a newer libtpu than that of torch_xla 2.9; the two cannot share an environment.
aot-v7: $(V7)/.ready

$(V7)/.ready:
	$(PYTHON) -m venv $(V7)
	$(V7)/bin/python -m pip install --quiet "jax==0.10.2" "jaxlib==0.10.2" "libtpu==0.0.51"
	@touch $@

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-all: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow or not slow" --timeout=3600 $(PYTEST_ARGS)

# Not in `make test`: a new Chromium is a package of the system, and only root installs it. The tests do, or say how.
# `make test` looks at two pages in the older one of the package kaleido, which pip installs.
test-browser: $(READY)
	$(BIN)/python -m pytest -m browser $(PYTEST_ARGS) tests/page

# Installed without dependencies, because the package requires torch 2.9. Remove the environment (7 GB) afterwards.
COMPAT := .venv-compat-$(VERSION)

test-compat: $(COMPAT)/.ready
	$(COMPAT)/bin/python -m pytest -m "compat and not slow" $(PYTEST_ARGS) $$(grep -rl "mark.compat" tests)

$(COMPAT)/.ready: pyproject.toml setup.cfg
	@echo "Setting up $(COMPAT): some minutes and 7 GB"
	@test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	@$(COMPAT)/bin/python -m pip install --quiet "torch==$(VERSION)" "torch_xla==$(VERSION)" numpy safetensors tqdm \
		xxhash expecttest hypothesis pytest pytest-timeout "setuptools>=77"
	@$(COMPAT)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m bench

bench-v5e: $(READY)
	$(BIN)/python -m bench.v5e

bench-units: $(READY)
	$(BIN)/python -m bench.units

bench-chips: $(READY)
	$(BIN)/python -m bench.chips

bench-checkpoint: $(READY)
	$(BIN)/python -m bench.checkpoint
	$(BIN)/python -m bench.memory_estimate

measurements: $(READY)
	$(BIN)/python -m bench.measurements

zoo: $(READY)
	$(BIN)/python -m tests.zoo

pages: $(READY)
	$(BIN)/python -m bench.pages

hunt: $(READY)
	$(BIN)/python -m tests.hunt --minutes $(MINUTES) --workers $(WORKERS) $(HUNT_ARGS)

wheel: $(READY)
	rm -rf build  # setuptools would ship the files of an earlier build
	$(BIN)/python -m build --wheel

clean:
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
