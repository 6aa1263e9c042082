"""A storage emulator in a process of its own, so that a client's work is measured and not its."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def storage_process(bucket: str) -> Iterator[str]:
    """Serve one empty bucket from memory; yield the server's URL."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(bucket, sender), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}"
    finally:
        process.terminate()
        process.join()


def serve(bucket: str, sender) -> None:
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
