"""Communicators, exchanges and messages; see `hpcaccum.mpi`."""
