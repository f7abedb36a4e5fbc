"""State from one cut over ranks to another, in one exchange, with digests that say that it is the same.

Every rank says which pieces of which tensors it has, and which it is to have. All compute the same moves from it
(:func:`~moevement_core.elastic.ranges.reshard`); what is between two ranks travels in one message a round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moevement_core.elastic import digest
from moevement_core.elastic.ranges import Move, Range, reshard
from moevement_core.errors import RecoveryError
from moevement_core.replication.transport import Transport
from moevement_core.session.exchange import all_gather_objects

ROUND_BYTES = 512 << 20
"""What a rank sends to all others, and has in buffers for them, at a time; as much again for what it receives."""
TAG = 0


@dataclass(frozen=True, eq=False)
class Piece:
    """A range of a tensor of state on this rank."""

    operator: str
    name: str
    """Of the whole tensor, the same on every rank and for any number of ranks."""
    begin: int
    """Place of the first element in the flat tensor."""
    tensor: torch.Tensor
    """Flat."""

    @property
    def range(self) -> Range:
        """Which it is."""
        return Range(self.name, self.begin, self.begin + self.tensor.numel())


def once(pieces: Iterable[Piece]) -> list[Piece]:
    """Returns the pieces without overlaps: an element that several pieces hold is kept in the first of them only."""
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for one in pieces:
        rest = [(one.begin, one.range.end)]
        for other in by_name[one.name]:
            rest = [part for begin, end in rest for part in _outside(begin, end, other.begin, other.range.end)]
        by_name[one.name] += [
            Piece(one.operator, one.name, begin, one.tensor[begin - one.begin : end - one.begin]) for begin, end in rest
        ]
    return [one for its in by_name.values() for one in its]


def _outside(begin: int, end: int, other_begin: int, other_end: int) -> Iterator[tuple[int, int]]:
    """What of a range another one leaves."""
    if begin < min(end, other_begin):
        yield begin, min(end, other_begin)
    if max(begin, other_end) < end:
        yield max(begin, other_end), end


class StateMissing(RecoveryError):
    """No rank has a part of the state. On every rank alike."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What an exchange did, the same on every rank."""

    moved_bytes: int
    """Between ranks, all together."""
    digests: Mapping[str, int]
    """Of each operator's whole state, before and after."""


def exchange(
    held: Sequence[Piece], wanted: Sequence[Piece], transport: Transport, *, is_verified: bool = True
) -> Exchanged:
    """Bring state to where it is wanted; every rank of the job calls it.

    Args:
        held: by this rank, not changed; where several ranks have the same it has the same bits.
        wanted: pieces into whose tensors it is written.
        transport: between ranks.
        is_verified: whether digests are compared, of each operator before and after, and of all replicas.

    Raises:
        StateMissing: nobody has a part of what is wanted. Nothing has been written then.
        RecoveryError: replicas differ, or state is another after it. On every rank alike.
    """
    everyones: list[tuple[list[Range], list[Range], dict[str, str]]] = all_gather_objects(
        ([one.range for one in held], [one.range for one in wanted], {one.name: one.operator for one in wanted}),
        tuple[list[Range], list[Range], dict[str, str]],
    )
    before = {rank: its[0] for rank, its in enumerate(everyones)}
    after = {rank: its[1] for rank, its in enumerate(everyones)}
    operators = {name: operator for its in everyones for name, operator in its[2].items()}
    plan = reshard(before, after)
    if plan.missing:
        lost = sorted({operators[one.name] for ranges in plan.missing.values() for one in ranges})
        names = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        raise StateMissing(f"nobody is left who has the state of {names}")
    was = _digests(held, before, operators) if is_verified else {}
    moved = _move(plan.moves, held, wanted, transport)
    if is_verified:
        _compare(was, _digests(wanted, after, operators))
    return Exchanged(moved, was)


