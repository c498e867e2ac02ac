# Every target works on a fresh machine with Python 3.11 to 3.13: it creates .venv first if needed. Targets that train
# need only rollgraph (ENV); targets that work on its code also need the extra `dev` (DEV).
# To run in an environment of your own instead (say, one with a CUDA build): make test-gpu PY=python3
PYTHON ?= python3
PY     ?= .venv/bin/python
ARGS   ?=
PYTEST  = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n 2 --dist worksteal
OWN    := $(filter .venv/bin/python,$(PY))
ENV    := $(if $(OWN),.venv/.installed)
DEV    := $(if $(OWN),.venv/.dev)

# Where PyTorch comes from: on Linux without an NVIDIA GPU, from the index of its CPU builds, which saves 4 GB. If that
# index cannot be reached, or with `TORCH_INDEX=`, from the index that pip is configured with.
TORCH_INDEX ?= $(shell [ "$$(uname)" = Linux ] && ! nvidia-smi > /dev/null 2>&1 && echo https://download.pytorch.org/whl/cpu)
REACHABLE = $(PYTHON) -c 'import sys, urllib.request as web; web.urlopen(sys.argv[1], timeout=5)'
INSTALL   = .venv/bin/pip install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help first demo test test-all sweep check format test-gpu bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "  make %-9s %s\n", $$1, $$2 }'

first: $(ENV) ## a tiny model learns to shout and to whisper, in seconds
	rm -rf runs/shout
	$(PY) examples/shout.py

demo: $(ENV) ## a tiny model learns addition: a warm start, then GRPO, in a minute or two (ARGS="seed=1")
	rm -rf runs/quickstart
	$(PY) -m rollgraph init quickstart runs/quickstart
	python=$$($(PY) -c 'import sys; print(sys.executable)') && cd runs/quickstart && \
		"$$python" -m rollgraph train config.yaml output="$(CURDIR)/runs/quickstart/run" $(ARGS)

test: $(DEV) ## run the tests, apart from the slow ones (ARGS="-k hooks" goes to pytest)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(DEV) ## run all tests, the slow ones too
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(PYTEST) $(ARGS)

sweep: $(DEV) ## run the tests as other machines would: instruction sets, threads, load (ARGS="--quick")
	$(PY) tools/sweep.py $(ARGS)

check: $(DEV) ## lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(DEV) ## fix what ruff can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test-gpu: $(DEV) ## run the tests that need a CUDA device
	$(PY) -m pytest -m gpu $(ARGS)

bench: $(ENV) ## measure what a replay costs
	$(PY) benchmarks/graph_overhead.py $(ARGS)

clean: ## remove the environment, builds and caches
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# PyTorch comes before rollgraph, at its pinned version, so that resolving the rest cannot choose another build.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "rollgraph needs Python 3.11 to 3.13; name one with: make PYTHON=python3.11 ..."; exit 1; }
	@echo "setting up .venv, once"
	$(PYTHON) -m venv .venv
	$(INSTALL) setuptools
	@index="$(TORCH_INDEX)"; $(REACHABLE) "$$index/torch/" 2> /dev/null || index=; \
		echo "PyTorch comes from $${index:-the index that pip is configured with}"; \
		$(INSTALL) --no-deps $${index:+--index-url "$$index"} "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) --no-build-isolation -e .
	@touch $@

.venv/.dev: .venv/.installed
	$(INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@
