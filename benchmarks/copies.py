"""Benchmark of the processor time that a byte of a snapshot costs until a peer has it. It writes copies.md.

python -m benchmarks.copies        (a minute on two cores)
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_core.comms.connections import Connections
from moevement_core.snapshot.snapshot import digest_of

OUTPUT = Path(__file__).with_suffix(".md")
NBYTES = 64 << 20
CHUNKS = (64 << 10, 1 << 20, 8 << 20)
"""Bytes per system call of a sender. Senders use small calls on slow links, and large calls on fast links."""
GB = 1e9
SLOW_LINK_S = 80.0
"""Seconds that a link of 100 Mbit/s needs for a GB."""


def main() -> None:
    """Measure with the options of the command line, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16, help="rounds of 64 MiB each (default: 16)")
    rounds = parser.parse_args().rounds
    OUTPUT.write_text(report(processor_seconds(rounds), rounds), encoding="utf-8")


def processor_seconds(rounds: int) -> dict[str, float]:
    """Return the processor seconds per GB of each step."""
    data, target = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8), torch.empty(NBYTES, dtype=torch.uint8)
    seconds = {
        "copy into snapshot memory": _of_this_thread(lambda: target.copy_(data), rounds),
        "digest, by the capturing rank": _of_this_thread(lambda: digest_of(data), rounds),
    }
    for chunk in CHUNKS:
        send, receive = _sent_and_received(data, target, chunk, rounds)
        seconds[f"send, {chunk >> 10} KiB at a time"] = send
        seconds[f"receive, {chunk >> 10} KiB at a time"] = receive
    seconds["digest, by the peer"] = _of_this_thread(lambda: digest_of(target), rounds)
    return seconds


def _of_this_thread(work: Callable[[], object], rounds: int) -> float:
    work()
    seconds = []
    for _ in range(rounds):
        began_s = time.thread_time()
        work()
        seconds.append(time.thread_time() - began_s)
    return statistics.median(seconds) / (NBYTES / GB)


def _sent_and_received(data: torch.Tensor, target: torch.Tensor, chunk: int, rounds: int) -> tuple[float, float]:
    """Return the processor seconds per GB of sender and receiver.

    At both ends the operating system copies the bytes directly between tensor memory and socket.
    """
    ends = Connections("127.0.0.1"), Connections("127.0.0.1")
    for rank, end in enumerate(ends):
        end.open(rank, [other.address for other in ends])
    source, peer = (end.channel("snapshots") for end in ends)
    seconds: dict[str, float] = {}

    def send() -> None:
        began_s = time.thread_time()
        for _ in range(rounds):
            for piece in data.split(chunk):
                source.send(1, 1, piece)
        seconds["send"] = time.thread_time() - began_s

    def receive() -> None:
        began_s = time.thread_time()
        for _ in range(rounds):
            peer.receive(0, 1, target)
        seconds["receive"] = time.thread_time() - began_s

    threads = [threading.Thread(target=work) for work in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()
    return tuple(seconds[name] / (rounds * NBYTES / GB) for name in ("send", "receive"))  # type: ignore[return-value]


def report(results: dict[str, float], rounds: int) -> str:
    """Return the text of the page."""
    rows = [[name, f"{seconds:.3f} s"] for name, seconds in results.items()]
    small = results[f"send, {CHUNKS[0] >> 10} KiB at a time"] / SLOW_LINK_S
    return f"""# Processor time of copies

    python -m benchmarks.copies --rounds {rounds}        (writes this file)

Processor seconds for each GB of a snapshot that a rank sends to one peer, by step, over loopback; {rounds} rounds of
64 MiB. Each byte is digested twice: at the rank that captures it and at the peer. Only the operating system copies it
between snapshot memory and socket: `send` reads from snapshot memory, and `recv` writes into it. A sender uses small pieces on a
slow link. A link of 100 Mbit/s takes {SLOW_LINK_S:.0f} s for a GB, so sending takes {small:.1%} of a processor.

{table(("", "a GB"), rows)}

{measured_on("torch", "xxhash")}.
"""


if __name__ == "__main__":
    main()
