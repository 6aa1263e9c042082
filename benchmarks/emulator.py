"""A storage emulator in a process of its own."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection

from server_process import server_process


def storage_process(bucket: str) -> AbstractContextManager[str]:
    """Serve one empty bucket from memory; the context is the server's URL."""
    return server_process(serve, bucket)


def serve(bucket: str, sender: Connection) -> None:
    """Be the server, until terminated."""
    from gcp_storage_emulator.handlers.buckets import create_bucket
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True)
    # It would write its whole index after each object, also when all is in memory.
    server._storage._write_config_to_file = lambda: None
    create_bucket(bucket, server._storage)
    with server:
        # With its own backlog of 5 a ninth thread's connection is dropped and waits a second.
        server._api._httpd.socket.listen(128)
        sender.send(server._api._httpd.server_address[1])
        threading.Event().wait()
