"""Pieces of state to where they are wanted, over connections that end with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from moevement_core.elastic.exchange import Exchanged, Piece, exchange, once
from moevement_core.replication.connections import Address, Connections
from moevement_core.session.address import own_address
from moevement_core.session.exchange import all_gather_objects


def bring_pieces(held: Sequence[Piece], wanted: Sequence[Piece], *, is_verified: bool) -> Exchanged:
    """See :func:`~moevement_core.elastic.exchange.exchange`; every rank calls it.

    A rank may have two replicas of an expert: what it brings is that of one, and the other becomes a copy.
    """
    first: dict[tuple[str, int], Piece] = {}
    copies: list[tuple[Piece, Piece]] = []
    for one in wanted:
        key = one.name, one.begin
        if key in first:
            copies.append((one, first[key]))
        else:
            first[key] = one
    connections = Connections(own_address())
    try:
        connections.open(dist.get_rank(), all_gather_objects(connections.address, Address))
        channel = connections.channel("state")
        exchanged = exchange(once(held), list(first.values()), channel, is_verified=is_verified)
    finally:
        connections.close()
    for copy, one in copies:
        copy.tensor.copy_(one.tensor)
    return exchanged
