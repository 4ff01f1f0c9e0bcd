"""Batch scripts for SLURM, which start the other commands.

May import everything but the command line.
"""
