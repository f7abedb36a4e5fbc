"""Receiving side of parity: a thread for each member of a group adds the member's snapshots to the sums, in blocks."""

from __future__ import annotations

from typing import override

import torch

from moevement_core.replication.parity.store import MemberStore, Stripe
from moevement_core.replication.receiver import PATIENCE_S, Receiver
from moevement_core.replication.wire import TO_PEER, TO_SOURCE, Message, MessageKind, checksum
from moevement_core.snapshot.arena import in_pages
from moevement_core.snapshot.blocks import block_bytes, blocks_of
from moevement_core.snapshot.snapshot import Header, digest_of


class ParityReceiver(Receiver):
    """Receiver that adds the snapshots of one member of a group to the group's parity.

    Its answer GO to an announced snapshot comes with a flag for each block of the snapshot. The member sends the blocks
    whose flag is set. So after an interrupted transfer it sends only the blocks that did not arrive whole.
    """

    store: MemberStore

    @override
    def _take_in(self, header: Header, message: Message) -> None:
        group, source = self.store.group, self.store.source
        stripe = group.begin(source, header)
        if stripe is None:
            group.memory.arena.wait_for(header.payload_bytes, PATIENCE_S)
            stripe = group.begin(source, header)
        if stripe is None and self._grow(header.payload_bytes):
            stripe = group.begin(source, header)
        if stripe is None:
            self._say(MessageKind.FULL, message.iteration)
            return
        try:
            is_whole = self._add(stripe, header, message.iteration)
        finally:
            group.end(stripe, source)
        self._say(MessageKind.KEPT if is_whole else MessageKind.DAMAGED, message.iteration)

    def _add(self, stripe: Stripe, header: Header, iteration: int) -> bool:
        """Receive and add the blocks that the sum lacks; return True if the sum then contains the whole snapshot."""
        group, source, blocks = self.store.group, self.store.source, blocks_of(header)
        wanted = sorted(stripe.missing.get(source, ()))
        if not wanted:
            return True
        flags = torch.zeros(len(blocks), dtype=torch.uint8)
        flags[wanted] = 1
        go = Message(MessageKind.GO, self._rank, iteration, payload_bytes=len(blocks), check=checksum(flags))
        self._transport.send(source, TO_SOURCE, go.encode())
        self._transport.send(source, TO_SOURCE, flags)
        for number in wanted:
            block = blocks[number]
            with group.staging.of(block_bytes(block)) as memory:
                at, data = 0, []
                for entry in block:
                    values = memory[at : at + entry.nbytes]
                    self._transport.receive(source, TO_PEER, values)
                    data.append((entry, values))
                    at += entry.nbytes
                damaged = next((entry for entry, values in data if digest_of(values) != entry.digest), None)
                if damaged is None:
                    group.add(stripe, source, number, data)
                else:
                    self._report_damaged(iteration, damaged)
        return not stripe.missing.get(source)

    def _grow(self, nbytes: int) -> bool:
        """Allocate memory for one more sum of ``nbytes`` bytes; return False if the host has too little.

        A sum is as large as the largest snapshot in it. So if different members have the largest snapshot in different
        iterations, all sums together need more memory than any single member has requested.
        """
        memory, arena = self.store.memory, self.store.memory.arena
        with memory.growing:
            if arena.available >= in_pages(nbytes):
                return True  # the receiver of another member has allocated it
            wanted = arena.nbytes + in_pages(nbytes)
            if not self._allowance.take(memory.key, wanted):
                return False
            try:
                memory.grow(wanted)
            except RuntimeError:
                self._allowance.keep(memory.key, arena.nbytes)
                return False
            memory.need(self.store.source, wanted)
            return True
