"""The bytes that must cross the busiest link between nodes, whatever the program does.

A link joins one node to all others, and carries bytes in both directions at once. Each
function returns the bytes in one direction, in units of a gradient's size S, of a step
over N nodes with r ranks each; N = 1 gives 0. A rank may use all memory of its node,
so a node sends a sum of its gradients where a sum is enough.
"""

from __future__ import annotations


def sum_everywhere(nodes: int) -> float:
    """Return the floor of a sum over all ranks that all need: 2 (N - 1) / N.

    Every node sends what the others sum, (N - 1) / N of its gradients' sum, and
    receives the sums of the others, (N - 1) / N of the result. So it is for an
    allreduce, and for an optimizer with a quorum of all ranks whose parameters are
    divided among the nodes. If one node holds all parameters, N - 1 sums enter it, and
    as many copies of the parameters leave it: N - 1, which is more from three nodes on.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
        workstations, 2009.
    """
    return 2 * (nodes - 1) / nodes


def to_or_from_one(nodes: int) -> float:
    """Return the floor of a sum that one rank needs, or of its vector for all: 1.

    Every node but one must send its sum, or receive the vector. In a chain of nodes no
    link carries more.
    """
    return float(nodes > 1)


def update_each(nodes: int, ranks: int) -> float:
    """Return the floor if each gradient is an update: (r + 1) (N - 1) / N, r = n / N.

    Rules such as Adam need each gradient separately, in the order of the updates. If
    the parameters are divided among the nodes, (N - 1) / N of each of the r gradients
    leaves its node. Then the nodes need the parameters, once if the ranks of a node
    wait for their updates together: (N - 1) / N. If each rank is sent those of its own
    update, it is r times as much, in all 2 r (N - 1) / N. For 4 nodes with 2 ranks:
    2.25 and 3. If one node holds all parameters, (N - 1) r gradients enter it: 6.
    """
    return (ranks / nodes + 1) * (nodes - 1) / nodes
