"""Commands for jobs: `sbatch`; `run`, which restarts them; `doctor`, which tests MPI.

May import everything but the command line.
"""
