"""Readers of untrusted files return, or raise a `RefocusedError`.

Examples are fixed; REFOCUSED_FUZZ=5000 draws that many new ones for each test.
"""

import io
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from data.shard_samples import llm_c_bytes, npy_bytes, npz_bytes, pt_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from refocused.checkpoints.resume.changes import checked_trainer
from refocused.checkpoints.step.checkpoint_directory import read_mapping, recorded_branch
from refocused.checkpoints.step.checkpoint_manifest import parse_manifest, parse_marker
from refocused.config.data import DataConfig
from refocused.config.deepspeed import read_fragment
from refocused.config.load_run import load_run
from refocused.config.model_shape import load_shape
from refocused.data.formats.token_blocks import count_tokens, token_blocks
from refocused.data.formats.token_layout import read_layout
from refocused.data.manifest.shard_manifest import (
    Manifest,
    Shard,
    manifest_from_json,
    manifest_to_json,
)
from refocused.engine.state_files import read_state
from refocused.evaluate.tasks import FORMS, TaskFile, read_questions
from refocused.monitor.run_reader import RunReader
from refocused.prepare.texts.text_documents import TextReading, pieces
from refocused.prepare.texts.text_inputs import Span
from refocused.system.errors import RefocusedError, ShardError
from refocused.tokenizers.encoders import BYTES, FileTokenizer, TokenizerChoice
from refocused.tokenizers.tokenizer_json import check_vocabulary, tokenizer_file
from refocused.train.step.state import TrainState

MORE = os.environ.get("REFOCUSED_FUZZ")
fuzzed = settings(
    max_examples=int(MORE or 40),
    derandomize=MORE is None,
    print_blob=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

hostile = st.sampled_from(
    [None, True, "", "x", "\ud800", "\x1b[2J", "1e999", 0, -1, 2**31, 10**12, 10**90, 1e308, [], {},
     float("nan"), [[]], {"a": [None]}, "9" * 5000, ["x"] * 100]
)  # fmt: skip
values = hostile | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def changed(good):
    """Draw a value with one or two of its parts replaced, removed, or added to."""

    def change(value, draw):
        if isinstance(value, dict) and value and draw(st.integers(0, 5)):
            name = draw(st.sampled_from(sorted(value)))
            if not draw(st.integers(0, 9)):
                return {key: below for key, below in value.items() if key != name}
            return value | {name: change(value[name], draw)}
        if isinstance(value, list) and value and draw(st.booleans()):
            place = draw(st.integers(0, len(value) - 1))
            return [*value[:place], change(value[place], draw), *value[place + 1 :]]
        if isinstance(value, dict) and draw(st.booleans()):
            return value | {draw(st.text(max_size=5)): draw(values)}
        return draw(values)

    @st.composite
    def drawn(draw):
        value = good
        for _ in range(draw(st.integers(1, 2))):
            value = change(value, draw)
        return value

    return drawn()


def damaged(good, lies=(b"[" * 5000,)):
    """Draw a file that is cut, has bytes replaced, or is repeated in part."""
    places = st.integers(0, min(len(good), 200)) | st.integers(0, len(good))  # headers above all
    lengths = st.integers(0, 8) | st.just(len(good))
    edits = st.tuples(places, lengths, st.binary(max_size=8) | st.sampled_from(lies))

    def apply(drawn):
        found = good
        for place, length, piece in drawn:
            found = found[:place] + piece + found[place + length :]
        return found

    return st.lists(edits, min_size=1, max_size=4).map(apply)


def json_files(good):
    """Draw JSON of another content, and damaged JSON."""
    text = json.dumps(good)
    return changed(good).map(lambda value: json.dumps(value).encode()) | damaged(text.encode())


MANIFEST = json.loads(
    manifest_to_json(Manifest((Shard("a.npy", 5, "uint16", 138, 7, None, max_id=3),), "bytes"))
)
STEP = {
    "schema_version": 2, "run": "r", "run_id": "1", "branch": 2, "ancestry": [[1, 5]], "name": "n",
    "step": 9, "epoch": 0, "files_done": 0, "created": "2026-11-21T08:00:00Z", "world_size": 1,
    "zero_stage": 3, "dtype": "bf16", "versions": {"torch": "2"}, "data_fingerprint": "f",
    "data_order": "o", "parameters": 1, "validation_loss": None, "loss": 2.5, "tokens": 1,
    "files": {"run.yaml": {"size": 1, "crc32c": 2}},
}  # fmt: skip
MARKER = {"files": 1, "bytes": 2, "manifest_crc32c": 3}
STATE = {"run_id": "1", "branch": 2, "ancestry": [[1, 5]], "phase": "training", "pid": 5}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8,
        "vocab_size": 9, "tie_word_embeddings": True}  # fmt: skip
