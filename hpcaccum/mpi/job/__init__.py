"""How this process is part of an MPI job; see `hpcaccum.mpi`."""
