import fcntl
import itertools
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.shard_samples import settings
from data.text_samples import (
    assert_prepared,
    documents_of,
    files_of,
    random_texts,
    stream,
    tiny_bpe,
    write_jsonl,
    write_parquet,
)
from evaluate.test_origin import hub as hub
from fakes import Fault
from huggingface_hub import constants
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.data.manifest.shard_manifest import build_manifest, read_manifest
from refocused.prepare.texts import task_pools, text_inputs
from refocused.prepare.texts.text_documents import TextReading
from refocused.prepare.texts.text_inputs import find_inputs, plan_tasks
from refocused.prepare.texts.tokenize import tokenize
from refocused.prepare.texts.tokenize_worker import TokenizeRequest, Worker, is_validation
from refocused.prepare.write_shards import PackResult
from refocused.system.errors import BucketError, ShardError
from refocused.tokenizers.encoders import TokenizerChoice

BYTES = TokenizerChoice("bytes")


def make(
    texts: Path | str, out: Path, *, bucket: Bucket | None = None, **changes: Any
) -> PackResult:
    options = {"workers": 1, "executor": "local", "progress": lambda *_: None}
    options |= {name: changes.pop(name) for name in options if name in changes}
    fields = {"field", "separator", "bad_text"} & changes.keys()
    changes["reading"] = TextReading(**{name: changes.pop(name) for name in fields})
    settings = {"tokenizer": BYTES, "shard_tokens": 1000, "validation_ratio": 0.2, **changes}
    request, inputs = TokenizeRequest(**settings), find_inputs([str(texts)])
    bucket = bucket or DirectoryBucket(out)
    return tokenize(inputs, bucket, work=out / ".prepare", request=request, **options)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Files of every form, several tasks of them."""
    monkeypatch.setattr(text_inputs, "TASK_BYTES", 3000)
    folder = tmp_path / "texts"
    write_jsonl(folder / "1.jsonl", random_texts(60, seed=1))
    write_jsonl(folder / "2.jsonl.gz", random_texts(20, seed=2))
    write_parquet(folder / "3.parquet", random_texts(30, seed=3))
    (folder / "4.txt").write_text(random_texts(1, seed=4)[0])
    return folder


def all_texts() -> list[str]:
    sizes = {1: 60, 2: 20, 3: 30, 4: 1}
    return [text for seed, number in sizes.items() for text in random_texts(number, seed=seed)]


def test_every_document_is_in_its_split_in_order_after_an_end_of_text(texts, tmp_path):
    out = tmp_path / "out"
    result = make(texts, out)
    for split in ("train", "val"):
        found = documents_of(stream(out, split), begin=256)
        wanted = [t for t in all_texts() if is_validation(t, ratio=0.2) == (split == "val")]
        assert wanted
        assert [bytes(document).decode() for document in found] == wanted
    assert_prepared(out)
    assert sum(shard.documents or 0 for shard in result.manifest.shards) == 111
    assert {shard.tokens for shard in result.manifest.shards[:-1]} >= {1000}
    assert build_manifest(DirectoryBucket(out), settings()) == result.manifest


def test_output_is_independent_of_workers_and_progress_reaches_the_end(
    texts, tmp_path, monkeypatch
):
    choice = TokenizerChoice("gpt2", bpe_folder=tiny_bpe(tmp_path / "bpe"))
    progress = []
    show = lambda *figures: progress.append(figures)  # noqa: E731
    result = make(texts, tmp_path / "1", tokenizer=choice, progress=show)
    make(texts, tmp_path / "2", tokenizer=choice, workers=2)
    monkeypatch.setattr(text_inputs, "TASK_BYTES", 10**9)
    make(texts, tmp_path / "3", tokenizer=choice)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "3")
    done, totals, tokens, _ = zip(*progress, strict=True)
    assert len(done) > 3
    assert all(before < after for before, after in itertools.pairwise(done))
    assert (done[0], tokens[0]) == (0, 0)
    assert done[-1] == totals[-1]
    assert tokens[-1] == result.manifest.tokens == result.new_tokens


def test_a_large_vocabulary_takes_four_bytes(texts, tmp_path):
    words = {f"w{n}": n for n in range(70_000)} | {"</s>": 70_000, "[UNK]": 70_001}
    Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(tmp_path / "words.json"))
    choice = TokenizerChoice(str(tmp_path / "words.json"))
    result = make(texts, tmp_path / "out", tokenizer=choice, max_loss=1.0)
    assert {shard.dtype for shard in result.manifest.shards} == {"uint32"}
    train = stream(tmp_path / "out", "train")
    assert train[:2] == [70_000, 70_001]
    assert np.load(tmp_path / "out" / result.manifest.shards[0].name).dtype == np.uint32


def lossy(kind: str, file: Path) -> TokenizerChoice:
    """Save a tokenizer of the letters a to z and the space that is not of bytes."""
    letters = {letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz ?")}
    if kind == "byte level":  # the bytes of most other characters are missing
        letters = {letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz\u0120")}
    tokenizer = Tokenizer(models.BPE(letters, []))
    if kind == "unknown":
        tokenizer.model = models.BPE(letters, [], unk_token="?", fuse_unk=True)
    elif kind == "words":
        tokenizer.model = models.WordLevel({"?": 0, "ab": 1, "cd": 2}, unk_token="?")
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    elif kind == "pieces":
        tokenizer.model = models.Unigram([(one, -1.0) for one in [*letters, "\u2581"]], unk_id=27)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    elif kind == "byte level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "normalized":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(file))
    return TokenizerChoice(str(file))


@pytest.mark.parametrize("kind", ["vanish", "unknown", "words", "pieces", "byte level"])
def test_lost_characters_are_a_warning_and_an_error_above_one_percent(tmp_path, kind, caplog):
    choice, file = lossy(kind, tmp_path / "tokenizer.json"), tmp_path / "texts" / "a.txt"
    file.parent.mkdir()
    file.write_text("ab cd " * 30 + "\u6f22\u5b57")
    with pytest.raises(
        ShardError, match=r"1\.10% .* lost: .*'\u6f22' \(1 times\).*--max-loss 0\.02"
    ):
        make(file, tmp_path / "out", tokenizer=choice)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    file.write_text("ab cd " * 40 + "\u6f22")
    result = make(file, tmp_path / "out", tokenizer=choice)
    assert result.manifest.end_of_text_id in (27, 28, 29, 3)
    notes = read_manifest(DirectoryBucket(tmp_path / "out")).notes
    assert notes[0].startswith("each document begins with </s> (id ")
    said = "0.41% of the characters of a sample are lost: they vanish or become unknown, such as"
    assert notes[1] == f"{said} '\u6f22' (1 times)" and notes[1] in caplog.text


def test_normalization_is_named_and_no_error(tmp_path):
    choice, file = lossy("normalized", tmp_path / "tokenizer.json"), tmp_path / "a.txt"
    file.write_text("Ab \uff43d " * 50)  # a capital, and a letter of full width
    notes = make(file, tmp_path / "out", tokenizer=choice).manifest.notes
    said = "33.33% of the characters of a sample are changed by its normalization, such as"
    assert notes[1:] == (f"{said} 'A' (50 times), '\uff43' (50 times)",)


def test_a_finished_set_is_verified_and_kept(texts, tmp_path):
    out = tmp_path / "out"
    first = make(texts, out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = make(texts, out)
    assert (again.new_tokens, again.kept_shards) == (0, len(first.manifest.shards))
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    shard = out / first.manifest.shards[2].name
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ShardError, match=rf"{shard.name} is missing or damaged"):
        make(texts, out)


def test_another_recipe_is_refused_by_what_differs(texts, tmp_path):
    out = tmp_path / "out"
    make(texts, out)
    before = files_of(out)
    with pytest.raises(ShardError, match=r"shard_tokens = 1000 there, 500 now"):
        make(texts, out, shard_tokens=500)
    (texts / "5.txt").write_text("more")
    with pytest.raises(ShardError, match=r"inputs = \[\] there, \[\['5.txt', 4, \d+\]\] now"):
        make(texts, out)
    (texts / "5.txt").replace(texts / "4.txt")
    with pytest.raises(
        ShardError, match=r"inputs = \[\['4.txt', \d+, \d+\]\] there, \[\['4.txt', 4,"
    ):
        make(texts, out)
    assert files_of(out) == before


def test_a_failed_set_begins_anew_with_another_recipe(texts, tmp_path, caplog):
    """Both remedies of the message work, and nothing of the first call remains, but notes do."""
    out = tmp_path / "out"
    (texts / "5.txt").write_bytes(b"Caf\xe9")
    with pytest.raises(ShardError, match=r"5\.txt: the text is not UTF-8 at byte 3"):
        make(texts, out)
    finished = list(out.glob("*.npy"))
    assert len(finished) > 3
    (out / "notes.txt").touch()
    with pytest.raises(ShardError, match=r"holds notes.txt, and unfinished .*\(bad_text"):
        make(texts, out, bad_text="replace")
    assert all(shard.exists() for shard in finished)
    (out / "notes.txt").unlink()
    assert make(texts, out, bad_text="replace", name="other").manifest.tokens
    assert f"anew, without the {len(finished)} shards of an unfinished data set" in caplog.text
    make(texts, tmp_path / "fresh", bad_text="replace", name="other")
    assert files_of(out) == files_of(tmp_path / "fresh")
    with pytest.raises(ShardError, match="another recipe: bad_text = 'replace' there"):
        make(texts, out, name="other")  # finished data are protected


def test_an_emptied_target_takes_nothing_from_tasks_of_another_recipe(texts, tmp_path):
    out, request = tmp_path / "out", TokenizeRequest(BYTES, 1000, 0.2)
    (out / ".prepare").mkdir(parents=True)  # of a killed call, whose target was emptied since
    Worker(request, out / ".prepare").run(0, plan_tasks(find_inputs([str(texts)]))[0].spans)
    choice = TokenizerChoice("gpt2", bpe_folder=tiny_bpe(tmp_path / "bpe"))
    for name in ("out", "fresh"):
        make(texts, tmp_path / name, tokenizer=choice)
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_a_target_with_other_data_or_another_process_is_refused(texts, tmp_path):
    work = tmp_path / "out" / ".prepare"
    work.mkdir(parents=True)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ShardError, match="another process is working in this folder"):
            make(texts, tmp_path / "out")
    shutil.rmtree(work)
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(ShardError, match=r"not empty; it holds notes\.txt"):
        make(texts, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ShardError, match="no text in the files"):
        make(tmp_path / "empty.txt", tmp_path / "other")


@pytest.mark.parametrize("best_fit", [None, 64])
def test_a_lost_shard_of_an_unfinished_set_is_made_again(texts, tmp_path, caplog, best_fit):
    out = tmp_path / "out"
    whole = make(texts, tmp_path / "whole", best_fit=best_fit).manifest
    assert {shard.packed_for for shard in whole.shards} == {best_fit}
    stop_at = 5

    def stop(*_progress: int) -> None:
        nonlocal stop_at
        stop_at -= 1
        if not stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(texts, out, progress=stop, best_fit=best_fit)
    finished = sorted(out.glob("*_train_*.npy"))
    assert len(finished) > 3
    content = bytearray(finished[1].read_bytes())
    content[200] ^= 1
    finished[1].write_bytes(content)
    (out / ".prepare" / "tokens_val.open").write_bytes(b"")
    result = make(texts, out, best_fit=best_fit)
    assert f"{finished[1].name} is missing or damaged; making it again" in caplog.text
    assert 0 < result.kept_shards < len(result.manifest.shards)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.bucket
def test_texts_and_shards_of_a_bucket_need_no_local_copy(texts, tmp_path, emulator):
    bucket = open_bucket(f"{emulator.url}/prepared")
    source = open_bucket(f"{emulator.url}/texts/sub")
    for path in [*texts.iterdir(), write_jsonl(tmp_path / "other.csv", ["no text file"])]:
        source.upload(path, path.name)
    lost, cut = Fault(lose_reply=True), Fault(cut_after=100)
    emulator.proxy.script(lambda request: "1.jsonl" in request.path, cut, times=2)
    emulator.proxy.script(lambda request: "3.parquet" in request.path, lost, times=2)
    make(texts, tmp_path / "out")
    result = make(f"{emulator.url}/texts", tmp_path / "work", bucket=bucket)
    assert read_manifest(bucket).fingerprint == result.manifest.fingerprint
    assert not (tmp_path / "work" / ".prepare").exists()
    assert bucket.read("manifest.json") == (tmp_path / "out" / "manifest.json").read_bytes()
    pattern, out = f"{emulator.url}/texts/*.jsonl*", tmp_path / "two"
    inputs = find_inputs([pattern])
    assert [file.path.name for file in inputs] == ["texts/sub/1.jsonl", "texts/sub/2.jsonl.gz"]
    with pytest.raises(ShardError, match="no text files"):
        find_inputs([f"{emulator.url}/nothing"])
    cut = Fault(truncate_to=99)  # also of the look at its first bytes
    emulator.proxy.script(lambda r: "/download/" in r.path and "1.jsonl" in r.path, cut, times=2)
    with pytest.raises(BucketError, match=r"1\.jsonl: 99 of [0-9,]* bytes received from byte 0"):
        make(pattern, out)
    source.write("1.jsonl", (texts / "1.jsonl").read_bytes()[::-1], overwrite=True)
    with pytest.raises(ShardError, match=r"1\.jsonl: the object has changed since it was listed"):
        inputs[0].path.open("rb").read()
    source.write("1.jsonl", (texts / "1.jsonl").read_bytes(), overwrite=True)
    assert make(pattern, out).manifest.tokens  # begun anew


@pytest.mark.bucket
def test_a_data_set_of_the_hub_needs_no_local_copy(texts, tmp_path, hub):
    hub["me/web"] = {f"data/{path.name}": path.read_bytes() for path in texts.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", constants.ENDPOINT)  # of the workers
        result = make("hub:me/web@main:data", tmp_path / "hub")
    assert result.manifest.fingerprint == make(texts, tmp_path / "out").manifest.fingerprint
    assert find_inputs(["hub:me/web:*.txt"])[0].size == (texts / "4.txt").stat().st_size
    with pytest.raises(BucketError, match=r"hub:me/none: .*Check the name, HF_TOKEN"):
        find_inputs(["hub:me/none"])


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two workers, which the calls of this file join."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_killed_worker_of_ray_costs_one_task(cluster, texts, tmp_path, monkeypatch):
    log, original = tmp_path / "tasks.log", task_pools.stream_task

    def stream(request: Any, version: str, number: int, spans: Any) -> Iterator[bytes]:
        first = f"{number}\n" not in (log.read_text() if log.exists() else "")
        with log.open("a") as file:
            file.write(f"{number}\n")
        for block in original(request, version, number, spans):
            yield block
            if number == 1 and first:
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(task_pools, "stream_task", stream)
    make(texts, tmp_path / "ray", executor="ray")
    make(texts, tmp_path / "local")
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")
    begun = sorted(map(int, log.read_text().split()))
    assert len(set(begun)) > 4
    assert begun == sorted([1, *set(begun)])


@pytest.mark.slow
def test_a_bad_document_gives_the_same_message_on_ray(cluster, texts, tmp_path, monkeypatch):
    lines = (texts / "1.jsonl").read_text().splitlines()
    (texts / "1.jsonl").write_text("\n".join([*lines[:20], '{"text": 1}', *lines[20:30], "{}"]))
    with pytest.raises(ShardError, match="it has no text under 'text'") as error:
        make(texts, tmp_path / "local")
    assert not (tmp_path / "local" / "manifest.json").exists()
    with pytest.raises(ShardError, match=f"^{re.escape(str(error.value))}$"):
        make(texts, tmp_path / "ray", executor="ray")
    monkeypatch.setattr("refocused.__version__", "0.0.9")
    with pytest.raises(ShardError, match=r"installed here, 0\.0\.9 where the command runs"):
        make(texts, tmp_path / "version", executor="ray")
