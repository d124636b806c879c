# The words a person needs here. `make` alone lists them; ARGS goes to the command behind a word.

PYTHON ?= python3
ARGS ?=
VENV := .venv
STAMP := $(VENV)/made-in

# The stamp is written last and holds the folder it was made in. Without it, in another folder, or with an interpreter
# that no longer starts, the environment is made from nothing; if only its inputs are newer, it is brought up to date.
FOUND := $(shell $(VENV)/bin/python -c '' 2>/dev/null && cat $(STAMP) 2>/dev/null)
ifeq ($(FOUND),$(CURDIR))
FRESH := true
else
FRESH := rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
$(STAMP): anew
endif

.PHONY: help train test lint verify env clean anew
.DEFAULT_GOAL := help

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: env ## train the example, examples/quickstart.yaml, on this machine
	$(VENV)/bin/nestsp train examples/quickstart.yaml $(ARGS)

test: env ## run the tests, without the slow ones
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 -m "not slow" $(ARGS)

lint: env ## check style, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

verify: env ## compare every path with one process on this machine
	$(VENV)/bin/nestsp verify examples/quickstart.yaml $(ARGS)

env: $(STAMP) ## make the environment in .venv if it is missing or out of date

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "PYTHON is $(PYTHON) ($$($(PYTHON) -V 2>&1 | tail -n 1)), but nestsp needs Python 3.10 or newer;" \
			"name one, as in: make $(or $(MAKECMDGOALS),env) PYTHON=python3.12" >&2; exit 1; }
	@rm -f $(STAMP)
	@$(FRESH)
	@printf '%s\n' '$(CURDIR)' > $(STAMP).part
	$(VENV)/bin/python -m pip install -e '.[dev]' -c constraints.txt
	@mv $(STAMP).part $(STAMP)

clean: ## remove the environment, caches and builds; runs/ stays
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
