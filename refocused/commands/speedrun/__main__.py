"""`launch/speedrun.sh` starts this."""

import sys

from refocused.commands.main import run_command

if __name__ == "__main__":
    sys.exit(run_command("speedrun", sys.argv[1:]))
