# `make` lists the targets. Each one first builds or refreshes the environment that it needs.

PYTHON ?= python3
VENV ?= .venv
# More options for pip, such as another index for torch.
PIP_FLAGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLING := $(VENV)/.installing

.DEFAULT_GOAL := help
.PHONY: help install reproduce test check format bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# .installing stands while an install runs. If it is found at the start, that install was cut short
# and may have left half a package behind, so the environment is emptied and built again. One
# without it is only brought up to date.
$(INSTALLED): pyproject.toml constraints.txt
	@mkdir -p $(VENV) && rm -f $@
	@if [ -e $(INSTALLING) ]; then find $(VENV) -mindepth 1 ! -path $(INSTALLING) -delete; fi
	@touch $(INSTALLING)
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev,notebooks,cluster]'
	@touch $(INSTALLING) && mv $(INSTALLING) $@

install: $(INSTALLED) ## make the environment, from the versions in constraints.txt

reproduce: $(INSTALLED) ## run the study with its defaults and set the results beside the paper's
	$(BIN)/tl-hysteresis reproduce

test: $(INSTALLED) ## run the tests and the examples in the docstrings
	$(BIN)/python -m pytest

check: $(INSTALLED) ## check format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(INSTALLED) ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

bench: $(INSTALLED) ## run the benchmarks
	TQDM_DISABLE=1 $(BIN)/python tests/benchmarks/bench.py

clean: ## remove the environment, caches and build products (run folders stay)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis
	find tl_hysteresis tests -name __pycache__ -type d -prune -exec rm -rf {} +
