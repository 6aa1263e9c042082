"""What estimate_cost.py tells other programs of a shipped run."""

import functools
import json
from typing import Any

import pytest

from refocused.commands.main import run_command

main = functools.partial(run_command, "estimate_cost")

RUN = "gpt2_1b_8xh100_fast"
TOKENIZER = "data.tokenizer=hub:any/model"


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
