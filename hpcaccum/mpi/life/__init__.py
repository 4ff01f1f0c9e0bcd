"""The lifetime of objects, and of ranks; see `hpcaccum.mpi`."""
