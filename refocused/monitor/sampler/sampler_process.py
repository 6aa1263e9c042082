"""The entry of the sampler's process: `python -m refocused.monitor.sampler.sampler_process JSON`.

It imports the rest only when it is detached, which a training process waits for.
"""

from __future__ import annotations

import logging
import sys

from refocused.system.processes import detach


def main(argv: list[str]) -> int:
    """Detach, then sample until the end; `argv` is one JSON text of SamplerSettings."""
    detach()
    from refocused.monitor.sampler.sampler import Sampler, take_turn
    from refocused.monitor.sampler.start_sampler import SamplerSettings
    from refocused.system import logs

    try:
        settings = SamplerSettings.model_validate_json(argv[0])
        # The first machine's alarms also stand in the log that a person reads.
        log = "training.log" if settings.node == 0 else "sampler.log"
        logs.start_file_of("sampler", settings.log(log))
        if take_turn(settings):
            Sampler(settings).run()
    except Exception:
        # The edge of a background owner: its log is the only place that can tell why it ended.
        logging.basicConfig(stream=sys.stderr)
        logging.getLogger(__name__).exception("the sampler stops")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
