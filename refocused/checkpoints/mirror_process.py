"""The entry of the mirror's process: `python -m refocused.checkpoints.mirror_process SETTINGS`.

DeepSpeed's launcher ends a rank together with every descendant it has, in whatever session; only
a process whose parent has gone (parent 1) is none. So the process that is started forks once, says
the child's pid on its stdout and ends; the child does the work.
"""

from __future__ import annotations

import logging
import os
import sys


def _detach() -> None:
    """Go on as an orphan of the lowest priority, with no stream of the starter's kept open."""
    child = os.fork()
    if child:
        os.write(sys.stdout.fileno(), str(child).encode())
        os._exit(0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(19)


def main(argv: list[str]) -> int:
    """Detach, then mirror until the end; `argv` is one JSON text of MirrorSettings."""
    _detach()
    # Imported after the fork, which then is quick: the trainer waits for it.
    from refocused.checkpoints.mirror_loop import MirrorLoop
    from refocused.checkpoints.mirror_status import MirrorSettings

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logger = logging.getLogger(__name__)
    try:
        settings = MirrorSettings.model_validate_json(argv[0])
        logger.info("mirror %d of %s to %s", os.getpid(), settings.run, settings.bucket)
        MirrorLoop(settings).run()
    except Exception:
        # The edge of a background owner: the trainer sees a dead process and starts it again.
        logger.exception("the mirror stops")
        return 1
    logger.info("mirror %d ends", os.getpid())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
