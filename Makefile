PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Processes that run tests; torch has one thread in each.
WORKERS ?= 2

.PHONY: setup demo test test-slow lint bench results docs mutations clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/tokenswift demo --out demo

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/pyright
	$(BIN)/lint-imports

mutations: setup
	$(BIN)/python scripts/mutations.py

bench: setup
	$(BIN)/tokenswift bench run engine drafts --preset cpu

results: setup
	$(BIN)/python scripts/results.py

docs: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	mkdir -p build
	$(BIN)/zensical build --strict --clean > build/site.log 2>&1 || { cat build/site.log; exit 1; }
	cat build/site.log && ! grep "^griffe:" build/site.log  # docstrings that do not fit their functions

clean:
	rm -rf demo build site src/*.egg-info
