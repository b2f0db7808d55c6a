# make demo | test | test-slow | fuzz | lint | format | docs | wheel | bench-pages: each makes .venv and installs what it needs; quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTHONS ?= $(BIN)/python  # that a wheel has native code for
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints.txt)

# Bytecode is kept, whatever the shell says: the tests start many processes, and each would compile the package again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-slow fuzz lint format docs wheel bench-pages clean

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py
	$(BIN)/python examples/hf_generate.py

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

test-slow: $(VENV)/installed  # the others, some 25 minutes: every kernel for every architecture, rarer variants, more orders of work
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

fuzz: $(VENV)/installed  # a minute of calls drawn at random, against float64
	$(BIN)/python -m cula.fuzz --seconds 60

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/installed-docs  # the site, in site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/installed  # dist/*.whl, with kernels compiled for every architecture: some ten minutes. ADDRESS=... is where it is published
	$(BIN)/python tools/wheel.py --python $(PYTHONS) $(if $(ADDRESS),--address $(ADDRESS))

bench-pages: $(VENV)/installed  # docs/benchmarks and the block of README.md, from the result files
	$(BIN)/python -m cula.bench report $(sort $(wildcard benchmarks/results/*.json)) --to docs/benchmarks --readme README.md

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(CONSTRAINTS) -e '.[dev]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/pip install --quiet $(CONSTRAINTS) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build site *.egg-info demo_out
