"""Distribute tests over workers one by one, but keep those that share a fixture together."""

import functools

from ranks import ROOT
from xdist.scheduler import LoadScopeScheduling

ON_ONE_WORKER = "tests/evaluate/"  # its tests share checkpoints saved by real ranks


class Spread(LoadScopeScheduling):  # type: ignore[misc]
    """Schedules single tests; those of a file with module fixtures run together, and first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith(ON_ONE_WORKER):
            return ON_ONE_WORKER
        return file if _has_module_fixture(file) else nodeid


@functools.cache
def _has_module_fixture(file: str) -> bool:
    return 'scope="module"' in (ROOT / file).read_text()
