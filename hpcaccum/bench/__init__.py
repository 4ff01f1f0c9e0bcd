"""The command ``hpcaccum bench``: the cost of each way to exchange gradients.

Machines differ and are shared, so absolute times mean little. Every figure is compared
with two others of the same run, measured in turns: the raw MPI call that does the same,
and the floor. On one node, that is the bytes that must move in memory, at the rate of a
plain copy; between nodes, those that must cross a link, at the rate of a plain
exchange.
"""
