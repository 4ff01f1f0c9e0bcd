"""The command ``hpcaccum plan``: what a strategy would do, before it is run.

`compute` reads the time of a gradient, `machine` the costs of an exchange; `setting` is
what is planned. `rounds` and `events` simulate synchronous and asynchronous strategies,
with the admission rules of `hpcaccum.accumulator`; `simulation` repeats them, `advice`
puts in words what they found. It needs no MPI.
"""
