"""Memory that ranks share; see `hpcaccum.mpi`."""
