"""Run files for tests, and the problems that are found in them."""

from pathlib import Path

import pytest

from refocused.config.load_run import load_run
from refocused.system.errors import ConfigError, ExitCode

SMALL_RUN = """\
run:
  steps: 100
model:
  preset: gpt2_tiny
  sequence_length: 64
batch:
  micro_batch_size: 2
  global_batch_size: 8
data:
  source: tokens
optimizer:
  lr: 3e-4
precision: {}
zero:
  # stage: 2
"""
MIXTURE = """\
run: {steps: 100}
model: {preset: gpt2_tiny, sequence_length: 64}
batch: {micro_batch_size: 2, global_batch_size: 8}
data:
  exclude: [draft*]
  validation_fraction: 0.25
  mixture:
    web:
      source: gs://tokens/web
      weight: 0.7
    code: {source: 12, weight: 3e-1, exclude: [], validation_files: [val*], pad_id: 0}
optimizer: {lr: 3e-4}
"""


def written(folder: Path, text: str = SMALL_RUN, name: str = "mine.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def problems(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as failure:
        load_run(file, overrides)
    assert failure.value.exit_code is ExitCode.WRONG_USE
    return str(failure.value).splitlines()
