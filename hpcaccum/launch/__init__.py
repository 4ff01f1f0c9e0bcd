"""Batch scripts for SLURM, which start the other commands; and probes of an MPI.

May import everything but the command line.
"""
