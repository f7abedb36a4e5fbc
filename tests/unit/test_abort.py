"""Connections that are shut down free whoever waits on them; the store's stay."""

from __future__ import annotations

import socket
import threading

from megatron.moevement.restart.abort import shut_down_connections


def test_every_wait_ends_but_those_of_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as peers, socket.create_server(("127.0.0.1", 0)) as store:
        peer, to_store = (socket.create_connection(server.getsockname()) for server in (peers, store))
        (others, _), (served, _) = peers.accept(), store.accept()
        ended = threading.Event()

        def wait() -> None:
            peer.recv(1)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        shut_down_connections(but=store.getsockname()[1])
        assert ended.wait(10), "nobody sent anything, and the wait is over"
        to_store.sendall(b"x")
        assert served.recv(1) == b"x"
        for one in (peer, to_store, others, served):
            one.close()
