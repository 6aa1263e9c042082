import codecs
import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from data.text_samples import random_texts, tiny_bpe, write_jsonl, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from refocused.prepare.texts import text_documents, text_inputs
from refocused.prepare.texts.text_documents import TextReading, pieces
from refocused.prepare.texts.text_inputs import Span, find_inputs, plan_tasks
from refocused.system.errors import ShardError
from refocused.tokenizers.encoders import TokenizerChoice, open_tokenizer


def wrong_input(*arguments: object) -> str:
    with pytest.raises(ShardError) as caught:
        find_inputs([str(one) for one in arguments])
    return str(caught.value)


def test_folders_are_read_in_name_order_and_files_as_named(tmp_path):
    for name in ("b/2.txt", "b/a/1.jsonl", "b/.hidden/3.txt", "b/readme.md", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_inputs([str(tmp_path / "b"), str(tmp_path / "a.txt")])
    assert [file.path.name for file in found] == ["2.txt", "1.jsonl", "a.txt"]
    assert found[2].size == 5


def test_a_changed_file_of_the_same_size_is_noticed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one" + " " * 300_000 + "end")
    before = find_inputs([str(path)])
    path.write_text("one" + " " * 300_000 + "and")
    assert find_inputs([str(path)]) != before


def test_wrong_inputs_are_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.html").touch()
    (tmp_path / "empty").mkdir()
    assert "give a path, gs://bucket/NAME, or hub:" in wrong_input("ftp://b/c")
    assert "no such file" in wrong_input(tmp_path / "b.txt")
    assert "this format is not supported" in wrong_input(tmp_path / "a.html")
    assert "empty: no text files (*.txt," in wrong_input(tmp_path / "empty")
    assert "this file is given twice" in wrong_input(tmp_path / "a.txt", tmp_path)


def test_small_files_share_a_task_and_large_ones_are_split(tmp_path, monkeypatch):
    monkeypatch.setattr(text_inputs, "TASK_BYTES", 1000)
    for name in ("1.txt", "2.txt", "3.txt"):
        (tmp_path / name).write_text("x" * 400)
    large = tmp_path / "4.jsonl"
    large.write_text("x" * 2500)
    write_jsonl(tmp_path / "5.jsonl.gz", random_texts(200))
    write_parquet(tmp_path / "6.parquet", random_texts(200, words=200), group=100)
    tasks = plan_tasks(find_inputs([str(tmp_path)]))
    spans = [task.spans for task in tasks]
    assert spans[0] == tuple(Span(tmp_path / f"{n}.txt") for n in (1, 2, 3))
    assert spans[1:3] == [(Span(large, 0, 1000),), (Span(large, 1000, 2000),)]
    assert spans[3][0] == Span(large, 2000, 2500)
    assert Span(tmp_path / "5.jsonl.gz") in spans[3]
    assert spans[4:] == [(Span(tmp_path / "6.parquet", n, n + 1),) for n in range(2)]
    assert all(task.bytes > 0 for task in tasks)


def documents(path: Path, start: int = 0, end: int | None = None, **reading: object) -> list[str]:
    found: list[str] = []
    for piece in pieces(Span(path, start, end), TextReading(**reading)):  # type: ignore[arg-type]
        assert piece.text
        if piece.begins:
            found.append(piece.text)
        else:
            found[-1] += piece.text
    return found


OBJECTS = [{"text": text, "id": n} for n, text in enumerate(["a b", "é\n", "", None, "c" * 99])]
JSON_LINES = "".join(json.dumps(one) + "\n" for one in OBJECTS).encode()


def zst(content: bytes) -> bytes:
    """Two frames, as `zstd` appends them and parallel programs write them."""
    half = len(content) // 2
    parts = (
        pyarrow.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:])
    )
    return b"".join(parts)


