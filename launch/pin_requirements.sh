#!/usr/bin/env bash
# Writes requirements_training.txt: the version in .venv of every package that pyproject.toml
# requires, also for the extras of a run. Use it after a change there, once the tests have passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

.venv/bin/python - >requirements_training.txt.new <<'END'
import re, tomllib
from importlib.metadata import version

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
names = ("tensorboard", "wandb", "pictures", "parquet", "web")
wanted = project["dependencies"] + [one for name in names for one in extras[name]]
print("# Exact versions that were run together, written by launch/pin_requirements.sh from")
print("# pyproject.toml. launch/setup_environment.sh installs torch first and by itself: asked for")
print("# together with the others, pip may choose another build of it.")
for name in (re.match(r"[\w.-]+", requirement)[0] for requirement in wanted):
    print(f"{name}=={version(name).partition('+')[0]}")
END
mv requirements_training.txt.new requirements_training.txt
