# make demo   the main job on real input        make test   every test that this machine can run
# make lint   formatting and static checks      make gpu    the GPU tests, on a GPU machine
# make oracles  byte tests against other implementations
#
# Each sets up .venv first: nothing by hand. Set PYTHON for another interpreter, VENV for another
# place, WORKERS=0 for tests in one process. Packages come from the index that pip is configured with.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
BIN = $(VENV)/bin
CSRC = $(shell find csrc tests -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh' -o -name '*.inl')

.PHONY: demo test oracles lint format build gpu clean

demo: $(VENV)/.demo build
	$(BIN)/python -m nvfp4_linear demo

test: $(VENV)/.test build
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 $(PYTEST_ARGS)

# `make test` skips what it compares with other implementations; this installs them first.
oracles: $(VENV)/.test $(VENV)/.oracles build
	$(BIN)/python -m pytest tests/test_oracles.py $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

# Incremental: ninja rebuilds what changed. MAKEFLAGS would reach ninja's children.
build: $(VENV)/.base
	@echo "Building the extension (a few minutes the first time)"
	@MAKEFLAGS= $(BIN)/python setup.py -q build_ext --inplace
	@MAKEFLAGS= $(BIN)/pip install -q --no-build-isolation --no-deps -e .

$(VENV)/.base: requirements/build.txt requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python >= 3.10 is needed, $(PYTHON) is older: set PYTHON=python3.12 or such"; exit 1; }
	@echo "Setting up $(VENV): torch, nvidia-cublas and what the build needs"
	@$(PYTHON) -m venv $(VENV) || { echo "Remedy: apt-get install python3-venv"; exit 1; }
	@$(BIN)/pip install -q -c requirements/constraints.txt -r requirements/build.txt
	@touch $@

$(VENV)/.%: requirements/%.txt $(VENV)/.base
	@echo "Installing $<"
	@$(BIN)/pip install -q -c requirements/constraints.txt -r $<
	@touch $@

# On a GPU machine where only the built tree travels: no pip, no network, the machine's own Python.
# The ops binary loads in any of them; the lab's module is for one Python and is built if it has to be.
gpu:
	@$(PYTHON) -c "import nvfp4_linear._cublaslt" 2>/dev/null || \
	  NVFP4_EXTENSIONS=_cublaslt $(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

clean:
	rm -rf build $(VENV) nvfp4_linear/*.so *.egg-info