NEOX = {"model_type": "gpt_neox", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9,
        "num_attention_heads": 2, "max_position_embeddings": 8, "rotary_pct": 0.5,
        "rope_parameters": {"partial_rotary_factor": 0.5}}  # fmt: skip
FRAGMENT = {"zero_optimization": {"sub_group_size": 5}, "aio": {"block_size": 1}}
RUN = {
    "run": {"steps": 100}, "model": {"preset": "gpt2_tiny", "sequence_length": 64},
    "batch": {"micro_batch_size": 2, "global_batch_size": 8},
    "data": {"source": "tokens"}, "optimizer": {"lr": 3e-4},
}  # fmt: skip
ITEM = {"ctx": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d", "e"], "label": 1, "text": "a b c",
        "goal": "f", "sol1": "g", "sol2": "h", "activity_label": "i"}  # fmt: skip
TRAINER = TrainState().as_record()


ROWS = np.array([[5, 6, 0, 0], [7, 8, 9, 0], [0, 0, 0, 0], [1, 2, 3, 4]], np.int32)
TOKEN_FILES = {
    "x.npy": npy_bytes(np.arange(40, dtype=np.int32)),
    "rows.npy": npy_bytes(np.arange(40).reshape(4, 10)),
    "x.npz": npz_bytes(input_ids=ROWS, sequence_lengths=np.array([2, 3, 0, 4], np.int32)),
    "mask.npz": npz_bytes(input_ids=ROWS, attention_mask=(ROWS > 0).astype(np.int8)),
    "x.pt": pt_bytes(torch.arange(40)),
    "rows.pt": pt_bytes(torch.arange(40, dtype=torch.int32).reshape(4, 10)),
    "x.bin": llm_c_bytes(range(40)),
    "raw.bin": np.arange(700, dtype=np.uint16).tobytes(),
}
READING = DataConfig(source="x", pad_id=0, separator_id=9, dtype="uint16")
LIES = [lie.to_bytes(8, "little")[:size] for lie in (0, 255, 2**31 - 1, 2**63 - 1, 2**64 - 1)
        for size in (1, 2, 4, 8)]  # fmt: skip


@st.composite
def token_files(draw):
    """Draw a token file that is damaged, or of whose members one is, its checksums being right."""
    name = draw(st.sampled_from(sorted(TOKEN_FILES)))
    content = TOKEN_FILES[name]
    if not name.endswith((".npz", ".pt")) or not draw(st.integers(0, 2)):
        return name, draw(damaged(content, lies=LIES))
    rebuilt = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(rebuilt, "w") as new:
        victim = draw(st.sampled_from([entry.filename for entry in old.infolist()]))
        for entry in old.infolist():
            member = old.read(entry)
            member = draw(damaged(member, lies=LIES)) if entry.filename == victim else member
            new.writestr(entry.filename, member, compress_type=entry.compress_type)
    return name, rebuilt.getvalue()


class WatchedFile(io.BytesIO):
    """A file in memory that adds up what is read out of it."""

    bytes_read = 0

    def read(self, size=-1, /):
        content = super().read(size)
        self.bytes_read += len(content)
        return content


@settings(fuzzed, max_examples=int(MORE or 400))
@given(drawn=token_files())
def test_token_files(drawn):
    name, content = drawn
    file = WatchedFile(content)
    tracemalloc.start()
    try:
        layout = read_layout(file, name=name, data=READING)
        count_tokens(file, layout, name=name)
        tokens = sum(len(block) for block in token_blocks(file, layout, name=name))
        assert tokens <= len(content) * 1040  # deflate's own limit
    except ShardError as error:
        assert name in str(error)
        assert file.bytes_read <= 40 * (len(content) + 1000)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 << 20


