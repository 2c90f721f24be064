# make demo | make test | make lint: each builds .venv first when it is missing or out of date.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
NODE_STAMP := tests/interop/node_modules/.package-lock.json
AXE_STAMP := tests/web/node_modules/.package-lock.json
ARGS ?=

MINUTES ?= 2
SEED ?= 1

KILLS ?= 1000

WORKERS ?= 2
# Tests wait for sockets and processes a third of the time: one more of them at a time than the two cores.
TESTERS ?= 3
# Bytecode is kept: the assertions of some 400 files are rewritten once, and not by each worker of each run.
TESTED := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}

SEEDS ?= 1-2400
ROUNDS ?= 50

.PHONY: demo test test-long simulate friends await-points mutants fuzz chaos natlab natlab-pairs powerloss soak interop js-libp2p test-web browser wheel docs lint format constraints clean

demo: $(STAMP)  ## train four peers and a solo baseline: make demo ARGS="--peers 3 --minutes 1"
	$(BIN)/decentral demo $(ARGS)

test: $(STAMP)  ## every test but the long ones: make test ARGS="tests/cli -x"
	$(TESTED) $(BIN)/python -m pytest -m "not long" -n $(TESTERS) --dist worksteal $(ARGS)

test-long: $(STAMP)  ## those that make test leaves out: more seeds, sizes and phases of what it tries a part of
	$(TESTED) $(BIN)/python -m pytest -m long -n $(TESTERS) --dist worksteal $(ARGS)

fuzz: $(STAMP)  ## hostile bytes for every decoder, on two cores: make fuzz MINUTES=30 ARGS="--only stream"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run --minutes $(MINUTES) $(ARGS)

chaos: $(STAMP)  ## kill real peers and their daemons, as root on Linux: make chaos MINUTES=10 SEED=1 ARGS="--json chaos.json"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.run --minutes $(MINUTES) --seed $(SEED) $(ARGS)

natlab: $(STAMP)  ## real peers behind NATs and on thin lines, as root on Linux: make natlab ARGS="--only symmetric-pair"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.natlab.run $(ARGS)

natlab-pairs: $(STAMP)  ## two bare transports behind NATs: relayed or punched? make natlab-pairs ARGS="--only port-preserving --runs 20"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.natlab.pairs $(ARGS)

simulate: $(STAMP)  ## many simulated swarms under faults, one per seed: make simulate SEEDS=1-2400 ROUNDS=50
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulate.run --seeds $(SEEDS) --rounds $(ROUNDS) --processes $(WORKERS) $(ARGS)

friends: $(STAMP)  ## machines that die, restart, leave, sleep for a night and meet again: make friends SEEDS=1-200 ARGS="--only nights"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulate.friends --seeds $(SEEDS) --processes $(WORKERS) $(ARGS)

await-points: $(STAMP)  ## a crash at every await point of a round, one at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulate.await_points --processes $(WORKERS) $(ARGS)

mutants: $(STAMP)  ## do the simulation and the tests catch planted bugs? make mutants ARGS="--only votes"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.mutate --processes $(WORKERS) $(ARGS)

powerloss: $(STAMP)  ## SIGKILLs while checkpoints are written: make powerloss KILLS=10000, or ARGS=--states for power cuts
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.powerloss --kills $(KILLS) $(ARGS)

soak: $(STAMP)  ## 1,000 rounds of a swarm whose rounds fail at 50 Mbit/s: does anything grow? As root on Linux
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.run $(ARGS)

interop: $(STAMP) $(NODE_STAMP)  ## js-libp2p against all transports, with node and npm: make interop ARGS="-k relay"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/interop $(ARGS)

test-web: $(STAMP) browser  ## the page in a real Chromium, with npm: make test-web ARGS="--shots shots -k replay"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/web $(ARGS)

wheel: $(STAMP)  ## the built wheel outside the repository: demo, two peers, every extra: make wheel ARGS="--without libp2p"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.packaging.try_wheel $(ARGS)

docs: $(STAMP)  ## the documentation as a site in site/, every link checked; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

lint: $(STAMP)  ## the last line: whether every test can be imported
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	collected=$$($(BIN)/python -m pytest --collect-only -qq tests tests/interop 2>&1) || { tail -n 40 <<< "$$collected"; exit 1; }

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and alone: what depends on it must not pull another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,libp2p]' \
	  || { echo "without py-libp2p and its tests: one of its dependencies is built with GMP (libgmp-dev)"; \
	       $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; }
	touch $@

js-libp2p: $(NODE_STAMP)

browser: $(STAMP) $(AXE_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	command -v chromium chromium-browser google-chrome >/dev/null || { echo "install a Chromium: apt-get install chromium"; exit 1; }

$(AXE_STAMP): tests/web/package.json tests/web/package-lock.json
	cd tests/web && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

# npm warns that two packages want node 22; node 20 runs them (tests/interop/peer.mjs), and its errors are still shown.
$(NODE_STAMP): tests/interop/package.json tests/interop/package-lock.json
	cd tests/interop && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

constraints: $(STAMP)  ## write down what is installed now, without local build tags
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip list --format=freeze --exclude pip --exclude decentral \
	  | sed 's/+[a-z0-9.]*$$//' | sort -f; } > constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf .venv site tests/interop/node_modules tests/web/node_modules demo-run soak-run .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
