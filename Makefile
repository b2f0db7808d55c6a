# make demo | test | lint | format: each makes .venv and installs what it needs; quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints.txt)

.PHONY: demo test lint format clean

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(CONSTRAINTS) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info demo_out