def arrow(*, as_file: bool = False) -> bytes:
    """Batches of rows, as `datasets.save_to_disk` writes them (a stream), or an Arrow file."""
    table, sink = pyarrow.Table.from_pylist(OBJECTS), pyarrow.BufferOutputStream()
    with (pyarrow.ipc.new_file if as_file else pyarrow.ipc.new_stream)(sink, table.schema) as out:
        out.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", JSON_LINES),
        ("a.json", json.dumps(OBJECTS).encode()),
        ("a.json", b"\xef\xbb\xbf \n" + json.dumps(OBJECTS, indent=2).encode() + b"\n"),
        ("a.json", "\n".join(json.dumps(one, indent=2) for one in OBJECTS).encode()),
        ("a.JSON.gz", gzip.compress(json.dumps(OBJECTS).encode())),
        ("a.json.gz", gzip.compress(JSON_LINES)),
        ("a.JSONL", JSON_LINES),
        ("a.ndjson.gz", gzip.compress(JSON_LINES)),
        ("a.jsonl.zst", zst(JSON_LINES)),
        ("RC_2011-01.zst", zst(JSON_LINES)),
        ("a.arrow", arrow()),
        ("a.arrow", arrow(as_file=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip writes the time into bytes
)
def test_every_format_gives_the_same_documents(tmp_path, small_pieces, name, content):
    (tmp_path / name).write_bytes(content)
    (file,) = find_inputs([str(tmp_path)])
    counts = Counter[str]()
    assert [piece.text for piece in pieces(Span(file.path), TextReading(), counts)] == [
        "a b",
        "é\n",
        "c" * 99,
    ]
    assert counts["empty"] == 2  # one of them null
    (tmp_path / name).write_bytes(content[:-9])
    assert f"{name}" in refused(tmp_path / name)
    (tmp_path / name).write_bytes(content.replace(b"text", b"body"))
    if not name.endswith((".gz", ".zst")):
        assert "it has body, id" in refused(tmp_path / name) or "has no column 'text'"


def test_the_content_tells_whether_a_text_is_compressed(tmp_path, monkeypatch):
    """Stores keep `Content-Encoding: gzip` without `.gz`, and clients unpack what has it."""
    monkeypatch.setattr(text_inputs, "TASK_BYTES", 50)
    for name, content in (
        ("a.jsonl", gzip.compress(JSON_LINES)),
        ("b.jsonl.gz", JSON_LINES),
        ("c.txt", gzip.compress(b"text")),
    ):
        (tmp_path / name).write_bytes(content)
    tasks = plan_tasks(find_inputs([str(tmp_path)]))
    texts = [
        one.text for task in tasks for span in task.spans for one in pieces(span, TextReading())
    ]
    assert texts == ["a b", "é\n", "c" * 99] * 2 + ["text"]


def test_what_is_left_out_and_what_looks_held_out_is_named(tmp_path, caplog):
    names = ["train-00000.parquet", "test-00000.parquet", "dev/a.txt", "latest.txt"]
    others = ["a.csv", "b.tar.zst", "README.md", "dataset_info.json", "cache-0f.arrow"]
    for name in [*names, *others, ".hidden"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [str(file.path.relative_to(tmp_path)) for file in find_inputs([str(tmp_path)])]
    assert sorted(found) == sorted(names)
    left_out, held_out = (record.getMessage() for record in caplog.records)
    assert "5 of 9 files are left out" in left_out
    assert all(name in left_out for name in others)
    assert "2 of 4 text files look like validation or test sets" in held_out
    assert "dev/a.txt, test-00000.parquet." in held_out


@pytest.mark.parametrize("kind", ["dictionary", "string_view", "large_string"])
def test_other_types_of_text_columns_are_text(tmp_path, kind):
    types = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    own = types.get(kind) or getattr(pyarrow, kind)()
    table = pyarrow.table({"text": pyarrow.array(["a", None, "b", "a"]).cast(own)})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == ["a", "b", "a"]


def refused(path: Path, **reading: object) -> str:
    with pytest.raises(ShardError) as caught:
        documents(path, **reading)
    return str(caught.value)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(text_documents, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(text_documents, "BLOCK_BYTES", 7)


def test_a_text_file_is_one_document_compressed_or_marked(tmp_path, small_pieces):
    text = "Hëllo wörld,\r\n漢字 and more words\n\n"
    plain = text.encode()
    for name, content in (
        ("a.txt", b"\xef\xbb\xbf" + plain),
        ("a.TXT", plain),
        ("a.md", plain),
        ("a.txt.gz", gzip.compress(plain)),
        ("a.txt.zst", zst(plain)),
    ):
        (tmp_path / name).write_bytes(content)
        assert documents(tmp_path / name) == [text]
        assert len(list(pieces(Span(tmp_path / name), TextReading()))) > 1
        assert len(list(pieces(Span(tmp_path / name), TextReading(cuts_at_spaces=False)))) == 1
    (tmp_path / "a.txt.zst").write_bytes(zst(plain)[:-1])
    assert "cannot be read completely (Truncated" in refused(tmp_path / "a.txt.zst")


def test_empty_lines_and_files(tmp_path):
    for name, content, options, wanted in (
        ("a.txt", "", {}, []),
        ("a.txt", "one\ntwo\n\nthree\n", {"separator": ""}, ["one\ntwo\n", "three\n"]),
        ("a.jsonl", '{"text": "a"}\n\n  \r\n{"text": "b"}', {}, ["a", "b"]),
    ):
        (tmp_path / name).write_text(content)
        assert documents(tmp_path / name, **options) == wanted


@pytest.mark.parametrize("last", ["", "\n", "\n--"])
def test_a_line_separates_the_documents_of_a_txt(tmp_path, small_pieces, last):
    path = tmp_path / "a.txt"
    path.write_text(f"--\none -- two\n\n--\r\n--\nthree {'four ' * 20}{last}")
    first, second = documents(path, separator="--")
    assert first == "one -- two\n\n"
    assert second.rstrip() == f"three {'four ' * 20}".rstrip()


@given(
    text=st.text(alphabet=st.sampled_from("aé 漢1!'s\n\t  "), max_size=200), size=st.integers(2, 30)
)
@settings(max_examples=300, deadline=None)
def test_split_text_has_the_tokens_of_the_whole_text(text, size, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "cut"
    tokenizer = open_tokenizer(TokenizerChoice("gpt2", bpe_folder=tiny_bpe(folder)))
    path = folder / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_documents, "PIECE_CHARACTERS", size)
        patch.setattr(text_documents, "BLOCK_BYTES", size // 2)
        cut = [piece.text for piece in pieces(Span(path), TextReading())]
    ids = [int(one) for text in cut for one in tokenizer.encode(text)]
    assert ids == tokenizer.encode(text).tolist()


def test_text_that_cannot_be_split_has_a_limit(tmp_path, small_pieces, monkeypatch):
    monkeypatch.setattr(text_documents, "MAX_DOCUMENT_CHARACTERS", 100)
    path = tmp_path / "a.txt"
    path.write_text("some words " * 20)
    assert documents(path) == ["some words " * 20]
    assert "--separator" in refused(path, cuts_at_spaces=False)
    assert "Leave out --separator" in refused(path, separator="--")


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_rows_are_documents(tmp_path, suffix):
    texts = [*random_texts(30), "", "last"]
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        write_parquet(path, [*texts, None], field="body")
        parts = [text for at in range(4) for text in documents(path, at, at + 1, field="body")]
        assert parts == [text for text in texts if text]
        assert "it has body" in refused(path)
        number = write_parquet(tmp_path / "b.parquet", [1, 2], field="score")
        assert "holds int64" in refused(number, field="score")
    else:
        write_jsonl(path, texts, field="body")
    assert documents(path, field="body") == [text for text in texts if text]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50, 400])
def test_spans_of_a_jsonl_hold_each_line_once(tmp_path, parts):
    texts = random_texts(20)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    step = path.stat().st_size // parts + 1
    starts = range(0, path.stat().st_size, step)
    assert [text for at in starts for text in documents(path, at, at + step)] == texts
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert documents(path) == texts


def test_bad_lines_are_named_by_their_place(tmp_path):
    path = tmp_path / "a.jsonl"
    for line, said in (
        ("{", "not JSON"),
        ('{"body": "a"}', "it has body"),
        ('{"text": 3}', "no text under 'text'"),
        ('["text"]', "no names"),
        ("[" * 100_000, "not JSON"),
    ):
        path.write_text('{"text": "a"}\n' + line)
        message = refused(path)
        assert f"{path}, the line at byte 14" in message
        assert said in message


def test_invalid_unicode_is_refused_or_replaced(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good " * 60_000 + b"b\xffd")
    assert "not UTF-8 at byte 300,001" in refused(path)
    assert documents(path, bad_text="replace")[0].endswith("b\ufffdd")
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "b\xffd"}\n{"text": "h\\ud83dlf"}\n{"text": "\\ud83d\\ude42"}')
    assert "--bad-text replace" in refused(path)
    assert documents(path, bad_text="replace") == ["b\ufffdd", "h\ufffdlf", "\U0001f642"]
    path.write_bytes(b'{"text": "h\\ud83dlf"}')
    assert "a lone surrogate at character 1" in refused(path)


def test_damaged_files_are_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl.gz", random_texts(500))
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot be read completely" in refused(path)
    path.write_bytes(b"no gzip")
    assert "the line at byte 0: it is not JSON" in refused(path)
    broken = bytearray(gzip.compress(b'{"text": "abcdefgh"}\n' * 100))
    broken[20] ^= 0xFF
    path.write_bytes(bytes(broken))
    assert str(path) in refused(path)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 no parquet")
    assert "parquet file cannot be read" in refused(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)  # not installed
        assert f"Install it: {sys.executable} -m pip install pyarrow" in refused(path)


@pytest.mark.long
def test_the_recipe_of_the_guide_removes_duplicates(tmp_path):
    for module in ("datatrove", "orjson", "spacy", "xxhash"):
        pytest.importorskip(module)
    guide = (Path(__file__).parents[2] / "docs/guides/your_data.md").read_text()
    script = tmp_path / "deduplicate.py"
    script.write_text(guide.partition("```python\n")[2].partition("```")[0])
    texts = [f"{number} {text}" for number, text in enumerate(random_texts(40, words=900))]
    texts = [text for text in texts if len(text) > 1500]
    near = [text[:700] + " changed" + text[700:] for text in texts[:5]]
    write_jsonl(tmp_path / "texts" / "1.jsonl", [*texts, texts[7]])
    write_jsonl(tmp_path / "texts" / "2.jsonl", [*near, *texts[8:11]])
    folders = [tmp_path / name for name in ("texts", "clean", "work")]
    subprocess.run([sys.executable, script, *folders], check=True, capture_output=True)
    once, clean = (
        [json.loads(line)["text"] for path in folder.iterdir() for line in path.open()]
        for folder in (tmp_path / "work" / "once", tmp_path / "clean")
    )
    assert sorted(once) == sorted([*texts, *near])
    assert len(clean) == len(texts)
    assert set(texts[5:]) <= set(clean) <= {*texts, *near}
