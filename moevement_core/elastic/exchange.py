"""Exchange of state among ranks when their number has changed, with digests that prove that the state is unchanged.

Every rank reports the ranges of tensors that it holds and those that it needs. From the reports all ranks compute the
same moves: which rank sends which range to which (:func:`~moevement_core.elastic.ranges.reshard`). The ranks exchange
state in rounds. In a round, a rank sends at most one message to each other rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moevement_core.comms.address import own_address
from moevement_core.comms.connections import Address, Connections
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.comms.transport import Transport
from moevement_core.elastic import digest
from moevement_core.elastic.ranges import ElementRange, Move, reshard
from moevement_core.errors import RecoveryError

ROUND_BYTES = 512 << 20
"""Most bytes that a rank sends in a round, to all other ranks together, and most bytes that it receives in a round."""
TAG = 0


@dataclass(frozen=True, eq=False)
class Piece:
    """Range of a state tensor, with its elements on this rank."""

    operator: str
    name: str
    """Name of the whole tensor, the same on every rank and for any number of ranks."""
    begin: int
    """Index of the first element in the flat tensor."""
    tensor: torch.Tensor
    """Elements of the range, flat."""

    @property
    def range(self) -> ElementRange:
        """Range of the whole tensor that this piece holds."""
        return ElementRange(self.name, self.begin, self.begin + self.tensor.numel())


def once(pieces: Iterable[Piece]) -> list[Piece]:
    """Return ``pieces`` cut so that none overlap: an element in several of them stays only in the first one."""
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        rest = [(piece.begin, piece.range.end)]
        for other in by_name[piece.name]:
            rest = [part for begin, end in rest for part in _outside(begin, end, other.begin, other.range.end)]
        by_name[piece.name] += [
            Piece(piece.operator, piece.name, begin, piece.tensor[begin - piece.begin : end - piece.begin])
            for begin, end in rest
        ]
    return [piece for kept in by_name.values() for piece in kept]


def _outside(begin: int, end: int, other_begin: int, other_end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range that are outside another range."""
    if begin < min(end, other_begin):
        yield begin, min(end, other_begin)
    if max(begin, other_end) < end:
        yield max(begin, other_end), end


class StateMissing(RecoveryError):
    """Error: a part of the state that ranks need is on no rank. Every rank raises this error."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Result of an exchange, the same on every rank."""

    moved_bytes: int
    """Bytes sent between ranks, the sum over all ranks."""
    digests: Mapping[str, int]
    """Digest of each operator's whole state, the same before and after the exchange; empty without verification."""


