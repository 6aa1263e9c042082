"""Readers of untrusted files return, or raise a `RefocusedError`.

Examples are fixed; REFOCUSED_FUZZ=5000 draws that many new ones for each test.
"""

import io
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from refocused.checkpoints.step.checkpoint_manifest import (
    CheckpointManifest,
    parse_manifest,
    parse_marker,
)
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


def changed(good: Any) -> st.SearchStrategy[Any]:
    """Draw a value with one or two of its parts replaced, removed, or added to."""

    def change(value: Any, draw: Any) -> Any:
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
    def drawn(draw: Any) -> Any:
        value = good
        for _ in range(draw(st.integers(1, 2))):
            value = change(value, draw)
        return value

    return drawn()


def damaged(good: bytes, lies: Sequence[bytes] = (b"[" * 5000,)) -> st.SearchStrategy[bytes]:
    """Draw a file that is cut, has bytes replaced, or is repeated in part."""
    places = st.integers(0, min(len(good), 200)) | st.integers(0, len(good))  # headers above all
    lengths = st.integers(0, 8) | st.just(len(good))
    edits = st.tuples(places, lengths, st.binary(max_size=8) | st.sampled_from(lies))

    def apply(drawn: list[tuple[int, int, bytes]]) -> bytes:
        found = good
        for place, length, piece in drawn:
            found = found[:place] + piece + found[place + length :]
        return found

    return st.lists(edits, min_size=1, max_size=4).map(apply)


def json_files(good: Any) -> st.SearchStrategy[bytes]:
    """Draw JSON of another content, and damaged JSON."""
    text = json.dumps(good)
    return changed(good).map(lambda value: json.dumps(value).encode()) | damaged(text.encode())


def returns_or_raises_named(read: Callable[..., object], *arguments: Any, **named: Any) -> None:
    try:
        read(*arguments, **named)
    except RefocusedError as error:
        assert str(error).strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


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


@fuzzed
@given(content=json_files(MANIFEST))
def test_data_manifests(content: bytes) -> None:
    returns_or_raises_named(manifest_from_json, content, where="manifest.json")


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
def token_files(draw: Any) -> tuple[str, bytes]:
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

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.bytes_read += len(content)
        return content


@settings(fuzzed, max_examples=int(MORE or 400))
@given(drawn=token_files())
def test_token_files(drawn: tuple[str, bytes]) -> None:
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


@fuzzed
@given(content=json_files(STEP), marker=json_files(MARKER))
def test_checkpoint_manifests_and_markers(content: bytes, marker: bytes) -> None:
    def read() -> CheckpointManifest:
        found = parse_manifest(content, where="manifest.json")
        found.marker(0)
        return found

    returns_or_raises_named(read)
    returns_or_raises_named(parse_marker, marker, where="COMMITTED")


@fuzzed
@given(content=json_files(TRAINER))
def test_training_states(folder: Path, content: bytes) -> None:
    file = folder / "trainer.json"
    file.write_bytes(content)
    returns_or_raises_named(lambda: TrainState.from_record(read_mapping(file)))
    returns_or_raises_named(lambda: checked_trainer(read_mapping(file), where="here"))


@fuzzed
@given(content=json_files(STATE), line=json_files(STATE | {"kind": "step", "step": 5}))
def test_the_files_of_a_run(folder: Path, content: bytes, line: bytes) -> None:
    (folder / "state.json").write_bytes(content)
    (folder / "logs").mkdir(exist_ok=True)
    for name in ("metrics.jsonl", "events.jsonl", "gpu_metrics.jsonl"):
        (folder / "logs" / name).write_bytes(line + b"\n")
    recorded_branch(folder)
    RunReader(folder).read(1e9).as_record()


@fuzzed
@given(content=json_files(GPT2) | json_files(NEOX), other=json_files(FRAGMENT))
def test_model_shapes_and_fragments(folder: Path, content: bytes, other: bytes) -> None:
    model, fragment = folder / "model.json", folder / "fragment.json"
    model.write_bytes(content)
    returns_or_raises_named(load_shape, model)
    fragment.write_bytes(other)
    returns_or_raises_named(read_fragment, fragment)


@fuzzed
@given(
    content=changed(RUN).map(lambda run: json.dumps(run).encode())
    | damaged(json.dumps(RUN).encode() + b"x: &a [1]\ny: {<<: *a, ? [b] : !!float c}\n")
)
def test_run_files(folder: Path, content: bytes) -> None:
    file = folder / "run.yaml"
    file.write_bytes(content)
    returns_or_raises_named(load_run, file)


@fuzzed
@given(content=json_files(ITEM), form=st.sampled_from(sorted(FORMS)))
def test_task_files(folder: Path, content: bytes, form: str) -> None:
    file = folder / "task.jsonl"
    file.write_bytes(content)
    returns_or_raises_named(read_questions, TaskFile("t", form, file))


@fuzzed
@given(content=json_files(ITEM), replace=st.booleans())
def test_lines_of_text(folder: Path, content: bytes, replace: bool) -> None:
    file = folder / "x.jsonl"
    file.write_bytes(content)
    reading = TextReading(bad_text="replace" if replace else "refuse")
    returns_or_raises_named(lambda: [p.text.encode() for p in pieces(Span(file), reading)])


def parquet_bytes() -> bytes:
    written = io.BytesIO()
    table = pyarrow.table({"text": ["one", None, "two"] * 20, "id": range(60)})
    parquet.write_table(table, written, row_group_size=30)
    return written.getvalue()


@fuzzed
@given(content=damaged(parquet_bytes()))
def test_parquet(folder: Path, content: bytes) -> None:
    file = folder / "x.parquet"
    file.write_bytes(content)
    returns_or_raises_named(lambda: list(pieces(Span(file), TextReading())))


TOKENIZER = json.loads(tokenizer_file(TokenizerChoice(BYTES), vocabulary=300))
TOKENIZER["model"]["vocab"] = dict(list(TOKENIZER["model"]["vocab"].items())[:20])


@fuzzed
@given(content=json_files(TOKENIZER))
def test_tokenizers(folder: Path, content: bytes) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(content)
    returns_or_raises_named(lambda: FileTokenizer(file, end_of_text=None).encode("two words"))
    returns_or_raises_named(check_vocabulary, content, vocabulary=300, where="tokenizer.json")


def state_bytes(zipped: bool) -> bytes:
    written = io.BytesIO()
    content = {"module": {"a": torch.zeros(3)}, "global_steps": 5, "shapes": [{"a": (3,)}]}
    torch.save(content, written, _use_new_zipfile_serialization=zipped)
    return written.getvalue()


@fuzzed
@given(content=damaged(state_bytes(True)) | damaged(state_bytes(False)), mapped=st.booleans())
def test_checkpoint_files(folder: Path, content: bytes, mapped: bool) -> None:
    file = folder / f"{hash(content)}.pt"  # a mapped file must not change
    file.write_bytes(content)
    returns_or_raises_named(read_state, file, mapped=mapped)
    file.unlink()
