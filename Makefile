PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test test-slow lint bench results mutations clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/tokenswift demo --out demo

test: setup lint
	$(BIN)/python -m pytest -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/pyright
	$(BIN)/lint-imports

mutations: setup
	$(BIN)/python scripts/mutations.py

bench: setup
	$(BIN)/python bench/engine.py all --results bench/results/local.jsonl
	$(BIN)/python bench/run.py all --results bench/results/local.jsonl

results: setup
	$(BIN)/python scripts/results.py

clean:
	rm -rf demo build src/*.egg-info