def bring_pieces(held: Sequence[Piece], wanted: Sequence[Piece], *, is_verified: bool) -> Exchanged:
    """Fill the pieces that each rank wants from the pieces that ranks hold. Collective.

    The function opens connections for the transfer and closes them afterwards. Arguments and errors are those of
    :func:`exchange`. If a rank wants two replicas of an expert, the exchange fills the first replica, and this function
    copies it to the second.
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


def exchange(
    held: Sequence[Piece], wanted: Sequence[Piece], transport: Transport, *, is_verified: bool = True
) -> Exchanged:
    """Send state to the ranks that need it; every rank of the job calls this function.

    Args:
        held: pieces on this rank, which are not changed. Ranks that hold the same range hold the same bits.
        wanted: pieces that this rank needs; the state is written into their tensors.
        transport: connection between ranks.
        is_verified: True to compare the digests of all replicas of a range, and the digest of each operator before and
            after the exchange.

    Raises:
        StateMissing: some part of the wanted state is on no rank; nothing has been written.
        RecoveryError: replicas of a range differ, or the exchange changed the state. Every rank raises the error.
    """
    reports: list[tuple[list[ElementRange], list[ElementRange], dict[str, str]]] = all_gather_objects(
        (
            [piece.range for piece in held],
            [piece.range for piece in wanted],
            {piece.name: piece.operator for piece in wanted},
        ),
        tuple[list[ElementRange], list[ElementRange], dict[str, str]],
    )
    before = {rank: report[0] for rank, report in enumerate(reports)}
    after = {rank: report[1] for rank, report in enumerate(reports)}
    operators = {name: operator for report in reports for name, operator in report[2].items()}
    plan = reshard(before, after)
    if plan.missing:
        lost = sorted({operators[missing.name] for ranges in plan.missing.values() for missing in ranges})
        names = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        raise StateMissing(f"no live rank has the state of {names}")
    was = _digests(held, before, operators) if is_verified else {}
    moved = _move(plan.moves, held, wanted, transport)
    if is_verified:
        _compare(was, _digests(wanted, after, operators))
    return Exchanged(moved, was)


def _move(moves: Sequence[Move], held: Sequence[Piece], wanted: Sequence[Piece], transport: Transport) -> int:
    """Execute the moves, and return the number of bytes that all ranks together sent.

    State does not travel over gloo: if a sender dies in the middle of a message, a receive of gloo never ends (torch
    2.13).
    """
    rank, sources, targets = dist.get_rank(), _by_name(held), _by_name(wanted)
    outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
    incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
    for move in moves:
        if move.source == move.target == rank:
            _unpack(_packed(list(_find(sources, move.range))), list(_find(targets, move.range)))
        elif move.source == rank:
            outgoing[move.target] += _find(sources, move.range)
        elif move.target == rank:
            incoming[move.source] += _find(targets, move.range)
    world = dist.get_world_size()
    room = max(ROUND_BYTES // world, 1 << 16)  # Bytes for each pair of ranks; both ranks compute the same number.
    most = max((_bytes(parts) for parts in (*outgoing.values(), *incoming.values())), default=0)
    rounds = -(-max(all_gather_objects(most, int)) // room)
    moved = 0
    for sends, receives in _rounds(outgoing, incoming, rounds, room):
        moved += sum(map(_bytes, sends.values()))
        with ThreadPoolExecutor(1, "moevement-state") as beside:
            # In step k, a rank sends to the k-th rank after it and receives from the k-th rank before it. So the ranks
            # cannot deadlock.
            sent = beside.submit(_send, sends, rank, world, transport)
            for step in range(1, world):
                source = (rank - step) % world
                if parts := receives.get(source):
                    buffer = torch.empty(_bytes(parts), dtype=torch.uint8)
                    transport.receive(source, TAG, buffer)
                    _unpack(buffer, parts)
            sent.result()
    return int(sum(all_gather_objects(moved, int)))


def _send(sends: Mapping[int, list[torch.Tensor]], rank: int, world: int, transport: Transport) -> None:
    for step in range(1, world):
        target = (rank + step) % world
        if parts := sends.get(target):
            transport.send(target, TAG, _packed(parts))


Parts = dict[int, list[torch.Tensor]]


def _rounds(
    outgoing: Mapping[int, list[torch.Tensor]], incoming: Mapping[int, list[torch.Tensor]], rounds: int, room: int
) -> Iterator[tuple[Parts, Parts]]:
    """Yield the tensors to send and the tensors to receive in each round.

    A sender and its receiver cut the bytes between them at the same offsets, so the messages of each round match.
    """
    sends = {rank: list(_cut(parts, room)) for rank, parts in outgoing.items()}
    receives = {rank: list(_cut(parts, room)) for rank, parts in incoming.items()}
    for number in range(rounds):
        yield (
            {rank: cuts[number] for rank, cuts in sends.items() if number < len(cuts)},
            {rank: cuts[number] for rank, cuts in receives.items() if number < len(cuts)},
        )


def _cut(parts: Iterable[torch.Tensor], of_round: int) -> Iterator[list[torch.Tensor]]:
    now: list[torch.Tensor] = []
    room = of_round
    for part in parts:
        rest = part
        while rest.numel():
            fits = min(rest.numel(), room // rest.element_size())
            if fits:
                now.append(rest[:fits])
                room -= fits * rest.element_size()
                rest = rest[fits:]
            if rest.numel():
                yield now
                now, room = [], of_round
    if now:
        yield now


def _bytes(parts: Iterable[torch.Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in parts)


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.detach().cpu().contiguous().view(torch.uint8) for part in parts])


def _unpack(buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    begin = 0
    for part in parts:
        end = begin + part.numel() * part.element_size()
        # The clone is aligned, which a view with larger elements requires.
        part.copy_(buffer[begin:end].clone().view(part.dtype))
        begin = end


def _by_name(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.name].append(piece)
    return by_name


def _find(pieces: Mapping[str, Sequence[Piece]], wanted: ElementRange) -> Iterator[torch.Tensor]:
    """Yield the tensors that together hold the range ``wanted`` on this rank, in order."""
    for piece in sorted(pieces[wanted.name], key=lambda piece: piece.begin):
        begin, end = max(piece.begin, wanted.begin), min(piece.range.end, wanted.end)
        if begin < end:
            yield piece.tensor.detach()[begin - piece.begin : end - piece.begin]


# Digests


def _digests(
    held: Sequence[Piece], ranges: Mapping[int, Sequence[ElementRange]], operators: Mapping[str, str]
) -> dict[str, int]:
    """Return the digest of each operator's state on all ranks together; every rank calls this function.

    An element that several ranks hold counts once.

    Args:
        held: pieces on this rank.
        ranges: ranges on each rank.
        operators: operator of each tensor, by its name.

    Raises:
        RecoveryError: replicas of a range differ.
    """
    first = _first_holders(ranges)
    rank = dist.get_rank()
    own = {
        piece.range: digest.of_range(piece.name, piece.begin, _plain(piece.tensor))
        for piece in held
        if piece.name in operators
    }
    counted: dict[str, int] = defaultdict(int)
    pieces = _by_name(held)
    for first_range in first.get(rank, ()):
        if first_range.name in operators:
            whole = own.get(first_range)
            part = whole if whole is not None else _digest(first_range, pieces)
            counted[operators[first_range.name]] = digest.together((counted[operators[first_range.name]], part))
    gathered = all_gather_objects((own, dict(counted)), tuple[dict[ElementRange, int], dict[str, int]])
    _compare_replicas([digests for digests, _ in gathered], operators)
    every: dict[str, int] = defaultdict(int)
    for _, parts in gathered:
        for operator, part in parts.items():
            every[operator] = digest.together((every[operator], part))
    return dict(every)


def _digest(whole: ElementRange, pieces: Mapping[str, Sequence[Piece]]) -> int:
    parts, begin = [], whole.begin
    for tensor in _find(pieces, whole):
        parts.append(digest.of_range(whole.name, begin, _plain(tensor)))
        begin += tensor.numel()
    return digest.together(parts)


def _first_holders(held: Mapping[int, Sequence[ElementRange]]) -> dict[int, list[ElementRange]]:
    """Assign each element to one rank that holds it, and return the ranges that each rank was assigned."""
    ends: dict[str, tuple[int, int]] = {}
    for ranges in held.values():
        for held_range in ranges:
            begin, end = ends.get(held_range.name, (held_range.begin, held_range.end))
            ends[held_range.name] = min(begin, held_range.begin), max(end, held_range.end)
    nobody = -1
    whole = [ElementRange(name, begin, end) for name, (begin, end) in sorted(ends.items())]
    holders: dict[int, list[ElementRange]] = defaultdict(list)
    for move in reshard(held, {nobody: whole}).moves:
        holders[move.source].append(move.range)
    return holders


def _compare_replicas(digests_by_rank: Sequence[Mapping[ElementRange, int]], operators: Mapping[str, str]) -> None:
    known: dict[ElementRange, tuple[int, int]] = {}
    for rank, digests in enumerate(digests_by_rank):
        for part, value in digests.items():
            first, expected = known.setdefault(part, (rank, value))
            if value != expected:
                raise RecoveryError(
                    f"ranks {first} and {rank} differ in elements {part.begin} to {part.end} of {part.name} of "
                    f"{operators[part.name]}; these replicas must be equal, so the job cannot continue from either"
                )


def _compare(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    if wrong := sorted(name for name in after if after[name] != before.get(name)):
        raise RecoveryError(
            f"the state of {', '.join(wrong[:5])} changed while ranks exchanged it; the digests before and after must "
            "be equal, so the job cannot continue from this state"
        )


def _plain(tensor: torch.Tensor) -> Any:
    """Return the bits of a tensor as a NumPy array of integers, because NumPy lacks some floating types."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(kinds[tensor.element_size()]).numpy()
