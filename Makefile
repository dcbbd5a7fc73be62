# `make` says what there is. Everything runs through `.venv/bin/python -m`, never through a script in
# .venv/bin: the first line of a script can't hold a path with a space.
PYTHON ?= python3
# What is not timed runs side by side; measuring stages hold the machine alone.
CORES ?= all
# Others than config/config.yaml's: make verdict MODEL=qwen2.5-0.5b-shape
MODEL ?=
PROTOCOL ?=
PROFILE ?=
# An eligible arm for `make adopt`; FORCE=1 adopts a verdict of random weights or of a smoke run.
STORE ?=
FORCE ?=
# One process of tests a core; a file's tests share what they set up, so they stay together.
WORKERS := --numprocesses auto --maxprocesses 4 --dist loadfile
PY := .venv/bin/python
# Of Snakemake's own lines only which stage begins, warnings and errors; plain `snakemake` says more.
QUIET := $(PY) -m snakemake --quiet host progress reason
SNAKEMAKE := $(QUIET) --cores $(CORES)
# The answer stays in sight: it is printed last. Code 4 says INCONCLUSIVE, which is a result.
SHOWN := "$${KVTRIAL_RESULTS:-results}/shown"
ANSWER := [ ! -f $(SHOWN) ] || $(PY) -m kvtrial verdict "$$(cat $(SHOWN))" || [ $$? -eq 4 ]
# One --config with all of them, and behind the targets: a second one would replace the first, and it takes
# whatever follows.
CHOSEN = $(if $(MODEL)$(PROTOCOL)$(PROFILE)$(STORE)$(FORCE),--config $(if $(MODEL),model="$(MODEL)") \
	$(if $(PROTOCOL),protocol="$(PROTOCOL)") $(if $(PROFILE),profile="$(PROFILE)") \
	$(if $(STORE),store="$(STORE)") $(if $(FORCE),force=true))

# Nothing phones home.
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export HF_HUB_DISABLE_TELEMETRY := 1
export PYTHONUTF8 := 1

# Snakemake keeps a cache in the home folder; where that can't be written, it has one here.
ifeq ($(shell mkdir -p "$${XDG_CACHE_HOME:-$$HOME/.cache}" 2>/dev/null && test -w "$${XDG_CACHE_HOME:-$$HOME/.cache}" && echo yes),)
export XDG_CACHE_HOME := $(CURDIR)/.snakemake/cache
endif

.DEFAULT_GOAL := help
.PHONY: help setup verdict smoke full build model report adopt peers ui docs rulegraph rooms test test-all \
	test-browser test-fuzz test-mutation test-neon test-power-cuts test-slurm lint clean

help:  ## what there is to make
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile
	@echo "  A single stage again:  $(PY) -m snakemake --cores 1 --forcerun m1"

setup:  ## .venv with the pinned dependencies and the compiled kernels; quick when it is there
	@"$(PYTHON)" scripts/setup.py

verdict: setup  ## the answer: which KV cache this machine should run
	@rm -f $(SHOWN)
	@$(SNAKEMAKE) show $(CHOSEN) $(ARGS)
	@$(ANSWER)

smoke: setup  ## every stage on a tiny model, in about three minutes
	@rm -f $(SHOWN)
	@$(QUIET) --cores all --profile profiles/smoke report show $(ARGS)
	@$(ANSWER)

full: PROFILE = full
full: setup  ## the verdict, with four sessions and all cores as well
	@rm -f $(SHOWN)
	@$(SNAKEMAKE) report show $(CHOSEN) $(ARGS)
	@$(ANSWER)

build: setup  ## compile the kernels that are older than their sources
	@$(SNAKEMAKE) build $(ARGS)

model: setup  ## fetch the model (MODEL=name for another)
	@$(SNAKEMAKE) model $(CHOSEN)

report: setup  ## the verdict with its figures as one HTML page
	@$(SNAKEMAKE) report $(CHOSEN) $(ARGS)

adopt: setup  ## make `open_store()` and `kvtrial generate` use what was decided
	@$(SNAKEMAKE) adopt --forcerun adopt $(CHOSEN) $(ARGS)

peers:  ## compare with other engines: installs llama.cpp, PyTorch, ONNX Runtime and OpenVINO, then measures
	@"$(PYTHON)" scripts/setup.py peers
	@$(SNAKEMAKE) peers $(CHOSEN) $(ARGS)

ui: setup  ## browse the measurements in MLflow
	@$(PY) -m kvtrial.tracking ui $(ARGS)

docs: setup  ## the documentation as a website, build/docs
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/docs.txt
	@$(PY) -m sphinx -W --keep-going --quiet -b html docs build/docs
	@$(PY) scripts/check_site.py build/docs

rulegraph: setup  ## draw docs/img/rulegraph.svg again (needs Graphviz)
	@$(SNAKEMAKE) --quiet all --rulegraph dot report adopt peers | dot -Tsvg > docs/img/rulegraph.svg

rooms: setup  ## draw docs/img/rooms.svg again, from the imports
	@$(PY) scripts/rooms.py

test: setup model  ## the tests, without the slow ones
	@$(PY) -m pytest $(WORKERS) -m "not slow and not cluster and not browser and not neon" $(ARGS)

test-slurm: setup  ## a trial through a real Slurm on this machine (needs slurm-wlm and munge)
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/cluster.txt
	@$(PY) -m pytest tests/cluster $(ARGS)

test-browser: setup  ## the report and the MLflow UI in headless Chromium
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/browser.txt
	@$(PY) -m pytest tests/browser $(ARGS)

test-all: setup model test-slurm test-browser test-neon  ## all tests
	@$(PY) -m pytest $(WORKERS) -m "not cluster and not browser and not neon" $(ARGS)

test-neon: setup  ## the vector kernels as AArch64 runs them, under QEMU (says what it needs)
	@$(PY) -m pytest tests/native -m neon $(ARGS)

test-power-cuts: setup  ## 200 power cuts a cold store, ten minutes; SEED=2 for others
	@SEED=$(or $(SEED),1) $(PY) -m pytest tests/unit/test_cold_crash.py -m slow -s $(ARGS)

test-mutation: setup  ## break the code on purpose and see that the tests notice, 15 minutes
	@$(PY) tests/mutation/harness.py $(ARGS)

test-fuzz: setup  ## read 1,000 damaged model files of each tensor kind, some minutes; SEED=1000 for others
	@FUZZ_FILES=$(or $(FILES),1000) SEED=$(or $(SEED),0) $(PY) -m pytest $(WORKERS) tests/fuzz $(ARGS)

bench: setup  ## how near attention, decode and prefill come to the machine's ceilings, with committed figures to compare
	@$(PY) benchmarks/bench.py $(ARGS)

lint: setup  ## style, types and the workflow's own checks
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@PATH="$$(pwd)/.venv/bin:$$PATH" $(PY) -m cython_lint.cython_lint src
	@$(PY) -m snakefmt --check --line-length 100 workflow
	@$(SNAKEMAKE) --lint
	@if cargo clippy --version > /dev/null 2>&1; then \
	  cargo clippy --quiet --offline --manifest-path rust/Cargo.toml --target-dir build/clippy -- -D warnings; \
	else echo "lint: clippy is not here, so rust/ was not looked at (rustup component add clippy)"; fi

clean:  ## remove .venv and build/; results stay
	rm -rf .venv build
