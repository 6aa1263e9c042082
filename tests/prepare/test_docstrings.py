import json
import sysconfig

import pytest

from refocused.commands.main import run_command
from refocused.prepare.texts import docstrings as module
from refocused.prepare.texts.docstrings import docstrings
from refocused.system.errors import ExitCode, ShardError

LONG = " ".join(["Return what is asked for."] * 5)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two folders of packages in place of the installed ones."""
    paths = {name: tmp_path / name for name in ("stdlib", "purelib")}
    for folder in paths.values():
        folder.mkdir()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {k: str(v) for k, v in paths.items()})
    return paths


def test_documents_are_the_prose_of_docstrings(packages):
    other = LONG.replace("Return", "Delete")
    source = f"""def f():
    r'''{LONG}

    Args: number: {LONG} {LONG.replace(" ", "_")}

    {LONG.replace(". ", f".{chr(10)}    ").replace("Return", "Take")}

    Too short.

    {LONG.replace("Return", "Give")} ---- ---

    {LONG.lower()}
    '''
    x = '''{LONG.replace("Return", "Never")}'''
"""
    (packages["stdlib"] / "a.py").write_text(source)
    (packages["purelib"] / "latin.py").write_bytes(b'"""\xe9' + b"x" * 300 + b'"""')
    assert list(docstrings(10**6)) == [f"{LONG}\n\n{LONG.replace('Return', 'Take')}"]
    (packages["purelib"] / "b.py").write_text(f'"""{LONG}\n\n{other}"""')
    assert sum(text.count(LONG) for text in docstrings(10**6)) == 1  # each paragraph once
    assert any(other in text for text in docstrings(10**6))


def test_the_order_mixes_folders_and_ends_at_the_limit(packages):
    for folder in packages.values():
        for number in range(40):
            text = LONG.replace("Return", f"{folder.name.title()} {chr(97 + number % 26) * 9}")
            text = text.replace("asked", "asked" if number < 26 else "told")
            (folder / f"{folder.name}{number}.py").write_text(f'"""{text}"""')
    texts = list(docstrings(10**6))
    assert len(texts) == 80 and min(map(len, texts)) > 99
    assert {text.split()[0] for text in texts[:20]} == {"Stdlib", "Purelib"}
    few = list(docstrings(2 * len(texts[0])))
    assert few == texts[: len(few)] and 2 <= len(few) <= 3


def test_packages_without_source_are_reported(packages):
    with pytest.raises(ShardError, match=r"no docstrings .*--data"):
        list(docstrings(100))


def test_the_key_changes_with_a_package(monkeypatch):
    before = module.docstrings_key()
    assert before == module.docstrings_key()
    monkeypatch.setattr(module.metadata, "distributions", lambda: [])
    assert module.docstrings_key() != before


def test_the_verb_writes_json_lines_once(packages, tmp_path, capsys):
    (packages["stdlib"] / "a.py").write_text(f'"""{LONG}"""')
    out = tmp_path / "new" / "texts.jsonl"
    assert run_command("prepare_data", ["docstrings", str(out)]) == ExitCode.OK
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == [LONG]
    assert "1 docstring of the installed packages" in capsys.readouterr().out
    assert run_command("prepare_data", ["docstrings", str(out)]) == ExitCode.WRONG_USE
    assert "exists. Name a new file." in capsys.readouterr().err
