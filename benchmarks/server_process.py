"""A server in a process of its own, so that a client's work is measured and not the server's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def server_process(serve: Callable[..., object], *arguments: object) -> Iterator[str]:
    """Run `serve(*arguments, sender)`, which sends its port; yield its URL, and end it."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(*arguments, sender), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}"
    finally:
        process.terminate()
        process.join()
