# For a fresh Linux machine with git, make and Python 3.10 or newer with venv:
#   make demo         install into .venv and train the small language model (ARGS="--resume ...")
#   make test         install what is missing and run every behaviour's test once (ARGS="-k name ...")
#   make test-all     the same with sweeps, installs and long fuzzing; SHARD=2/4 runs the second of four parts
#   make test-latest  make test in .venv-latest, with the newest of everything; NEWEST=torch==... for another PyTorch
#   make test-upstream UPSTREAM=path/to/flash-attention   upstream's own tests on a GPU (STOCK=1, SHARD=2/4)
#   make constraints  write constraints.txt, which all of the above but test-latest install by, anew
#   make compile-all  compile every kernel the layer can ask for, without a GPU

PYTHON ?= $(shell for python in python3.12 python3.11 python3.13 python3.10 python3; do \
	if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; \
	then echo $$python; break; fi; done)
VENV ?= .venv
PY := $(VENV)/bin/python
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
# Without a GPU the releases that the tests ran with; TORCH=... and TRITON=... name others. Which build of PyTorch it is
# follows from pip's settings: one for CPUs is gigabytes smaller than the one for CUDA, which brings its own Triton.
TORCH := $(if $(filter 0,$(GPU)),torch==2.13.0,torch>=2.11)
TRITON := $(if $(filter 0,$(GPU)),triton==3.9.0)
NEWEST ?= torch
# All else has the versions of this file, also what builds the package; CONSTRAINTS= for the newest.
CONSTRAINTS ?= constraints.txt
PIP_INSTALL = $(PY) -m pip install $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS),--upgrade)
BUILD_LIKE_THAT = $(if $(CONSTRAINTS),--build-constraint $(CONSTRAINTS))
# Tests on a GPU share its memory.
GPU_WORKERS ?= 4
INSTALL_FROM = pyproject.toml setup.py $(CONSTRAINTS)

.PHONY: demo test test-all test-latest test-upstream constraints compile-all tree help

help:
	@sed -n '2,9s/^#  //p' Makefile

demo: $(VENV)/.installed tree
	$(PY) -m nsa_layer demo $(ARGS)

# Each worker is a process of its own: threads on top of that would wait for one another. Many tests start processes,
# which would compile this repository's Python anew where bytecode is not kept.
test test-all: export OMP_NUM_THREADS ?= 1
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: LEFT_OUT := sweep or install
test-all: LEFT_OUT := never
test test-all: $(VENV)/.installed-for-tests tree
ifeq ($(GPU),0)
	$(PY) -m pytest -n auto --dist loadgroup -m "not ($(LEFT_OUT))" $(ARGS)
else
	$(PY) -m pytest -n auto --dist loadgroup -m "not (gpu or $(LEFT_OUT))" $(ARGS)
	$(PY) -m pytest -n $(GPU_WORKERS) --dist loadgroup -m "gpu and not ($(LEFT_OUT))" $(ARGS)
endif

test-latest:
	rm -rf .venv-latest
	$(MAKE) test VENV=.venv-latest CONSTRAINTS= TORCH="$(NEWEST)" TRITON=

# The checkout is at the tag of the pin; docs/testing-upstream.md.
test-upstream: $(VENV)/.installed-for-tests tree
	$(PY) -m patches test-upstream "$(UPSTREAM)" $(if $(STOCK),--stock) $(if $(SHARD),--shard $(SHARD)) $(ARGS)

# uv goes by its settings in pyproject.toml. UPGRADE= leaves alone what is still right.
UPGRADE ?= --upgrade
constraints:
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install --quiet --upgrade uv
	.venv-uv/bin/uv pip compile --quiet $(UPGRADE) --universal --python-version 3.10 --all-extras --group install \
		--no-emit-package torch --no-emit-package triton --no-annotate \
		--custom-compile-command "make constraints" --output-file constraints.txt pyproject.toml

compile-all: $(VENV)/.installed-for-tests tree
	$(PY) -m nsa_layer compile --all $(ARGS)

# The install leads here; what was pulled since may have changed the patches.
tree: | $(VENV)/.torch
	$(PY) -m patches tree

# A pip that takes constraints for builds, too, before all else.
$(VENV)/.torch: $(CONSTRAINTS)
	@if [ -z "$(PYTHON)" ]; then echo "no Python 3.10 or newer with venv found; set PYTHON=/path/to/python3"; exit 1; fi
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) pip "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch $(INSTALL_FROM)
	$(PIP_INSTALL) $(BUILD_LIKE_THAT) --editable ".[tools]"
	touch $@

$(VENV)/.installed-for-tests: $(VENV)/.torch $(INSTALL_FROM)
	$(PIP_INSTALL) $(BUILD_LIKE_THAT) --editable ".[test]" $(TRITON)
	touch $(VENV)/.installed $@
