# Every target installs what it needs into .venv first; `make demo` is the place to start.
#
#   DATA=file-or-folder   text to train the demo on
#   PYTHON=python3.12     another interpreter than python3
#   TORCH=torch==2.13.0   another torch, e.g. a wheel for your CUDA version
#   VENV=.venv            another folder to install into: make test TORCH=torch==2.11.0 VENV=.venv-2.11
#   JOBS=3                processes that `make test` runs beside each other
#   PYTHONS, TORCHES      what `make matrix` installs with: PYTHONS="python3.11 python3.13" TORCHES="2.11.0 2.13.0"

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 3
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
TORCHES ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Tests start many processes, and each would compile the package again if Python were told not to keep bytecode.
RUN := PYTHONDONTWRITEBYTECODE= PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python

.DELETE_ON_ERROR:
.PHONY: venv demo test test-full wheels matrix check bench docs clean

venv: $(VENV)/.plot

demo: $(VENV)/.plot
	$(RUN) examples/pretrain_gpt.py --out runs/demo $(if $(DATA),--data "$(DATA)")

test: $(VENV)/.test
	$(RUN) -m pytest tests -q --durations=10 -m "not full" -n $(JOBS) --dist loadfile

test-full: $(VENV)/.test $(VENV)/.integrations
	$(RUN) -m pytest tests -q --durations=25 --full

# Into dist/: the sdist, and a wheel with compiled CPU kernels, on x86-64.
wheels: $(VENV)/.wheels
	$(RUN) tests/wheels.py

# Installs both into .matrix as a CI matrix would, with each Python that is there.
matrix: wheels
	$(PYTHON) tests/matrix.py --python $(PYTHONS) --torch $(TORCHES)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(RUN) -m pytest tests/unit/test_layering.py tests/unit/test_frozen_sets.py -q
	$(RUN) -m pytest tests/cpu/test_kernel_build.py -q --full -k test_the_cuda_kernels_compile

bench: $(VENV)/.test
	$(RUN) -m benchmarks.padding.run
	$(RUN) benchmarks/traffic/run.py
	$(RUN) benchmarks/planning/run.py
	$(RUN) benchmarks/hiding/run.py
	$(RUN) benchmarks/overhead/run.py
	$(RUN) -m benchmarks.sampling.run
	$(RUN) -m benchmarks.knobs.run
	$(RUN) -m benchmarks.checkpoints.run
	$(RUN) -m benchmarks.freezing.run
	$(RUN) -m benchmarks.freezing.training
	$(RUN) -m benchmarks.disk.run
	$(RUN) -m benchmarks.estimate.run
	$(RUN) -m benchmarks.adam.run
	$(RUN) -m benchmarks.tiled.run
	$(RUN) -m benchmarks.compile.run
	$(RUN) -m benchmarks.in_backward.run
	$(RUN) -m benchmarks.activations.run
	$(RUN) -m benchmarks.overlap.run
	$(RUN) -m benchmarks.distributed.run

# Plain files in build/site; what mkdocs needs goes into a folder of its own, as it needs no torch.
docs: .venv-docs/.installed
	.venv-docs/bin/mkdocs build -q
	@echo build/site/index.html

.venv-docs/.installed: mkdocs.yml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install -q "mkdocs>=1.6"
	@touch $@

clean:
	rm -rf $(VENV) .venv-docs .matrix build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and is named in every later command: asked for as a mere dependency, pip may fetch another one.
$(VENV)/.torch: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "chunkmem needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "$(TORCH)" "setuptools>=77"
	@touch $@

$(VENV)/.plot $(VENV)/.test $(VENV)/.dev $(VENV)/.integrations $(VENV)/.wheels: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	$(PIP) install --no-build-isolation -e ".[$*]" "$(TORCH)"
	@touch $@
