"""The mirror's process: `python -m refocused.checkpoints.mirror.mirror_process SETTINGS`."""

import logging
import os
import sys

from refocused.system.processes import detach


def main(argv: list[str]) -> int:
    """Detach and run the mirror; `argv` is one JSON text of MirrorSettings."""
    detach()
    # Imported after the fork: the trainer waits for the fork only.
    from refocused.checkpoints.mirror.mirror_loop import MirrorLoop
    from refocused.checkpoints.mirror.mirror_status import MirrorSettings

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logger = logging.getLogger(__name__)
    try:
        settings = MirrorSettings.model_validate_json(argv[0])
        logger.info("mirror %d of %s to %s", os.getpid(), settings.run, settings.bucket)
        MirrorLoop(settings).run()
    except Exception:
        # The outermost handler of a background process: the trainer restarts it.
        logger.exception("mirror %d failed", os.getpid())
        return 1
    logger.info("mirror %d finished", os.getpid())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
