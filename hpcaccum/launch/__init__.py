"""Commands for jobs: `sbatch`; `run`, which restarts one; `doctor`, which tests MPI.

May import everything but the command line.
"""
