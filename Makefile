# every target makes its own environment in .venv from nothing but python3
PYTHON ?= python3
EXTRAS := dev,triton,hub,corpus,gpt2,data,eval,docs
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: race study results tour env docs dist bench test test-all drill slurm mutate lint format check clean

# the main job needs no more than the lab and its corpus
race: .venv/.race
	$(BIN)/python -m spheret race

# MINUTES=20 bounds it; the same command goes on later
study: .venv/.race
	$(BIN)/python -m spheret study $(if $(MINUTES),--minutes $(MINUTES))

.venv/.race: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[corpus]"
	touch $@

env: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[$(EXTRAS)]"
# apart: a torchvision that was built for another torch, as beside a CPU build, breaks every import of transformers
	$(INSTALL) --upgrade --no-deps --target .venv/timm timm torchvision
	$(INSTALL) --upgrade --no-deps --target .venv/apart lightning lightning-utilities torchmetrics torchao fla-core
# apart: trackio takes an older pillow
	$(INSTALL) --upgrade --no-deps --target .venv/track trackio gradio-client httpx orjson python-multipart starlette uvicorn brotli
	touch $@ .venv/.race .venv/.docs

# the site of docs/, in build/site. A warning is an error: a broken link, a missing picture, a page that nothing lists
docs: .venv/.docs
	$(BIN)/python -m sphinx --fresh-env --write-all --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . build/site
	@echo build/site/index.html

.venv/.docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[docs]"
	touch $@

# the sdist and the wheel, checked, twice the same bytes. Nothing is published
dist: .venv/.dist
	$(BIN)/python .ci/dist.py

.venv/.dist: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) build twine setuptools
	touch $@

test: env
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: env
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not drill and not slurm"

drill: env
	$(BIN)/python -m pytest -m drill

# starts a SLURM of its own and ends it; SLURM must be installed, and if it is not, the error names the packages
slurm: env
	$(BIN)/python -m pytest -m slurm tests/lab

# the figures and tables of docs/results, from its results.jsonl, and the picture of docs/mathematics.md
results: env
	$(BIN)/python docs/results/ngrams.py
	$(BIN)/python docs/results/build.py
	$(BIN)/python docs/figures/build.py

# every benchmark in short form, and one table
bench: env
	$(BIN)/python benchmarks/summary.py

# docs/tour.ipynb with new outputs
tour: env
	$(BIN)/python docs/build_tour.py

# FILES="retractions.py kernels/closed.py" chooses files; tests/mutation/mutate.py lists them all
mutate: env
	nice $(BIN)/python tests/mutation/mutate.py $(FILES)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test docs

clean:
	rm -rf .venv build dist *.egg-info