def _move(moves: Sequence[Move], held: Sequence[Piece], wanted: Sequence[Piece], transport: Transport) -> int:
    """Returns bytes that travelled, of all ranks.

    Not over gloo: a receive of which a part has come never ends there when its sender dies (torch 2.13).
    """
    mine, sources, targets = dist.get_rank(), _by_name(held), _by_name(wanted)
    outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
    incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
    for move in moves:
        if move.source == move.target == mine:
            _unpack(_packed(list(_find(sources, move.range))), list(_find(targets, move.range)))
        elif move.source == mine:
            outgoing[move.target] += _find(sources, move.range)
        elif move.target == mine:
            incoming[move.source] += _find(targets, move.range)
    world = dist.get_world_size()
    room = max(ROUND_BYTES // world, 1 << 16)  # for each pair of ranks, the same on both
    most = max((_bytes(parts) for parts in (*outgoing.values(), *incoming.values())), default=0)
    rounds = -(-max(all_gather_objects(most, int)) // room)
    moved = 0
    for sends, receives in _rounds(outgoing, incoming, rounds, room):
        moved += sum(map(_bytes, sends.values()))
        with ThreadPoolExecutor(1, "moevement-state") as beside:
            # In step k a rank sends to the k-th after it and receives from the k-th before it: no circle of waiting.
            sent = beside.submit(_send, sends, mine, world, transport)
            for step in range(1, world):
                source = (mine - step) % world
                if parts := receives.get(source):
                    buffer = torch.empty(_bytes(parts), dtype=torch.uint8)
                    transport.receive(source, TAG, buffer)
                    _unpack(buffer, parts)
            sent.result()
    return int(sum(all_gather_objects(moved, int)))


def _send(sends: Mapping[int, list[torch.Tensor]], mine: int, world: int, transport: Transport) -> None:
    for step in range(1, world):
        target = (mine + step) % world
        if parts := sends.get(target):
            transport.send(target, TAG, _packed(parts))


Parts = dict[int, list[torch.Tensor]]


def _rounds(
    outgoing: Mapping[int, list[torch.Tensor]], incoming: Mapping[int, list[torch.Tensor]], rounds: int, room: int
) -> Iterator[tuple[Parts, Parts]]:
    """Of each pair of ranks, both cut the same bytes at the same places."""
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
        # A view of another element size begins at a multiple of it.
        part.copy_(buffer[begin:end].clone().view(part.dtype))
        begin = end


def _by_name(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = defaultdict(list)
    for one in pieces:
        found[one.name].append(one)
    return found


def _find(pieces: Mapping[str, Sequence[Piece]], wanted: Range) -> Iterator[torch.Tensor]:
    """A range that is here, in the one piece or the several ones that it is in."""
    for one in sorted(pieces[wanted.name], key=lambda its: its.begin):
        begin, end = max(one.begin, wanted.begin), min(one.range.end, wanted.end)
        if begin < end:
            yield one.tensor.detach()[begin - one.begin : end - one.begin]


# Digests


def _digests(
    mine: Sequence[Piece], everyones: Mapping[int, Sequence[Range]], operators: Mapping[str, str]
) -> dict[str, int]:
    """Of each operator, each element counted once; every rank calls it.

    Raises:
        RecoveryError: replicas of a range differ.
    """
    first = _first_holders(everyones)
    rank = dist.get_rank()
    own = {one.range: digest.of_range(one.name, one.begin, _plain(one.tensor)) for one in mine if one.name in operators}
    counted: dict[str, int] = defaultdict(int)
    pieces = _by_name(mine)
    for one in first.get(rank, ()):
        if one.name in operators:
            whole = own.get(one)
            part = whole if whole is not None else _digest(one, pieces)
            counted[operators[one.name]] = digest.together((counted[operators[one.name]], part))
    gathered = all_gather_objects((own, dict(counted)), tuple[dict[Range, int], dict[str, int]])
    _compare_replicas([its for its, _ in gathered], operators)
    every: dict[str, int] = defaultdict(int)
    for _, its in gathered:
        for operator, part in its.items():
            every[operator] = digest.together((every[operator], part))
    return dict(every)


def _digest(of: Range, pieces: Mapping[str, Sequence[Piece]]) -> int:
    parts, begin = [], of.begin
    for tensor in _find(pieces, of):
        parts.append(digest.of_range(of.name, begin, _plain(tensor)))
        begin += tensor.numel()
    return digest.together(parts)


def _first_holders(everyones: Mapping[int, Sequence[Range]]) -> dict[int, list[Range]]:
    """Every element, once, where a rank has it."""
    ends: dict[str, tuple[int, int]] = {}
    for ranges in everyones.values():
        for one in ranges:
            begin, end = ends.get(one.name, (one.begin, one.end))
            ends[one.name] = min(begin, one.begin), max(end, one.end)
    nobody = -1
    whole = [Range(name, begin, end) for name, (begin, end) in sorted(ends.items())]
    found: dict[int, list[Range]] = defaultdict(list)
    for move in reshard(everyones, {nobody: whole}).moves:
        found[move.source].append(move.range)
    return found


def _compare_replicas(everyones: Sequence[Mapping[Range, int]], operators: Mapping[str, str]) -> None:
    known: dict[Range, tuple[int, int]] = {}
    for rank, its in enumerate(everyones):
        for one, value in its.items():
            first, expected = known.setdefault(one, (rank, value))
            if value != expected:
                raise RecoveryError(
                    f"ranks {first} and {rank} differ in elements {one.begin} to {one.end} of {one.name} of "
                    f"{operators[one.name]}; they are replicas, and the job cannot go on from either"
                )


def _compare(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    if wrong := sorted(name for name in after if after[name] != before.get(name)):
        raise RecoveryError(
            f"the state of {', '.join(wrong[:5])} is another after it was brought to the ranks of now; nothing goes on "
            "from it"
        )


def _plain(tensor: torch.Tensor) -> Any:
    """As whole numbers of the same size, which NumPy has for every type."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(kinds[tensor.element_size()]).numpy()
