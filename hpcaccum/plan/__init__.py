"""The command ``hpcaccum plan``: what a strategy would do, before it is run.

`compute` reads the time of a gradient; `setting` has what is planned, and the costs of
an exchange; `simulation` simulates it, with the admission rules of
`hpcaccum.accumulator`, and `prediction` repeats that and reports. It needs no MPI.
"""
