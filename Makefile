# Everything from a fresh machine with Python 3.11 and make: `make train`, `make test`.
#
# Variables, on the command line (make train PIP_ARGS=...) or in the environment:
#   PYTHON    the Python to build the venv from, 3.11 or newer
#   VENV      where the venv is (.venv)
#   PIP_ARGS  passed to every `pip install`: your own index, a folder of wheels, a proxy
#   TORCH     another torch than constraints.txt pins: a version (2.14.1), a wheel's path, or a requirement
#   ARGS      passed to `vescale-fsdp train`, or to pytest
# A supported torch that PYTHON (or an active venv) already has is used, unless TORCH asks for another: the venv then
# looks through to it, and nothing is installed outside the venv.

ACTIVE   := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python)
PYTHON   ?= $(or $(ACTIVE),$(shell command -v python3.11 || command -v python3))
VENV     ?= .venv
PIP_ARGS ?=
TORCH    ?=
ARGS     ?=
BIN      := $(VENV)/bin

# The same range as in pyproject.toml.
HAS_TORCH := import importlib.metadata as m; v = m.version('torch').split('.'); print(v[0] == '2' and 11 <= int(v[1]) < 15)
REUSE     := $(if $(TORCH),,$(filter True,$(shell $(PYTHON) -c "$(HAS_TORCH)" 2>/dev/null)))
# A bare version becomes a requirement; a path or a requirement stays as it is.
TORCH_REQUIREMENT := $(if $(TORCH),'$(shell echo '$(TORCH)' | sed 's/^[0-9]/torch==&/')')
TORCH_ID  := $(shell echo '$(TORCH)' | tr -c 'A-Za-z0-9.\n' '_')

PINS     := $(VENV)/pins-$(TORCH_ID).txt
TRAIN    := $(VENV)/.ready-train-$(TORCH_ID)
TEST     := $(VENV)/.ready-test-$(TORCH_ID)
PLUGINS  := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
INPUTS   := Makefile constraints.txt pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
TYPED    := src $(if $(wildcard typing/*.py),typing) $(wildcard $(addsuffix /src,$(PLUGINS)))
# No byte code in advance: most of what is installed is never imported.
INSTALL  := $(BIN)/python -m pip install -q --no-compile $(PIP_ARGS) -c $(PINS)

.PHONY: help train test test-all test-torch core-tests lint clean
.DEFAULT_GOAL := help

help:
	@echo "make train       train a small GPT over 4 ranks on this machine; ARGS='--ranks 2 --engine fsdp2'"
	@echo "make test        ruff, mypy --strict, pytest; ARGS='-k plan'"
	@echo "make test-all    the same with the long tests"
	@echo "make test-torch  the core tests with another torch, in a venv of its own; TORCH=2.14.1"
	@echo "make lint        ruff and mypy alone"
	@echo "make clean       remove the venvs, caches and out/"

train: $(TRAIN)
	$(BIN)/vescale-fsdp train $(ARGS)

test: lint
	$(BIN)/python -m pytest -m "not exhaustive" $(ARGS)

test-all: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(TYPED)

test-torch:
	@test -n "$(TORCH)" || { echo "Error: say which torch: make test-torch TORCH=2.14.1" >&2; exit 2; }
	$(MAKE) core-tests VENV=.venv-torch-$(TORCH_ID) TORCH="$(TORCH)"

core-tests: $(TEST)
	$(BIN)/python -c "import torch; print('torch', torch.__version__)"
	$(BIN)/python -m pytest -m "not exhaustive" tests/ragged_dtensor tests/vescale_fsdp tests/journey $(ARGS)

SITE := import sysconfig; print(sysconfig.get_paths()['purelib'])

$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "Error: '$(PYTHON)' is not Python 3.11 or newer. Run: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(if $(REUSE),--system-site-packages) $(VENV)
ifneq ($(and $(REUSE),$(ACTIVE)),)
	echo "import site; site.addsitedir('$$($(ACTIVE) -c "$(SITE)")')" > "$$($@ -c "$(SITE)")/active_venv.pth"
endif

# The build backend first, so that everything after it is built with what constraints.txt pins.
$(PINS): $(INPUTS) | $(BIN)/python
	grep -v $(if $(REUSE)$(TORCH),'^torch==','^#') constraints.txt > $@
	$(INSTALL) hatchling editables $(TORCH_REQUIREMENT) || { rm $@; exit 1; }

# Other stamps go first: they tell of another torch.
$(TRAIN): $(PINS)
	find $(VENV) -maxdepth 1 -name '.ready-*' ! -name '*-$(TORCH_ID)' -delete
	$(INSTALL) --no-build-isolation -e '.[cli,viz]' $(addprefix -e ./,$(PLUGINS)) $(TORCH_REQUIREMENT)
	touch $@

$(TEST): $(PINS)
	find $(VENV) -maxdepth 1 -name '.ready-*' ! -name '*-$(TORCH_ID)' -delete
	$(INSTALL) --no-build-isolation -e '.[cli,viz,hf,dev]' $(addprefix -e ./,$(PLUGINS)) $(TORCH_REQUIREMENT)
	touch $@

clean:
	rm -rf .venv .venv-torch-* out .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests typing plugins benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
