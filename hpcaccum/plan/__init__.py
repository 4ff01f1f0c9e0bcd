"""The command ``hpcaccum plan``: what a strategy would do, before it is run; no MPI.

`compute` reads the time of a gradient; `setting` has what is planned, and the costs;
`simulation` simulates, by the accumulator's own rule; `prediction` repeats and reports.
"""
