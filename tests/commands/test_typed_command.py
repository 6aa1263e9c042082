from __future__ import annotations

import pytest

from refocused.commands.train import resume_command

ARGUMENTS = ["--local_rank=0", "--config", "demo"]


@pytest.mark.parametrize(
    "request_",
    [
        ["--resume", "100"],
        ["--resume=none"],
        ["--res", "best"],
        ["--resume"],
        ["--resume_from_checkpoint", "runs/a/checkpoint_step_5"],
        [],
    ],
)
def test_the_resume_command_does_not_go_back_again(request_: list[str]) -> None:
    typed = ["--local_rank=0", "--config", "demo", *request_, "--run", "a b", "run.steps=9"]
    assert resume_command(typed, ranks=2, ranks_here=2) == (
        "deepspeed --num_gpus 2 launch/train.py --config demo --run 'a b' run.steps=9"
    )


@pytest.mark.parametrize(
    ("ranks", "here", "expected"),
    [
        (1, 1, "python launch/train.py --config demo"),
        (8, 8, "deepspeed --num_gpus 8 launch/train.py --config demo"),
        (16, 8, "deepspeed --hostfile FILE launch/train.py --config demo"),
    ],
)
def test_without_the_deepspeed_command_it_is_made_from_the_ranks(
    ranks: int, here: int, expected: str
) -> None:
    assert resume_command(ARGUMENTS, ranks=ranks, ranks_here=here) == expected


@pytest.mark.parametrize(
    ("runner", "environment", "expected"),
    [
        (
            ["/v/bin/python", "/v/bin/deepspeed", "--include", "localhost:2,3", "launch/train.py"],
            {"PATH": "/bin"},
            "deepspeed --include localhost:2,3 launch/train.py",
        ),
        (
            ["python", ".venv/bin/deepspeed", "launch/train.py", "--resume", "5", "--run", "a b"],
            {"CUDA_VISIBLE_DEVICES": "4,5"},
            "CUDA_VISIBLE_DEVICES=4,5 .venv/bin/deepspeed launch/train.py --run 'a b'",
        ),
        (["bash", "-c", "sleep 1"], {}, "deepspeed --num_gpus 2 launch/train.py --config demo"),
    ],
)
def test_it_is_what_was_typed_where_that_can_be_seen(
    runner: list[str], environment: dict[str, str], expected: str
) -> None:
    assert (
        resume_command(ARGUMENTS, ranks=2, ranks_here=2, runner=runner, environment=environment)
        == expected
    )
