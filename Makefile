# Everything runs in a virtual environment that is made on first use; only Python 3.11+ and make are needed.
PYTHON ?= python3
VENV ?= .venv
# For an index that has the CPU build of torch: make demo PIP_FLAGS="--extra-index-url <url>"
PIP_FLAGS ?=
# Frameworks have tens of thousands of files: compiling those that nobody imports takes a minute. What is
# imported is compiled once, so long as that may be written down.
unexport PYTHONDONTWRITEBYTECODE
PIP := python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) -c constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test check test-all chaos bench format clean

help:
	@echo "make demo      set up, then train through real disasters and prove the result bit-identical"
	@echo "make test      set up, then pass the tests"
	@echo "make check     lint, types, layers"
	@echo "make test-all  the tests and the long ones"
	@echo "make chaos     only the long ones: 200 real kills and more"
	@echo "make bench     compare with other checkpoint libraries, in an environment of its own (hours)"
	@echo "make format    format the code"
	@echo "make clean     remove what the other targets made"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP) -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/python demo/run_demo.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not chaos"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-all: test chaos

chaos: $(READY)
	$(BIN)/python -m pytest -m chaos --timeout 3600

# The peers bring other frameworks, so they live apart from what the project is developed with.
# To see that it works: make bench BENCH_FLAGS=--quick
BENCH_VENV ?= .venv-bench
BENCH_FLAGS ?=
BENCH_READY := $(BENCH_VENV)/.ready

$(BENCH_READY): pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	@echo '*' > $(BENCH_VENV)/.gitignore
	$(BENCH_VENV)/bin/$(PIP) -r benchmarks/requirements.txt -e .
	@touch $@

bench: $(BENCH_READY)
	$(BENCH_VENV)/bin/python benchmarks/run_all.py $(BENCH_FLAGS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(BENCH_VENV) demo-output build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
