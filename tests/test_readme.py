"""Blocks of README, guides and concepts run as printed, unless they need a GPU, bucket or key."""

import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from data.text_samples import tiny_bpe
from ranks import ROOT, metrics

from refocused.config.run_config import RunConfig
from refocused.config.yaml_source import parse_yaml

# By the first line of a block: what it needs that a test does not have.
NEEDS = {
    "./launch/setup_environment.sh": r"--num_gpus \d+ .*gs://.*--gcs-credentials",
    "./launch/doctor.py --config llama_1b_8xh100 --gcs-credentials key.json \\": "gs://",
    "./launch/evaluate.py best --run runs/demo --tasks core=eval_bundle --limit 500": "eval_bundle",
    ".venv/bin/deepspeed --hostfile FILE launch/train.py --config NAME": "--hostfile",
    "./launch/train.sh --config resonance_32k_small data.source=gs://my-bucket/tokens": "gs://",
    'OPTIONS="--tokenizer gpt2 --bpe-folder /shared/bpe"': "srun .*RAY_ADDRESS=",
    "# deduplicate.py: remove exact, then near duplicates of a folder": "datatrove",
    "# ray_train.py: .venv/bin/python ray_train.py WORKERS [options of train.py]": "ray.train",
    "python3 -m venv deduplication": "datatrove",
    "from transformers import AutoModelForCausalLM, AutoTokenizer": "fineweb-1b-model",
    "# convert_own.py: CONVERTER_FOLDER MODEL --outfile FILE.gguf ...": "convert_hf_to_gguf",
    '# sft.py: MODEL CHATS.jsonl OUT; a line of CHATS is {"messages": '
    '[{"role": "user", "content": ...}, ...]}': "trl",
    "base_model: fineweb-1b-model": "chat_template_jinja",
    "make wheel": "pip install",  # an index of packages; end_to_end/test_installed_wheel.py
    "refocused --completion bash > ~/.local/share/bash-completion/completions/refocused": "~/",
}
SPEEDRUN, TRAIN, TEST = (f"./launch/{name}.sh" for name in ("speedrun", "train", "test"))
FEWER_STEPS = (
    "run.steps=20 schedule.warmup_steps=5 log.interval=10 checkpoint.interval=10 "
    "evaluation.interval=10 evaluation.sequences=16 evaluation.sample_tokens=8"
)
ELSEWHERE = "recipe_1b.md"  # run by end_to_end/test_recipe.py
PLACED = {"texts", "bpe", "old", "book.txt", "val.jsonl"}
RECORDS = ("training_metrics", "performance_metrics", "gpu_metrics")
ALWAYS = {"time", "kind", "updated"}
WRITTEN = {"plan.md", "tokens.png", "curve.png", "mine.yaml", "model", "tokenizer.json"}


@dataclasses.dataclass(frozen=True)
class Block:
    kind: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]

    @property
    def commands(self) -> str:
        """What a shell is to run; empty for a block that shows something else."""
        if self.kind == "bash":
            return self.text
        if self.kind == "python":
            return f".venv/bin/python - <<'EOF'\n{self.text}EOF\n"
        lines = self.text.splitlines() if self.kind == "console" else []
        return "".join(f"{line[2:]}\n" for line in lines if line.startswith("$ "))


def blocks() -> list[Block]:
    pages = ["README.md", "docs/index.md", "docs/guides/*.md", "docs/concepts/*.md"]
    files = [file for page in pages for file in sorted(ROOT.glob(page))]
    text = "".join(file.read_text() for file in files if file.name != ELSEWHERE)
    found = re.findall(r"^```(.*)\n((?s:.*?))^```$", text, re.M)
    return [Block(*one) for one in dict.fromkeys(found)]


def test_every_block_is_run_shown_or_needs_what_a_test_does_not_have() -> None:
    found = blocks()
    assert {block.kind for block in found} == {"bash", "console", "python", "text", "yaml"}
    assert {block.first_line for block in found} > set(NEEDS)
    for block in found:
        if block.first_line in NEEDS:
            assert re.search(NEEDS[block.first_line], block.text, re.S), block
        elif block.kind == "yaml":
            for name, settings in parse_yaml(block.text).items():
                rest = {"name": "mine", "steps": 1} if name == "run" else {}  # of the file
                RunConfig.model_fields[name].annotation(**rest | settings)  # type: ignore[misc]
        else:
            without_comments = re.sub(r"\s#.*", "", block.commands)
            assert not re.search(r"gs://|--num_gpus|credentials", without_comments), block
            assert bool(without_comments) == (block.kind != "text")


