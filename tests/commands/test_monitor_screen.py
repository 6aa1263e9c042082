import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from monitor.watched_run import GPU, new_run

from refocused.commands.monitor import open_in_screen, session_name
from refocused.system.processes import this_process

SCREEN = shutil.which("screen")
needs_screen = pytest.mark.skipif(SCREEN is None, reason="screen is not installed")


@pytest.fixture
def sockets(tmp_path, monkeypatch):
    """A place of its own for sessions, all of which end with the test."""
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("SCREENDIR", str(folder))
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    yield folder
    for session in folder.iterdir():
        subprocess.run(["screen", "-S", session.name, "-X", "quit"], check=False)


def install(folder, script):
    """Put a stand-in for screen into a folder."""
    tool = folder / "screen"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def attached_to(name, *, until):
    """Open a session as a person's terminal does, and return what comes until that is enough."""
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("screen", ["screen", "-U", "-r", name], {**os.environ, "TERM": "xterm"})
    received, ends = b"", time.monotonic() + 30
    while not until(received.decode(errors="ignore")) and time.monotonic() < ends:
        if select.select([terminal], [], [], 0.2)[0]:
            received += os.read(terminal, 65536)
    os.close(terminal)  # the terminal is closed: the session goes on, detached
    os.waitpid(process, 0)
    return received.decode(errors="ignore")


def has_curve(text):
    return any(0x2800 < ord(sign) < 0x2900 for sign in text)


def seen_in(name, file, *, size):
    """Return the characters that a session shows, in a sequence of so many."""
    width, height = size
    file.unlink(missing_ok=True)
    for command in (["width", "-w", str(width), str(height)], ["hardcopy", str(file)]):
        subprocess.run(["screen", "-U", "-S", name, "-X", *command], check=True)
        time.sleep(0.3)
    return file.read_text(errors="replace").splitlines() if file.exists() else []


@needs_screen
@pytest.mark.slow
def test_a_session_shows_the_run_from_before_its_beginning_to_its_end(tmp_path, sockets):
    folder, copy = tmp_path / "runs" / "one", tmp_path / "copy"
    name = session_name(folder)
    assert f"screen -U -r {name} shows {folder}" in open_in_screen(folder)
    assert "already open" in open_in_screen(folder)
    assert len(list(sockets.iterdir())) == 1

    def wait_for(words):
        for _ in range(100):
            lines = seen_in(name, copy, size=(80, 24))
            if any(words in line for line in lines):
                return lines
        raise AssertionError(f"{words!r} is not among:\n" + "\n".join(lines))

    wait_for("STARTING")
    run = new_run(tmp_path / "runs")
    run.begin(pid=this_process().pid, pid_started=this_process().started)
    run.gpus(GPU)
    lines = wait_for("TRAINING")
    assert any("0    97%    48.4/79.6" in line for line in lines)
    assert has_curve(attached_to(name, until=has_curve))
    run.state(step=2000, status="finished", exit_code=0)
    wait_for("FINISHED")
    subprocess.run(["screen", "-S", name, "-X", "stuff", "q"], check=True)
    for _ in range(100):
        if not list(sockets.iterdir()):
            return
        time.sleep(0.1)
    raise AssertionError("the session did not end")


@pytest.mark.parametrize(
    ("stand_in", "told"),
    [
        (None, "screen is not installed"),
        ("echo Cannot make directory; exit 1", "screen failed (Cannot make directory)"),
        ("exit 3", "screen failed (exit 3)"),
    ],
)
def test_a_screen_that_does_not_open_is_one_line(tmp_path, monkeypatch, stand_in, told):
    if stand_in is not None:
        install(tmp_path, stand_in)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = open_in_screen(Path("runs/one"))
    assert told in said and "Training continues" in said and "\n" not in said


def test_screen_is_told_to_speak_utf8_and_what_to_watch(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    install(tmp_path, f'echo "$LC_ALL" "$@" >> {tmp_path}/said')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    run = Path("runs") / "a b"
    open_in_screen(run)
    listed, opened = (tmp_path / "said").read_text().splitlines()
    assert listed == f"C -ls {session_name(run)}"
    assert opened.startswith(f"C.UTF-8 -U -T screen-256color -dmS {session_name(run)} ")
    assert opened.endswith(f"--wait {run.absolute()}")


def test_every_run_has_a_session_of_its_own(tmp_path):
    assert re.fullmatch(r"monitor-gpt2-1b_v2-[0-9a-f]{6}", session_name(Path("runs/gpt2-1b.v2")))
    assert len(session_name(Path("x" * 200))) < 64
    here, there = tmp_path / "here" / "runs" / "one", tmp_path / "there" / "runs" / "one"
    assert session_name(here) != session_name(there)
    assert session_name(tmp_path / "a b") != session_name(tmp_path / "a_b")
    here.mkdir(parents=True)
    (tmp_path / "link").symlink_to(here)
    assert session_name(tmp_path / "link") == session_name(here)  # one run, however it is named
