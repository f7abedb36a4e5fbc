"""Transfer of pieces of state (ranges of tensors) to the ranks that need them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from moevement_core.comms.address import own_address
from moevement_core.comms.connections import Address, Connections
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.elastic.exchange import Exchanged, Piece, exchange, once


def bring_pieces(held: Sequence[Piece], wanted: Sequence[Piece], *, is_verified: bool) -> Exchanged:
    """Fill the pieces that each rank wants from the pieces that ranks hold. Collective.

    The function opens connections for the transfer and closes them afterwards. Arguments and errors are those of
    :func:`~moevement_core.elastic.exchange.exchange`. If a rank wants two replicas of an expert, the exchange fills the
    first replica, and this function copies it to the second.
    """
    first: dict[tuple[str, int], Piece] = {}
    copies: list[tuple[Piece, Piece]] = []
    for piece in wanted:
        key = piece.name, piece.begin
        if key in first:
            copies.append((piece, first[key]))
        else:
            first[key] = piece
    connections = Connections(own_address())
    try:
        connections.open(dist.get_rank(), all_gather_objects(connections.address, Address))
        channel = connections.channel("state")
        exchanged = exchange(once(held), list(first.values()), channel, is_verified=is_verified)
    finally:
        connections.close()
    for copy, piece in copies:
        copy.tensor.copy_(piece.tensor)
    return exchanged
