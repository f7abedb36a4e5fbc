"""Unauthenticated peer that attacks a job: it reaches the job's sockets without a token. A seed determines its attacks.

By agreement the peer leaves the keys of torch's process groups alone, because nobody can sign what torch writes there
(docs/security.md).
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

GROUPS = "/groups/"
"""Part of all keys of torch's process groups."""
PAUSE_S = 0.003
HALF_OPEN = 40
"""Number of connections that the peer holds open without a whole message."""


def listeners(root: int) -> dict[int, set[tuple[str, int]]]:
    """Return the addresses at which a process and its descendants listen, by process id."""
    addresses: dict[int, set[tuple[str, int]]] = {}
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        for candidate in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                bound = {(c.laddr.ip, c.laddr.port) for c in candidate.net_connections("inet") if c.status == "LISTEN"}
                addresses[candidate.pid] = bound
    return addresses


def relays(root: int) -> list[str]:
    """Return the addresses of the Unix sockets without files that a process listens at; ``@`` stands for zero."""
    inodes = set()
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{root}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(f"/proc/{root}/fd/{descriptor}").removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [words[7] for words in lines if len(words) == 8 and words[6] in inodes and words[7].startswith("@")]


class Stranger:
    """Peer without a token that attacks a job on this host during a ``with`` block.

    Args:
        root: process id of the launcher.
        seed: seed of all attacks.
    """

    def __init__(self, root: int, seed: int) -> None:
        self._root, self._random = root, random.Random(seed)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stranger", daemon=True)
        self.done: Counter[str] = Counter()
        """Number of attacks of each kind."""
        self.seen: set[tuple[str, int]] = set()
        """Addresses at which the job has listened so far."""
        self.failure = ""
        """Error of this class itself; empty if there was none."""
        self._held: list[socket.socket] = []

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        self._thread.join(30)
        for connection in self._held:
            connection.close()

    def _run(self) -> None:
        try:
            looked_at = -1.0
            store: Any = None
            while not self._has_ended.wait(PAUSE_S):
                if time.monotonic() - looked_at > 0.5:
                    looked_at, by_process = time.monotonic(), listeners(self._root)
                    self.seen |= {address for bound in by_process.values() for address in bound}
                    # The launcher starts the process that serves the store before all others.
                    server = min((pid for pid, bound in by_process.items() if bound), default=self._root)
                    ports = sorted(address[1] for address in by_process.get(server, ()))
                    others = sorted(
                        address[1] for pid, bound in by_process.items() if pid != server for address in bound
                    )
                if store is None and ports:
                    store = _client(ports[0])
                if store is None:
                    continue
                try:
                    self._at_store(store)
                except (dist.DistError, RuntimeError, ValueError):
                    store = None  # this connection broke, or the job has ended
                for address in relays(self._root):
                    if self._random.random() < 0.05:
                        self._at_relay(address)
                for port in ports + others:
                    if self._random.random() < 0.05:
                        self._at_socket(port)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    # The store of process groups

    def _at_store(self, store: Any) -> None:
        draw = self._random
        prefix = next((key.partition(GROUPS)[0] for key in store.list_keys() if GROUPS in key), "moevement/none")
        name = draw.choice(("stop", "generation/roster", "generation/interrupted", "members/joined/0", "x" * 400))
        key = f"{draw.choice((prefix, 'moevement', 'stranger'))}/{name}"
        match kind := draw.choice(("garbage", "delete", "append", "add", "huge", "forge")):
            case "garbage":
                store.set(key, draw.randbytes(draw.randrange(200)))
            case "delete":
                store.delete_key(key)
            case "append":
                store.append(key, draw.choice(("x", "0", ",1:TERMINATED")))
            case "add":
                store.delete_key(f"{key}/number")
                store.add(f"{key}/number", 10**9)
            case "huge":
                store.set(key, b"\0" * (1 << 20))
            case "forge":
                store.set(key, json.dumps({"member": draw.choice((0, 1, 99, 10**18)), "pid": 1, "node": "n"}))
        self.done[kind] += 1

    # The Unix socket of the supervisor

    def _at_relay(self, address: str) -> None:
        """Send a request without a proof of the token, or a line that this peer has received before."""
        draw = self._random
        request = ["claim", "set", "raise", "report", "read", "watch", "drop"]
        key = draw.choice(("stop", "generation/interrupted", "generation/start", "members/joined/0", "job/name"))
        asks = [[draw.randrange(9), draw.choice(request), key, draw.choice(("9 0:TERMINATED", "9 go", "{", None))]]
        line = json.dumps({"asks": asks}).encode()
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(1)
            connection.connect(address.replace("@", "\0", 1))
            nonce = connection.recv(100)
            kind = draw.choice(("unsigned", "signed", "reflected", "cut"))
            match kind:
                case "unsigned":
                    connection.sendall(line + b"\n")
                case "signed":
                    connection.sendall(draw.randbytes(48).hex().encode() + b"\n" + b"0" * 64 + line + b"\n")
                case "reflected":
                    connection.sendall(nonce + b"0" * 64 + line + b"\n")
                case "cut":
                    connection.sendall(nonce[: draw.randrange(30)])
            self.done[f"relay {kind}"] += 1

    # Sockets

    def _at_socket(self, port: int) -> None:
        draw = self._random
        kind = draw.choice(("words", "http", "half", "length", "flood"))
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=2)
        except OSError:
            return
        self.done[f"socket {kind}"] += 1
        with suppress(OSError):
            match kind:
                case "words":
                    connection.sendall(draw.randbytes(draw.randrange(1, 300)))
                case "http":
                    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * draw.randrange(1, 20))
                case "half":
                    connection.sendall(draw.randbytes(draw.randrange(40)))
                    self._held.append(connection)
                    while len(self._held) > HALF_OPEN:
                        self._held.pop(0).close()
                    return
                case "length":
                    connection.sendall(struct.pack("<BQ", draw.randrange(20), 1 << draw.randrange(20, 63)))
                    connection.sendall(struct.pack("!Q", (1 << 63) - 1))
                case "flood":
                    connection.sendall(draw.randbytes(1 << 18))
        connection.close()


def _client(port: int) -> Any:
    with suppress(dist.DistError, RuntimeError):
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
    return None
