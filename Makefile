# Everything from a fresh clone: each target installs what it needs first, once.
# Behind a target: tools/install.sh and tools/engines.sh; settings: tools/env.sh.

SHELL := bash
STAMPS := .venv/stamps
IN_ENV := source tools/env.sh &&
INSTALLER := pyproject.toml constraints.txt tools/install.sh tools/lib.sh
ARGS ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: run test lint format bench engines clean help

run: $(STAMPS)/report ## train digits on 4 workers with four methods and compare them (3 minutes)
	@$(IN_ENV) python -m benchmarks.compare $(ARGS)

test: $(STAMPS)/test lint ## lint, then every test, with every engine (ARGS="-k ring" for some)
	@$(MAKE) --no-print-directory engines || { test -z "$$CI" && \
		echo "The tests of the engines that are left out will not run." >&2; }
	@$(IN_ENV) pytest $(ARGS)

lint: $(STAMPS)/lint ## ruff, and mypy --strict on the package
	@tools/lint.sh

format: $(STAMPS)/lint ## rewrite the code as ruff formats it
	@$(IN_ENV) ruff check --fix . ; ruff format .

bench: $(STAMPS)/report ## time single rounds against a bare all-reduce (ARGS="--bandwidth 1Gbit" behind links)
	@$(IN_ENV) python -m benchmarks.rounds --ranks 2 4 --json runs/rounds.json $(ARGS)

engines: $(STAMPS)/engines ## install Open MPI with mpi4py, Horovod and DeepSpeed

clean: ## remove the environment and everything that was made here
	rm -rf .venv build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

$(STAMPS)/report: $(INSTALLER)
	@tools/install.sh report
	@mkdir -p $(@D) && touch $@

$(STAMPS)/lint: $(INSTALLER)
	@tools/install.sh lint
	@mkdir -p $(@D) && touch $@

$(STAMPS)/test: $(INSTALLER)
	@tools/install.sh test,lint
	@source tools/lib.sh && debian_install dataset-fashion-mnist iproute2 || true
	@mkdir -p $(@D) && touch $@ $(STAMPS)/report $(STAMPS)/lint

$(STAMPS)/engines: tools/engines.sh tools/cxx17 $(STAMPS)/test
	@tools/engines.sh
	@mkdir -p $(@D) && touch $@