def test_commands_need_no_program_that_a_stock_debian_lacks() -> None:
    """There is no `python`, and what is installed in `.venv` is not on the PATH."""
    listed = ["git", "ls-files", "*.md", "*.py", "*.sh", "*.yml", "*.yaml", "launch"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    bare = re.compile(r"(?<![/\w.])python (?:launch|docs|benchmarks|tests)/")
    texts = {name: (ROOT / name).read_text() for name in names.split() if name != "CHANGELOG.md"}
    assert [name for name, text in texts.items() if bare.search(text)] == []
    installed = re.compile(r"^(?:python|pip|deepspeed|torchrun|pytest|launch/\S+) ", re.M)
    assert [one for one in blocks() if installed.search(one.commands)] == []


@dataclasses.dataclass(frozen=True)
class Copy:
    """A checkout that was set up, on a machine whose own Python has no packages.

    As on stock Debian and Ubuntu, that is `python3`, and there is no `python`.
    """

    folder: Path
    path: Path

    def run(self, commands: str) -> str:
        """Run commands as somebody would type them; return what they printed."""
        done = subprocess.run(
            ["bash", "-euc", commands],
            cwd=self.folder,
            env={
                **os.environ,
                "PATH": f"{self.path}:{os.environ['PATH']}",
                "PYTHONPATH": str(self.folder),  # `.venv` has this package installed from here
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    listed = "git ls-files -z --cached --others --exclude-standard"
    names = subprocess.run(listed.split(), cwd=ROOT, capture_output=True, text=True, check=True)
    folder = tmp_path / "copy"
    for name in names.stdout.strip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    for name in ("bin", "include", "lib", "lib64", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    venv.create(tmp_path / "bare", symlinks=True)
    path = tmp_path / "path"
    path.mkdir()
    (path / "python3").symlink_to(tmp_path / "bare" / "bin" / "python")
    for name in ("python", "pip", "deepspeed", "torchrun", "pytest", "refocused"):
        (path / name).write_text(f"#!/bin/sh\necho '{name}: command not found' >&2\nexit 127\n")
        (path / name).chmod(0o755)
    copied = Copy(folder, path)
    # As setup_environment.sh --test leaves it, which would install into this environment otherwise.
    wanted = 'echo "$(cat requirements_training.txt pyproject.toml | cksum) $(python3 --version)"'
    copied.run(f"{wanted} > '.venv/.installed[test]'")
    place_files(folder)
    return copied


def place_files(folder: Path) -> None:
    """Write what the commands of the README read beside the data of the demonstration."""
    tiny_bpe(folder / "bpe")
    sources = sorted(
        path for name in ("refocused", "tests") for path in (ROOT / name).rglob("*.py")
    )
    (folder / "texts").mkdir()
    for number, file in enumerate(sources):  # more than the 1,048,576 tokens of a usual step
        shutil.copy(file, folder / "texts" / f"{number}.txt")
    (folder / "old").mkdir()
    rows = np.arange(40, dtype=np.int32).reshape(4, 10)
    np.savez(folder / "old" / "rows.npz", input_ids=rows, attention_mask=np.ones_like(rows))
    (folder / "book.txt").write_text((ROOT / "README.md").read_text()[:2000])
    item = {"ctx": "def main", "endings": ["() -> int:", "() -> str:"] * 2, "label": 0}
    (folder / "val.jsonl").write_text((json.dumps(item) + "\n") * 4)


def labels(text: str) -> Iterator[str]:
    """Return the word that each line of a run begins with."""
    return (line.split()[0] for line in text.splitlines() if line.strip())


def documented(run: Path) -> None:
    """Assert that the reference names exactly the files of a run, and every key in its records."""
    first_table = (ROOT / "docs" / "reference" / "files.md").read_text().split("\n\n")[2]
    named = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (.*?) \|", first_table, re.M)))
    patterns = [re.escape(one).replace("N", r"\d+").replace(r"\*", ".+") for one in named]
    files = [str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()]
    assert [one for one in files if not any(re.fullmatch(p, one) for p in patterns)] == []
    assert [p for p in patterns if not any(re.fullmatch(p, one) for one in files)] == []

    sys.path.append(str(ROOT / "docs"))
    page = importlib.import_module("generate_reference").metrics()
    sections = dict(re.findall(r"^## (\S+)\n((?s:.*?))(?=^## |\Z)", page, re.M))
    for name in ("state.json", "mirror.json", *(f"logs/{one}.jsonl" for one in RECORDS)):
        text = (run / name).read_text()
        records = map(json.loads, text.splitlines() if name.endswith("l") else [text])
        keys = {key for one in records for key in one}
        missing = [key for key in keys - ALWAYS if f"| `{key}` |" not in sections[name]]
        assert missing == [], name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_blocks_run_as_they_are_printed(copy: Copy) -> None:
    demonstration, screen, *others = (block for block in blocks() if block.first_line not in NEEDS)
    assert re.findall(r"^\S+", demonstration.commands, re.M) == [SPEEDRUN, TEST]
    assert not any(TEST in block.commands for block in others)  # the suite that this is part of
    printed = copy.run(f"{SPEEDRUN} {FEWER_STEPS}")
    copy.run(f"{TRAIN} {FEWER_STEPS}")
    there = {*labels(printed)}
    of_samples = {"This", "ratex", "quotingular"}  # what a model writes
    missing = [name for name in labels(screen.text) if name not in (*there, *of_samples)]
    assert missing == [], printed  # the lines of the README, in its order

    documented(copy.folder / "runs" / "demo")

    outputs = {}
    for block in others:
        if block.commands:
            outputs[block] = copy.run(block.commands)
        if block.kind == "console":
            heading = block.text.splitlines()[1]
            assert outputs[block].splitlines()[0].split() == heading.split()

    best = min(
        one["validation_loss"] for one in metrics(copy.folder / "runs/demo", "validation").values()
    )
    told = next(text for text in outputs.values() if "validation  " in text)
    loss = re.search(r"^validation +16 items  loss (\d\.\d+)", told, re.M)
    assert loss is not None, told
    assert float(loss[1]) == pytest.approx(best, abs=0.01)

    tracked = {path.name for path in ROOT.iterdir()} - {"runs", "data"}
    new = {path.name for path in copy.folder.iterdir()} - tracked
    assert new == PLACED | WRITTEN | {"runs", "data"}
