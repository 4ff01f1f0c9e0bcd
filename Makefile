# make demo, make test: everything, on a machine with Python and make.
# MPI=openmpi takes Open MPI; each MPI has an environment of its own.

MPI    ?= mpich
PYTHON ?= python3
VENV   ?= .venv-$(MPI)
SIZES  ?= 1 2 3 4
ARGS   ?=

BIN     := $(VENV)/bin
MPIEXEC := $(BIN)/mpiexec
PYTEST  := $(BIN)/python -m pytest

# What pytest runs: the directory, or those tests of ARGS that are named there.
SOME = $(if $(filter tests/%,$(ARGS)),,$(1)) $(ARGS)

# More ranks than cores: threads of the linear algebra would only add to that, and a rank
# that waits must leave its core (see the file).  Without a compiler, tests are slower.
export OMP_NUM_THREADS ?= 1
YIELD := $(abspath $(VENV))/sched_yield.so
SHARE := LD_PRELOAD="$$(ls $(YIELD) 2>/dev/null)"
# Most of what pip installs is never imported. Python compiles the rest at the first import.
export PIP_COMPILE ?= 0
ifeq ($(MPI),openmpi)
include .ci/env.openmpi
endif

.PHONY: help demo test test-all quick-training test-single test-unit test-oldest test-system test-programs test-checks \
        test-device test-1-openmpi test-cupy test-newest-cupy test-oldest-cupy \
        test-gpu test-gpu-torch sanitize-gpu test-mpi test-hosts test-adapters validate-plan lint docs pages venv environments \
        clean
help:
	@echo "make demo         train with all five strategies on 4 ranks, one of them slow; then kill a rank"
	@echo "make test         units, kernels, 2 ranks, a training: 3 minutes"
	@echo "make test-all     all of tests/unit, device, system, and tests/mpi on $(SIZES) ranks"
	@echo "make test-4       the tests of tests/mpi on 4 ranks"
	@echo "make test-mpi     the same on $(SIZES) ranks"
	@echo "make test-hosts   some of them on several hosts made of namespaces; needs root"
	@echo "make test-adapters   PyTorch and JAX, on $(ADAPTER_SIZES) ranks; installs them (600 MB)"
	@echo "make test-unit    what needs no MPI; test-system, test-device: the others"
	@echo "make test-oldest  units and 2 ranks, with the oldest libraries that are supported"
	@echo "make test-cupy    CuPy itself, oldest and newest, without a GPU; installs 700 MB"
	@echo "make test-gpu     the tests with device arrays, on a real GPU; make test-gpu-torch"
	@echo "make validate-plan   compare hpcaccum plan with real jobs, in 20 minutes"
	@echo "make lint         ruff and mypy"
	@echo "make docs         the documentation as pages, in build/site"
	@echo "make clean        remove the environments and what was built"
	@echo "MPI=openmpi takes Open MPI, PYTHON=... another Python, ARGS=... goes to pytest"

demo: $(VENV)/.demo
	$(MPIEXEC) -n 4 $(BIN)/hpcaccum train --compare --straggler 3:20 $(ARGS) </dev/null
	$(BIN)/python docs/losses.py --demo

# What most changes break first, in 3 minutes on 2 cores.  Of a part that fails, the others
# run all the same.
test: $(VENV)/.test
	@echo "units, kernels and 2 ranks, two parts at a time: some 3 minutes on 2 cores"
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target \
	    quick-2 quick-device quick-unit quick-training; status=$$?; \
	echo "left out: make test-all (3 and 4 ranks, whole programs), test-adapters, test-hosts"; \
	exit $$status

quick-2:
	@$(MAKE) --no-print-directory test-2 ARGS='-m "not slow" -o mpi_nodes=halves'

quick-%:
	@$(MAKE) --no-print-directory test-$* ARGS='-m "not slow"'

quick-training: $(VENV)/.test
	$(SHARE) $(PYTEST) tests/system/test_train.py -k log_of_one_strategy </dev/null

# All parts run even if one fails, and all results are reported.
test-all: $(VENV)/.test
	@status=0; \
	for part in test-single test-programs test-mpi; do \
	    $(MAKE) --no-print-directory $$part || status=1; \
	done; \
	echo "left out: make test-adapters (PyTorch, JAX), make test-hosts, MPI=openmpi"; \
	exit $$status

# Two at a time, as each leaves a core idle.
SINGLE ?= test-device test-checks test-unit
test-single: $(VENV)/.test
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target $(SINGLE)

test-unit: $(VENV)/.test
	$(PYTEST) $(call SOME,tests/unit) </dev/null

# Whole programs, and what needs no MPI job.
test-system: test-programs test-checks

test-programs: $(VENV)/.test
	$(SHARE) $(PYTEST) -m mpi $(call SOME,tests/system) </dev/null

test-checks: $(VENV)/.test
	$(PYTEST) -m "not mpi" $(call SOME,tests/system) </dev/null

# CUDA kernels on the simulated device.
test-device: $(VENV)/.test
	$(PYTEST) $(call SOME,tests/device) </dev/null

# CuPy itself, the oldest and the newest that are supported, over a driver that does
# nothing.
OLDEST_CUPY := $(VENV)/cupy-14.0
NULL_DRIVER := $(PYTEST) tests/null_driver $(ARGS) </dev/null
test-cupy: $(VENV)/.test
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target \
	    test-newest-cupy test-oldest-cupy

test-newest-cupy: $(VENV)/.nvrtc
	$(NULL_DRIVER)

test-oldest-cupy: $(VENV)/.nvrtc $(OLDEST_CUPY)/.installed
	PYTHONPATH=$(OLDEST_CUPY) $(NULL_DRIVER)

