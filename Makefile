# Everything runs in a virtual environment made here; only python3 and pip are needed beforehand.
#   make test                  on the default torch, in .venv
#   make test TORCH=2.15.0     on another one, in .venv-2.15.0
#   make test PYTHON=python3.13            with another Python, in .venv-py3.13
#   make test PYTHON=python3.13 TORCH=2.15.0   both, in .venv-py3.13-2.15.0

PYTHON ?= python3
TORCH ?= 2.13.0
# Without those that make a device, or use one: they define no op to check.
EXAMPLES ?= $(filter-out %_device.py examples/device_%.py,$(sort $(wildcard examples/*.py examples/migrate/*.py)))

# An environment for each Python and torch but the default ones.
VENV := .venv
ifneq ($(PYTHON),python3)
VENV := $(VENV)-py$(shell $(PYTHON) -c 'import sys, sysconfig; \
	print("%d.%d" % sys.version_info[:2] + "t" * bool(sysconfig.get_config_var("Py_GIL_DISABLED")))')
endif
ifneq ($(TORCH),2.13.0)
VENV := $(VENV)-$(TORCH)
endif
BIN := $(VENV)/bin
TESTING := $(VENV)/.installed-test
DEVELOPING := $(VENV)/.installed-dev

.PHONY: help demo demo-all test test-all test-fast test-gpu test-versions generated types-table versions-table screens lint format typecheck docs notebook call-costs pictures dist release-check bench bench-check bench-backend house mutants clean
.NOTPARALLEL:

help:
	@echo "targets: demo demo-all test test-all test-fast test-gpu test-versions generated types-table versions-table screens lint format typecheck docs notebook call-costs pictures dist release-check bench bench-check bench-backend house mutants clean"

# torch goes first and pinned, and is named again beside the package so that nothing replaces it.
# The stamps make a rerun free; an environment that is already there is used as it is.
$(VENV)/.installed-%: pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing torch $(TORCH) in $(VENV), which takes minutes the first time"
	$(BIN)/python -m pip install --progress-bar off "torch==$(TORCH)"
	@echo "installing customops[$*]"
	$(BIN)/python -m pip install --quiet "torch==$(TORCH)" --editable ".[$*]"
	touch $@

# A few examples that need NumPy alone, in half a minute; a line for each as it is done.
demo: $(VENV)/.installed-demo
	$(BIN)/python -m customops check --effort quick $(patsubst %,examples/%.py,numpy_sin inplace rotary train quantized_gemm)
	@echo
	@echo "next: $(BIN)/customops describe examples::rotary examples/rotary.py   what an op is, has and lacks"
	@echo "      $(BIN)/customops new package mylib                              a package of your own, with tests"
	@echo "      make demo-all                                                    the other examples; installs JAX, Warp, numba"

# All examples.
demo-all: $(TESTING)
	$(BIN)/python -m customops check --effort quick $(EXAMPLES)

# The tests, with a part of each product: pyproject.toml leaves out the tests that are marked `full`.
test: $(TESTING)
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

# The tests with the full products.
test-all: $(TESTING)
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "full or not full"

# What neither compiles nor starts processes nor takes seconds: for the time between two edits.
test-fast: $(TESTING)
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not full and not slow and not compile and not process"

# What needs a CUDA device: each of the others runs without, also where there is one.
test-gpu: $(TESTING)
	$(BIN)/python -m pytest -q -m gpu

# On each torch that docs/versions.md has a column for, in an environment of its own (6 GB each).
test-versions:
	set -e; for torch in 2.13.0 2.14.1 2.15.0; do $(MAKE) test TORCH=$$torch; done

# Writes tests/codegen/generated and tests/programs/type_checkers/torch_ops.pyi anew, to be reviewed.
generated: $(TESTING)
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest -q tests/codegen/test_generated.py
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest -q tests/cli/test_stubs.py -k golden
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest -q tests/house/test_public_api.py

# Writes docs/screens.md anew.
screens: $(TESTING)
	$(BIN)/python docs/screens.py

# Writes the tables of docs/types_table.md anew.
types-table: $(TESTING)
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest -q tests/products/signatures/test_table.py -k test_the_page_has_the_table

# Writes the column of this torch in docs/versions.md anew.
versions-table: $(TESTING)
	$(BIN)/python docs/versions.py

lint: $(DEVELOPING)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEVELOPING)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(DEVELOPING)
	$(BIN)/mypy customops customops_pytest
	if [ -d tests/programs/type_checkers ]; then $(BIN)/mypy tests/programs/type_checkers; fi
	if [ -x $(BIN)/basedpyright ]; then $(BIN)/basedpyright; fi

docs: $(DEVELOPING)
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build

# Runs the pages of the tutorial, and writes them with what they print to docs/tutorial/tutorial.ipynb; in a minute.
notebook: $(TESTING)
	$(BIN)/python docs/tutorial/notebook.py

# Measures what calls cost, for the picture and the table of README.md; in minutes, on a machine that does nothing else.
call-costs: $(TESTING)
	$(BIN)/python benchmarks/bench.py --group calls definitions serving languages graphs \
		--json docs/pictures/call_costs.json
	$(PYTHON) docs/pictures/draw.py

# Draws docs/pictures and the table of README.md anew, from what was measured; it needs nothing but Python.
pictures:
	$(PYTHON) docs/pictures/draw.py

# A wheel and an sdist in dist/; the wheel is then installed by itself and imported from there.
dist: $(VENV)/.installed-release
	rm -rf dist build/installed
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pip install --quiet --no-deps --target build/installed dist/*.whl
	$(BIN)/python -I .ci/installed.py build/installed

# The wheel and the sdist in clean environments, for each Python from 3.11 to 3.14 that there is, or PYTHONS="...": each
# installs torch, and runs README.md and a package of `customops new` outside the checkout. Takes minutes for each.
release-check: dist
	$(BIN)/python .ci/release_check.py $(TORCH) $(PYTHONS)

# The time of calls, for all groups of cases; benchmarks/bench.py --help shows how to select some.
bench: $(TESTING)
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/gpu_ops.py

# Compares the results of all contenders, without timing.
bench-check: $(TESTING)
	$(BIN)/python benchmarks/bench.py --check
	$(BIN)/python benchmarks/gpu_ops.py --check
	$(BIN)/python benchmarks/backend_overhead.py --check

bench-backend: $(TESTING)
	$(BIN)/python benchmarks/backend_overhead.py

# The size of the package, and of ten walks through it: how many calls of its functions, and changes of file.
house: $(TESTING)
	$(BIN)/python tests/helpers/house.py

# Makes mistakes in a copy of the package, one at a time, and runs the tests that must notice; about ten minutes.
mutants: $(TESTING)
	$(BIN)/python tests/mutants.py

# Leaves the virtual environments: they are slow to rebuild and never stale.
clean:
	rm -rf docs/_build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find customops customops_pytest tests docs benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
