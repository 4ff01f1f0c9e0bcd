"""The command ``hpcaccum plan``: what a strategy would do, before it is run.

`compute` reads the time of a gradient, `machine` the costs of an exchange, `setting`
what is to be planned. `rounds` and `events` simulate synchronous and asynchronous
strategies, with the admission rules of `hpcaccum.accumulator`; `outcome` has what they
found, `advice` puts it in words. It needs no MPI.
"""
