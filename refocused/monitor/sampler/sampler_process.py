"""The entry of the sampler's process: `python -m refocused.monitor.sampler.sampler_process JSON`.

It imports everything else after it is detached, because the training process waits for that.
"""

import logging
import os
import sys

from refocused.system.processes import detach


def main(argv: list[str]) -> int:
    """Detach, then sample until the end; `argv` is one JSON text of SamplerSettings."""
    detach()
    from refocused.monitor.sampler.sampler import Sampler, take_turn
    from refocused.monitor.sampler.start_sampler import ON_ALARM, SamplerSettings
    from refocused.system import logs

    try:
        # Removed from the environment, which a command of `log.on_alarm` inherits.
        on_alarm = {"on_alarm": os.environ.pop(ON_ALARM, None)}
        settings = SamplerSettings.model_validate_json(argv[0]).model_copy(update=on_alarm)
        # The first machine's alarms also go to the log that people read.
        log = "training.log" if settings.node == 0 else "sampler.log"
        logs.start_process_log("sampler", settings.log(log))
        if take_turn(settings):
            Sampler(settings).run()
    except Exception:
        # The edge of a background owner: only its log can state why it ended.
        logging.basicConfig(stream=sys.stderr)
        logging.getLogger(__name__).exception("The sampler failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
