"""How slow tests are spread over workers: one by one, but those that share what is made once."""

from __future__ import annotations

import functools

from ranks import ROOT
from xdist.scheduler import LoadScopeScheduling

# Steps that real ranks save, once for all tests of what becomes of a step.
OF_ONE_WORKER = "tests/evaluate/"


class Spread(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out single tests, those of a file with fixtures of its own together and first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith(OF_ONE_WORKER):
            return OF_ONE_WORKER
        return file if _makes_something_once(file) else nodeid


@functools.cache
def _makes_something_once(file: str) -> bool:
    return 'scope="module"' in (ROOT / file).read_text()
