# The legs of .ci/run; `leg` is a function of it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c

SINGLES := test-checks test-device test-1-openmpi test-1 test-oldest \
           test-newest-cupy test-oldest-cupy

# The longest legs come first. Make passes over this list, and starts what waits for an
# environment in the next pass only.
.PHONY: all
all: environments programs-mpich mpich-4 programs-openmpi clusters adapters \
     single-test-checks no-shared-memory-4 openmpi-4 readme mpich-3 openmpi-2 \
     hosts-mpich hosts-openmpi packaging \
     $(SINGLES:%=single-%) lint documentation shell-scripts

# One after the other: all of them build the package in this directory.  Legs that need
# the first ones only, and do not read that directory, begin meanwhile: the last one waits
# for 1.5 GB of downloads.
.PHONY: environment-mpich environment-openmpi environments
environment-mpich:
	@leg "environment of MPICH" make venv

environment-openmpi: environment-mpich
	@leg "environment of Open MPI" make venv MPI=openmpi

environments: environment-openmpi
	@leg "other environments" make environments

programs-mpich mpich-4 clusters lint: environment-mpich
programs-openmpi openmpi-2 openmpi-4 hosts-openmpi: environment-openmpi
# Not before, so that one of the longest legs, `programs-openmpi`, begins before them.
no-shared-memory-4 mpich-3 readme hosts-mpich: environment-openmpi
packaging adapters documentation $(SINGLES:%=single-%): environments

# `make test-all` also has every second of many kills that are alike.
PROGRAMS := -m 'mpi and not thorough'
IGNORED = $(patsubst %,--ignore=tests/system/test_%.py,$(1))
# Most of their time they wait for SLURM, or for jobs that hang on purpose.
CLUSTERS := slurm doctor
# One training is in the leg `readme`.
programs-mpich:
	@leg "MPICH, whole programs" make test-programs ARGS="$(PROGRAMS) \
	    -k 'not log_of_one_strategy' $(call IGNORED,$(CLUSTERS) packaging)"

clusters:
	@leg "MPICH, batch jobs" make test-programs \
	    ARGS="$(PROGRAMS) $(CLUSTERS:%=tests/system/test_%.py)"

packaging:
	@leg "packaging" make test-programs ARGS=tests/system/test_packaging.py

# The harness of the tests, refused options, unusable files, the programs of the pages, the
# tables, the wheel, what a training writes and how it stops are tested with MPICH: they
# depend on pytest and on the commands, not on the MPI. So do batch scripts, the doctor, and
# what goes on without a rank, except for how the ranks of a job start and end.
OPENMPI := (not test_slurm or two_nodes or find_each_other or died or killed) and \
           (not test_doctor or alone_it or a_launcher or is_killed) and \
           (not test_shrink or two_ranks or a_group or cannot_go_on or may_not) and \
           (not test_survive or strategies or training or status or soak or two_ranks)
programs-openmpi:
	@leg "Open MPI, whole programs" make test-programs MPI=openmpi ARGS="$(PROGRAMS) -k '$(OPENMPI)' \
	    $(call IGNORED,harness_failures options files documentation bench saving train \
	    stopping packaging)"

# The second command of the README: 2 ranks of MPICH, units, and most of the kernels.
readme:
	@leg "make test" make test

# With 1 and 2 ranks, `make test-adapters` only.
adapters:
	@leg "PyTorch and JAX" make test-adapters ADAPTER_SIZES=3

# Ranks are placed on made-up nodes in four ways (NODES of tests/mpi/reducing.py), all of
# which `make test-all` tests. Legs of 3 and 4 ranks test some of them, such that each way is
# tested with MPICH: `uneven` on 4, as it is `halves` on 3. With Open MPI, two nodes of two
# ranks are tested in one way, and ranks on nodes of their own on 2 ranks. Without shared
# memory, each rank is on a node of its own, and no others are made up.
#
# An odd number of ranks is tested with MPICH, an even one with each MPI. Tests marked
# `any_size` test the same on any number of ranks. They run on 1 rank with each MPI, and on 2
# with MPICH (in the leg `readme`). Those also marked `ranks`, which need 3 ranks or several
# nodes, run on 4 with Open MPI and without shared memory.
# `make test-all` runs all tests on all numbers of ranks.
SIZED := -m 'not any_size'
NODES := -m 'not any_size or ranks'
mpich-4:   OPTIONS := $(SIZED) -o mpi_nodes=halves,uneven
mpich-3:   OPTIONS := $(SIZED) -o mpi_nodes=apart,singles
openmpi-4: OPTIONS := $(NODES) -o mpi_nodes=apart,uneven
# Gradients of tests are short: once, ranks do not send them at once, as if they were long.
no-shared-memory-4: OPTIONS := $(NODES) -o mpi_short=0
openmpi-2: OPTIONS := $(SIZED)

mpich-%:
	@leg "MPICH, $* ranks" make test-$* ARGS="$(OPTIONS)"

# The network path, which a single rank does not use.  A missing flush of a window shows
# only there: shared memory hides it.
no-shared-memory-%:
	@leg "MPICH without shared memory, $* ranks" \
	    env MPIR_CVAR_NOLOCAL=1 make test-$* ARGS="$(OPTIONS)"

openmpi-%:
	@leg "Open MPI, $* ranks" make test-$* MPI=openmpi ARGS="$(OPTIONS)"

hosts-mpich:
	@leg "MPICH, several hosts" make test-hosts

hosts-openmpi:
	@leg "Open MPI, several hosts" make test-hosts MPI=openmpi

# NVIDIA's compiler compiles the kernels as for a GPU, and needs none.
single-%:
	@leg "single processes and single ranks, $*" \
	    env HPCACCUM_REQUIRE_CUPY=1 make $* \
	    $(if $(OPTIONS),ARGS="$(OPTIONS)")

lint:
	@leg "lint" make lint

documentation:
	@leg "documentation" make docs

shell-scripts:
	@if command -v shellcheck >/dev/null; then \
	    leg "shell scripts" shellcheck .ci/run slurm/*.sbatch tests/cluster/*.sh; fi