# CuPy for the CUDA of this machine is the user's choice: it must be in $(VENV).
test-gpu: $(VENV)/.test
	$(PYTEST) tests/device -m gpu $(ARGS) </dev/null
	$(MPIEXEC) -n 2 $(PYTEST) tests/mpi -m gpu $(ARGS) </dev/null

# PyTorch for the CUDA of this machine must be in $(VENV), too.
test-gpu-torch: $(VENV)/.test
	$(MPIEXEC) -n 2 $(PYTEST) tests/adapters -m gpu $(ARGS) </dev/null

# The kernels alone, by NVIDIA's checkers, each array in memory of its own.
CHECKED := $(PYTEST) -p tests.device.unpooled $(addprefix tests/device/test_,accumulate.py \
           multi_tensor.py finish.py sparse.py update.py) -m gpu $(ARGS)
sanitize-gpu: $(VENV)/.test
	for tool in memcheck racecheck initcheck synccheck; do \
	    compute-sanitizer --tool=$$tool --error-exitcode=1 $(CHECKED) </dev/null || exit 1; \
	done

# In an environment of their own: all other tests pass without these libraries.
ADAPTERS      := $(VENV)-adapters
ADAPTER_SIZES ?= 1 2 3
test-adapters:
	@status=0; \
	for part in $(ADAPTER_SIZES) programs; do \
	    $(MAKE) --no-print-directory VENV=$(ADAPTERS) adapters-$$part || status=1; \
	done; \
	exit $$status

adapters-programs: $(VENV)/.adapters
	$(SHARE) $(PYTEST) $(call SOME,tests/examples) </dev/null

adapters-%: $(VENV)/.adapters
	$(SHARE) $(MPIEXEC) -n $* $(PYTEST) $(call SOME,tests/adapters) </dev/null

test-mpi: $(VENV)/.test
	@failed=""; summary=""; \
	for size in $(SIZES); do \
	    begin=$$(date +%s); \
	    if $(MAKE) --no-print-directory test-$$size; then result=passed; \
	    else result=FAILED; failed="$$failed $$size"; fi; \
	    summary="$$summary\n  $$size ranks: $$result, $$(($$(date +%s) - begin)) s"; \
	done; \
	printf "tests/mpi with $(MPI):$$summary\n"; test -z "$$failed"

# One rank of Open MPI, beside the environment of another MPI.
test-1-openmpi:
	@$(MAKE) --no-print-directory test-1 MPI=openmpi

test-%: $(VENV)/.test
	$(SHARE) $(MPIEXEC) -n $* $(PYTEST) $(call SOME,tests/mpi) </dev/null

test-hosts: $(VENV)/.test
	$(SHARE) $(PYTEST) $(call SOME,tests/hosts) </dev/null

# Ranks that sleep, compared with hpcaccum plan, in 20 minutes; writes docs/plan.md.
validate-plan: $(VENV)/.test
	$(SHARE) $(BIN)/python docs/plan.py $(ARGS) </dev/null

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In an environment of its own, too. The variable silences a notice of the theme.
docs:
	@$(MAKE) --no-print-directory VENV=$(VENV)-docs pages

pages: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

venv: $(VENV)/.test

# The oldest versions that are supported; all other environments have the newest.
# PYTHON selects the Python of it. Tests that need CuPy are skipped: it needs NumPy 2.
OLDEST := PIP_CONSTRAINT=$(abspath .ci/oldest.txt) $(MAKE) --no-print-directory VENV=$(VENV)-oldest
test-oldest:
	@$(OLDEST) quick-unit
	@$(OLDEST) test-2 ARGS="$(addprefix tests/mpi/test_,plain_model.py optim_wrappers.py \
	    reducer_errors.py accumulator_errors.py node_memory.py)"

# All that .ci/run needs. Each pip builds the package in this directory, so not at once.
environments: $(VENV)/.nvrtc $(OLDEST_CUPY)/.installed
	$(MAKE) --no-print-directory MPI=openmpi venv
	$(OLDEST) venv
	$(MAKE) --no-print-directory VENV=$(ADAPTERS) $(ADAPTERS)/.adapters
	$(MAKE) --no-print-directory VENV=$(VENV)-docs $(VENV)-docs/.docs

# Stamps: pip runs again only when what it would install may have changed.
$(VENV)/.demo: pyproject.toml setup.cfg | $(BIN)/pip
	$(BIN)/python -m pip install --quiet -e '.[$(MPI),demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo | $(YIELD)
	$(BIN)/python -m pip install --quiet -e '.[$(MPI),demo,test,dev]'
	@touch $@

$(VENV)/.adapters: pyproject.toml setup.cfg | $(YIELD)
	$(BIN)/python -m pip install --quiet -e '.[$(MPI),test-adapters]'
	@touch $@

$(VENV)/.docs: pyproject.toml setup.cfg | $(BIN)/pip
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	@touch $@

$(YIELD): tests/sched_yield.c | $(BIN)/pip
	-$(CC) -O2 -shared -fPIC -o $@ $<

$(VENV)/.nvrtc: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -e '.[kernels]'
	@touch $@

$(OLDEST_CUPY)/.installed: | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --no-deps --target $(OLDEST_CUPY) \
	    'cupy-cuda13x==14.0.*'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "hpcaccum needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)"; \
	    echo "another one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments: ensurepip is missing"; \
	    echo "Debian, Ubuntu: apt-get install python3-venv"; \
	    echo "another one:    make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf .venv-mpich* .venv-openmpi* build dist *.egg-info .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
