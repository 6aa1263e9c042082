"""The console command: its commands, its completion scripts, and how messages spell commands."""

import io
import shutil
import subprocess
import sys

import pytest
from ranks import ROOT

from refocused import __version__
from refocused.commands import main, train
from refocused.commands.launch import Launches
from refocused.config.load_run import load_run


def refocused(*words):
    """Return the exit code of `refocused WORDS`, and what it printed."""
    command = [sys.executable, "-m", "refocused", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_characters_that_the_output_cannot_show_are_escaped(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(main, "_module", lambda _name: Writer)
    assert main.run_command("launch", []) == 0
    out.flush()
    assert out.buffer.getvalue() == b"\xe9 \\u6f22\n"  # type: ignore[attr-defined]


class Writer:
    @staticmethod
    def main(_given):
        print("\xe9 \u6f22")
        return 0


def test_every_script_is_a_command():
    scripts = {path.stem for path in (ROOT / "launch").glob("*.py")}
    assert scripts | {"launch"} <= set(main.COMMANDS)
    code, listed = refocused("--help")
    assert code == 0 and all(f"\n  {name} " in listed for name in main.COMMANDS)
    assert refocused("--version") == (0, f"refocused {__version__}\n")
    hint = "hint: refocused --help lists the commands.\n"
    unknown = f"error: unknown command 'trian'. Did you mean train?\n{hint}"
    assert refocused("trian") == (2, unknown)
    assert refocused("--completion", "tcsh") == (
        2,
        f"error: unknown option '--completion tcsh'.\n{hint}",
    )
    # A launcher's option comes before the command, whose name may have a dash.
    code, printed = refocused("--local_rank=0", "prepare-data", "--help")
    assert code == 0 and "tokenize" in printed


WORDS = {
    "refocused check": "checkpoints",
    "refocused checkpoints ver": "verify",
    "refocused launch --rest": "--restarts",
    "refocused train --config gpt2_124": "gpt2_124m",
    "refocused evaluate comp": "compare",
}
BASH = """source {script}
COMP_WORDS=($1) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
function=$(complete -p refocused | grep -o '_[a-z_]*')
$function refocused "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD - 1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
FISH = "source {script}; complete -C $argv[1] | string split -f 1 \\t"


@pytest.mark.parametrize("shell", main.SHELLS)
def test_a_shell_completes_commands_verbs_options_and_runs(tmp_path, shell):
    script = tmp_path / "script"
    code, printed = refocused("--completion", shell)
    assert code == 0
    script.write_text(printed)
    assert all(word in printed for word in WORDS.values())
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", script], check=True)
    program = {"bash": BASH, "fish": FISH}.get(shell, "").format(script=script)
    for typed, word in WORDS.items() if program else ():
        command = ["bash", "-c", program, "bash", typed]
        if shell == "fish":
            command = ["fish", "-c", program, typed]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.split() == [word], done.stderr


@pytest.mark.parametrize("started", ["bin/refocused", "site-packages/refocused/__main__.py"])
def test_messages_of_the_console_command_name_no_script(monkeypatch, started):
    monkeypatch.setattr(train.shutil, "which", str)
    monkeypatch.setattr(sys, "argv", [f"/v/{started}", "train", "--config", "demo"])
    for ranks, command in {
        1: "refocused train",
        2: "deepspeed --num_gpus 2 --module refocused train",
    }.items():
        found = train.resume_command(["--config", "demo"], ranks=ranks, ranks_here=ranks)
        assert found == f"{command} --config demo"
    launches = Launches(load_run("demo"), 0, ["--spot"], [], 1.0, 0.0)
    assert launches.resume_command == "refocused launch --spot"
