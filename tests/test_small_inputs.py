"""Read small hostile files in a process limited to 1 GB; each must end in a one-line error.

.venv/bin/python tests/test_small_inputs.py FOLDER [CASE ...]
"""

import gzip
import io
import json
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from refocused.checkpoints.step.checkpoint_manifest import parse_manifest
from refocused.config.load_run import read_run
from refocused.config.model_shape import load_shape
from refocused.data.formats.token_layout import read_tensor_header
from refocused.engine.state_files import read_state
from refocused.evaluate.tasks import TaskFile, read_questions
from refocused.metrics.jsonl import read_small
from refocused.prepare.texts.text_documents import TextReading, pieces
from refocused.prepare.texts.text_inputs import Span
from refocused.system.errors import RefocusedError
from refocused.tokenizers.encoders import FileTokenizer

ROOM_BYTES = 1_000_000_000  # above what the imports take
MIB = b"a" * 2**20
LAUGHS = "model:\n  a0: &a0 [x]\n" + "".join(
    f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)
)


def texts(path):
    for _ in pieces(Span(path), TextReading()):
        pass


def questions(path, form="multiple_choice"):
    return read_questions(TaskFile("t", form, path))


def packed(path, start, block, end):
    with gzip.open(path, "wb", 1) as file:
        file.write(start)
        for _ in range(900):
            file.write(block)
        file.write(end)


def columns(path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(table, path)
    texts(path)


def repeated_text(path):
    """Read 5 GB of one text of 1 MB that is stored once."""
    once = pyarrow.array([MIB.decode()])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 5000, pyarrow.int32()), once)
    parquet.write_table(pyarrow.table({"text": column}), path, store_schema=False)
    texts(path)


def long_text(path):
    parquet.write_table(
        pyarrow.table({"text": [64 * MIB.decode()]}), path, compression="zstd", use_dictionary=False
    )
    texts(path)


def one_line(path):
    packed(path, b'{"text": "', MIB, b'"}\n')
    texts(path)


def blank_lines(path):
    packed(path, b"", b"\n" * 2**20, b"")
    texts(path)


def long_pattern(path):
    """Make a tokenizer whose pattern backtracks endlessly, so that the library panics."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    tokenizer.save(str(path))
    FileTokenizer(path, end_of_text=None).encode("a" * 60 + "b")


def compressed_state(path):
    """Write a deflated torch.save file: 200 MB of zeros in 200 kB."""
    plain = io.BytesIO()
    torch.save({"module": torch.zeros(50_000_000)}, plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as target,
    ):
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    read_state(path)


def expanded_state(path):
    torch.save({"module": torch.zeros(1).expand(100_000, 100_000)}, path)
    read_state(path)["module"].clone()


def marks(path):
    read_tensor_header(b"(" * 500_000 + b"t" * 500_000 + b".", what=str(path))


def odd_persistent_id(path):
    read_tensor_header(b"(K\x01K\x01K\x01K\x01K\x01tQ.", what=str(path))


def state(path):
    found = read_small(path)
    if found.trouble is not None:
        raise RefocusedError(found.trouble)


Case = tuple[str, str | bytes | None, Callable[[Path], Any]]
CASES = {
    "aliases": ("run.yaml", LAUGHS, read_run),
    "an alias of itself": ("run.yaml", "a: &a {b: *a}", read_run),
    "deep YAML": ("run.yaml", "a: " + "[" * 100_000, read_run),
    "a YAML number": ("run.yaml", "run: {steps: " + "9" * 5000 + "}", read_run),
    "long YAML": ("run.yaml", "a: [" + "x, " * 300_000 + "]", read_run),
    "half a character in YAML": ("run.yaml", 'a: "\\ud800"', read_run),
    "deep JSON": ("model.json", '{"a":' * 200_000, load_shape),
    "a JSON number": ("model.json", '{"n_layer": ' + "9" * 5000 + "}", load_shape),
    "deep JSON of a run": ("state.json", "[" * 200_000, state),
    "layers": (
        "model.json",
        '{"model_type": "gpt2", "n_embd": 8, "n_layer": 1000000, "n_head": 2, "n_positions": 8, '
        '"vocab_size": 8}',
        load_shape,
    ),
    "brackets in a task": ("t.jsonl", "[" * 200_000, questions),
    "open brackets in a text": (
        "t.jsonl",
        json.dumps({"ctx": "[" * 200_000, "endings": ["a", "b"], "label": 7}),
        lambda path: questions(path, "hellaswag"),
    ),
    "half a character in a task": (
        "t.jsonl",
        '{"ctx": "\\ud800", "endings": ["a", "b"], "label": 0}',
        questions,
    ),
    "deep JSON in a text": ("x.jsonl", '{"text": ' + "[" * 200_000, texts),
    "ranks": (
        "manifest.json",
        None,
        lambda path: parse_manifest(
            json.dumps(
                {
                    "schema_version": 2, "run": "r", "name": "n", "step": 1, "epoch": 0,
                    "files_done": 0, "created": "2026-11-21T08:00:00Z", "world_size": 10**12,
                    "zero_stage": 3, "dtype": "bf16", "versions": {}, "data_fingerprint": "",
                    "data_order": "", "parameters": 1, "validation_loss": None, "loss": None,
                    "tokens": 1, "files": {},
                }
            ).encode(),
            where=str(path),
        ),
    ),
    "one line in gzip": ("x.jsonl.gz", None, one_line),
    "blank lines in gzip": ("x.jsonl.gz", None, blank_lines),
    "two columns": ("x.parquet", None, columns),
    "a repeated text": ("x.parquet", None, repeated_text),
    "a long text": ("x.parquet", None, long_text),
    "a pattern": ("tokenizer.json", None, long_pattern),
    "a compressed state": ("x.pt", None, compressed_state),
    "an expanded state": ("x.pt", None, expanded_state),
    "marks in a pickle": ("x.pt", None, marks),
    "an odd storage in a pickle": ("x.pt", None, odd_persistent_id),
}  # fmt: skip


def outcome(folder, case):
    """Return the error message of a case, `TRACEBACK ...` or `ACCEPTED`."""
    name, content, read = case
    path = folder / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        read(path)
    except RefocusedError as error:
        return str(error)
    except BaseException as error:
        return f"TRACEBACK {type(error).__name__}: {error!s:.200}"
    return "ACCEPTED"


@pytest.mark.slow
def test_a_small_hostile_file_ends_in_one_sentence_and_little_memory(tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert list(found) == list(CASES), done.stderr[-2000:]
    odd = {name: end for name, end in found.items() if end.startswith(("TRACEBACK", "ACCEPTED"))}
    assert not odd
    assert all(len(end) < 2000 for end in found.values())


if __name__ == "__main__":
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit + ROOM_BYTES, limit + ROOM_BYTES))
    root = Path(sys.argv[1])
    for number, chosen_name in enumerate(sys.argv[2:] or CASES):
        place = root / str(number)
        place.mkdir()
        print(json.dumps([chosen_name, outcome(place, CASES[chosen_name])]), flush=True)
