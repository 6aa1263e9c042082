"""The entry of the process that exports a finished run: `python -m ... REQUEST`."""

from __future__ import annotations

import logging
import os
import sys

from refocused.system.processes import detach


def main(argv: list[str]) -> int:
    """Detach, then make the final model; `argv` is one JSON text of FinalModelRequest."""
    detach()
    # Imported after the fork, which then is quick: the trainer waits for it.
    from refocused.evaluate.make_final_model import FinalModelRequest, answer_to

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logger = logging.getLogger(__name__)
    try:
        request = FinalModelRequest.model_validate_json(argv[0])
        logger.info("process %d exports %s", os.getpid(), request.step)
        answer = answer_to(request)
    except Exception:
        # The edge of a background owner: the trainer sees a dead process without an answer.
        logger.exception("the export failed")
        return 1
    logger.info("%s: %s", answer.status, answer.text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