def parquet_bytes():
    written = io.BytesIO()
    table = pyarrow.table({"text": ["one", None, "two"] * 20, "id": range(60)})
    parquet.write_table(table, written, row_group_size=30)
    return written.getvalue()


def state_bytes(zipped):
    written = io.BytesIO()
    content = {"module": {"a": torch.zeros(3)}, "global_steps": 5, "shapes": [{"a": (3,)}]}
    torch.save(content, written, _use_new_zipfile_serialization=zipped)
    return written.getvalue()


def read_run_folder(file):
    """Read a run whose state, and the lines of whose logs, are this file."""
    content = file.read_bytes()
    (file.parent / "logs").mkdir(exist_ok=True)
    (file.parent / "state.json").write_bytes(content)
    for name in ("metrics.jsonl", "events.jsonl", "gpu_metrics.jsonl"):
        (file.parent / "logs" / name).write_bytes(content + b"\n")
    recorded_branch(file.parent)
    RunReader(file.parent).read(1e9).as_record()


TOKENIZER = json.loads(tokenizer_file(TokenizerChoice(BYTES), vocabulary=300))
TOKENIZER["model"]["vocab"] = dict(list(TOKENIZER["model"]["vocab"].items())[:20])
YAML = json.dumps(RUN).encode() + b"x: &a [1]\ny: {<<: *a, ? [b] : !!float c}\n"
# By file name: what is drawn for it, and everything that reads it.
READERS: dict[str, tuple[st.SearchStrategy[bytes], list[Callable[[Path], object]]]] = {
    "manifest.json": (
        json_files(MANIFEST),
        [lambda file: manifest_from_json(file.read_bytes(), where="manifest.json")],
    ),
    "checkpoint.json": (
        json_files(STEP),
        [lambda file: parse_manifest(file.read_bytes(), where="manifest.json").marker(0)],
    ),
    "COMMITTED": (
        json_files(MARKER),
        [lambda file: parse_marker(file.read_bytes(), where="COMMITTED")],
    ),
    "trainer.json": (
        json_files(TRAINER),
        [
            lambda file: TrainState.from_record(read_mapping(file)),
            lambda file: checked_trainer(read_mapping(file), where="here"),
        ],
    ),
    "state.json": (json_files(STATE | {"kind": "step", "step": 5}), [read_run_folder]),
    "model.json": (json_files(GPT2) | json_files(NEOX), [load_shape]),
    "fragment.json": (json_files(FRAGMENT), [read_fragment]),
    "run.yaml": (
        changed(RUN).map(lambda run: json.dumps(run).encode()) | damaged(YAML),
        [load_run],
    ),
    "task.jsonl": (
        json_files(ITEM),
        [
            lambda file, form=form: read_questions(TaskFile("t", form, file))
            for form in sorted(FORMS)
        ],
    ),
    "x.jsonl": (
        json_files(ITEM),
        [
            lambda file, bad=bad: [
                piece.text.encode() for piece in pieces(Span(file), TextReading(bad_text=bad))
            ]
            for bad in ("replace", "refuse")
        ],
    ),
    "x.parquet": (damaged(parquet_bytes()), [lambda file: list(pieces(Span(file), TextReading()))]),
    "tokenizer.json": (
        json_files(TOKENIZER),
        [
            lambda file: FileTokenizer(file, end_of_text=None).encode("two words"),
            lambda file: check_vocabulary(file.read_bytes(), vocabulary=300, where="tokenizer"),
        ],
    ),
    "states.pt": (
        damaged(state_bytes(True)) | damaged(state_bytes(False)),
        [lambda file, mapped=mapped: read_state(file, mapped=mapped) for mapped in (True, False)],
    ),
}


@pytest.mark.parametrize("name", READERS)
@fuzzed
@given(drawn=st.data())
def test_files(name, tmp_path_factory, drawn):
    content, readers = READERS[name]
    file = tmp_path_factory.mktemp("fuzz") / name  # a new one: a mapped file must not change
    file.write_bytes(drawn.draw(content))
    for read in readers:
        try:
            read(file)
        except RefocusedError as error:
            assert str(error).strip()
    file.unlink()
