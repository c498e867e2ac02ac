# Every target works on a fresh machine with Python 3.11 or newer: it creates .venv first if need be.
# To run in an environment of your own instead (say, one with a CUDA build): make test-gpu PY=python3
PYTHON ?= python3
PY     ?= .venv/bin/python
ARGS   ?=
PYTEST  = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n 2 --dist worksteal
ENV    := $(if $(filter .venv/bin/python,$(PY)),.venv/.installed)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all sweep check format test-gpu bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "  make %-9s %s\n", $$1, $$2 }'

demo: $(ENV) ## a tiny model learns addition: a warm start, then GRPO, in a few minutes (ARGS="seed=1")
	rm -rf runs/quickstart
	$(PY) -m rollgraph init quickstart runs/quickstart
	python=$$($(PY) -c 'import sys; print(sys.executable)') && cd runs/quickstart && \
		"$$python" -m rollgraph train config.yaml $(ARGS)

test: $(ENV) ## run the tests, apart from the slow ones (ARGS="-k hooks" goes to pytest)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(ENV) ## run all tests, the slow ones too
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(PYTEST) $(ARGS)

sweep: $(ENV) ## run the tests as other machines would: instruction sets, threads, load (ARGS="--quick")
	$(PY) tools/sweep.py $(ARGS)

check: $(ENV) ## lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(ENV) ## fix what ruff can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test-gpu: $(ENV) ## run the tests that need a CUDA device
	$(PY) -m pytest -m gpu $(ARGS)

bench: $(ENV) ## measure what a replay costs
	$(PY) benchmarks/graph_overhead.py $(ARGS)

clean: ## remove the environment, builds and caches
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# PyTorch goes first, at its pinned version, so that resolving the rest cannot choose another build.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rollgraph needs Python 3.11 or newer; name one with: make PYTHON=python3.11 ..."; exit 1; }
	@echo "setting up .venv, once"
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)" setuptools
	.venv/bin/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
