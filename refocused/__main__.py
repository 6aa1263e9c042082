"""`python -m refocused COMMAND`, for launchers: `deepspeed --module refocused train ...`."""

import sys

from refocused.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
