# Every target sets up what it needs, in .venv inside this clone, once: nothing is installed elsewhere.

# The Python to make .venv with: 3.11 or newer. Another one: make PYTHON=python3.13 clean test
PYTHON ?= python3
# More arguments for pytest: make test ARGS="-k atomics -x"
ARGS ?=
# Some of test-rdma only: make test-rdma DEVICES="rxe siw" SUITES=conformance
DEVICES ?=
SUITES ?=

BIN := .venv/bin
STAMP := .venv/.installed

# A virtual environment holds its own path, and a link to its Python: one that was moved or copied along with the
# clone, or whose Python is gone, is made anew.
ifneq ($(shell test -x $(BIN)/python && cat $(STAMP) 2>/dev/null),$(CURDIR))
$(shell rm -f $(STAMP))
endif

.PHONY: help
help: ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 20

.PHONY: demo
demo: $(STAMP) ## A server and a client in two processes, and what an awaited READ, WRITE, SEND costs
	@$(BIN)/aiordma demo

.PHONY: test
test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest $(ARGS)

.PHONY: lint
lint: $(STAMP) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(STAMP) ## Fix style and format where that can be done by itself
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(STAMP) ## Measure, print the table, and write it to build/bench.json
	@mkdir -p build
	@$(BIN)/python -m benchmarks

.PHONY: test-rdma
test-rdma: $(STAMP) ## Run the tests on the kernel's RDMA devices, in a virtual machine
	$(BIN)/python -m tests.vm test $(DEVICES:%=--device=%) $(SUITES:%=--suite=%) -- $(ARGS)

.PHONY: bench-rdma
bench-rdma: $(STAMP) ## Measure there, print the table, and write it to build/bench-rdma.json
	@$(BIN)/python -m tests.vm bench -- $(ARGS)

.PHONY: shell-rdma
shell-rdma: $(STAMP) ## A shell there
	@$(BIN)/python -m tests.vm shell

.PHONY: clean-rdma
clean-rdma: $(STAMP) ## Remove the virtual machine's image from the cache folder
	$(BIN)/python -m tests.vm clean

.PHONY: clean
clean: ## Remove what the targets made
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

old_python = $(shell $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || echo yes)
no_venv = $(shell $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || echo yes)
venv_package = $(shell $(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')

$(STAMP): pyproject.toml
	$(if $(old_python),$(error aiordma needs Python 3.11 or newer, and $(PYTHON) isn't that: apt install python3.11 \
	python3.11-venv, then make PYTHON=python3.11))
	$(if $(no_venv),$(error aiordma needs the venv module of $(PYTHON): apt install $(venv_package)))
	@echo 'Setting up .venv, once: half a minute or so'
	@mkdir -p build
	@{ $(PYTHON) -m venv --clear .venv && \
	$(BIN)/python -m pip --disable-pip-version-check install --editable '.[dev]'; } >build/setup.log 2>&1 || \
	{ tail -n 20 build/setup.log; echo 'aiordma: setting up .venv failed; all of it is in build/setup.log'; exit 1; } >&2
	@printf '%s' '$(CURDIR)' >$(STAMP)
