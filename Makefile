# every target makes its own environment in .venv from nothing but python3
PYTHON ?= python3
EXTRAS := dev,triton,hub,corpus,gpt2,data
BIN := .venv/bin

.PHONY: env test test-all lint format check clean

env: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

test: env
	$(BIN)/python -m pytest -n 2

test-all: env
	$(BIN)/python -m pytest -n 2 -m ""

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test

clean:
	rm -rf .venv build dist *.egg-info
