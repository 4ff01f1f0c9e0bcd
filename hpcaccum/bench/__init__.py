"""The command ``hpcaccum bench``: what each way of exchanging gradients costs here.

Absolute times say little, as machines differ and are shared. So every figure stands
beside two that were measured in the same run, in turns with it: the raw MPI call that
does the same, and the memory floor, the bytes that must move over the rate of a copy.
"""
