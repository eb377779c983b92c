"""Which node takes which packs of a step, so that packs of one shard go to one node and each fetches few shards.

Every shard has a place on a ring that never changes, and a node owns an arc of it. The packs of a step, in the order of
their shards' places, are cut into equal parts. A step never holds exactly a quarter of its packs on each quarter of the
ring, so cuts fall beside the ends of arcs, and shards there are fetched by two nodes; the ring is turned, step by step,
so that no cut lies farther off than it must.
"""

import numpy as np

from shards.ordering.permutation import scatter


def deal_to_nodes(shards: np.ndarray, num_nodes: int) -> np.ndarray:
    """Deal the packs of a step to nodes, as many to each.

    Args:
        shards: The shard of each pack; integers (num_packs,).
        num_nodes: Divides num_packs.

    Returns:
        Positions in the step, every one once; int64 (num_nodes, num_packs / num_nodes).
    """
    if num_nodes == 1:
        return np.arange(len(shards))[None]
    places = scatter(shards.astype(np.uint64)) / 2.0**64
    order = np.argsort(places, kind="stable")
    share = len(shards) // num_nodes
    arcs = np.searchsorted(places[order], np.arange(num_nodes) / num_nodes)  # where each node's own packs begin
    off = arcs - np.arange(num_nodes) * share
    turn = round((int(off.max()) + int(off.min())) / 2)
    dealt: np.ndarray = np.roll(order, -turn).reshape(num_nodes, share)
    return dealt
