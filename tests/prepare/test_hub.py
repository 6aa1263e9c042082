"""Data sets of the hub: requests, redirects to the storage host, and a hub that fails."""

import itertools
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data.text_samples import random_texts
from hub_site import DATASET, HubSite, hub_site, parquet_bytes
from huggingface_hub import constants
from prepare.test_tokenize import make

from refocused.prepare.texts import text_inputs
from refocused.prepare.texts.text_inputs import find_inputs, plan_tasks
from refocused.system.errors import BucketError, RefocusedError, ShardError

ADDRESS = f"hub:{DATASET}:sample/10BT"
FILES, GROUPS, GROUP = 4, 6, 10  # row groups of a file, rows of a group


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubSite]:
    with hub_site() as site:
        hub = site.environment["HF_ENDPOINT"]
        monkeypatch.setattr(constants, "ENDPOINT", hub)
        template = f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("SLURM_PROCID", "0")  # for tasks in this process
        monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
        monkeypatch.setattr(text_inputs, "HUB_SECONDS", 0.3)
        for number in range(FILES):
            texts = random_texts(GROUPS * GROUP, seed=number)
            name = f"sample/10BT/{number:03d}_00000.parquet"
            site.files[DATASET][name] = parquet_bytes(texts, rows=GROUP)
        site.files[DATASET]["README.md"] = b"about"
        (group,) = {task.bytes for task in planned(monkeypatch, 1)[:1]}
        monkeypatch.setattr(text_inputs, "TASK_BYTES", 2 * group)
        site.forget()
        yield site


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that huggingface_hub would wait between its tries."""
    seconds: list[float] = []
    clock = types.SimpleNamespace(sleep=seconds.append)
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
    return seconds


def planned(monkeypatch: pytest.MonkeyPatch, task_bytes: int) -> list[Any]:
    monkeypatch.setattr(text_inputs, "TASK_BYTES", task_bytes)
    return plan_tasks(find_inputs([ADDRESS]))


def tokenized(out: Path, address: str = ADDRESS) -> str:
    """Tokenize in this process, as a new attempt; return the fingerprint."""
    os.environ["SLURM_RESTART_COUNT"] = str(int(os.environ["SLURM_RESTART_COUNT"]) + 1)
    return make(address, out, executor="slurm").manifest.fingerprint


def plain(site: HubSite, folder: Path) -> str:
    """Return the fingerprint of the same files from a folder."""
    for name, content in site.files[DATASET].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return tokenized(folder / "out", str(folder / "sample/10BT"))


def test_a_row_group_is_one_request_and_a_task_opens_a_file_once(
    site: HubSite, tmp_path: Path
) -> None:
    tasks = plan_tasks(find_inputs([ADDRESS]))
    groups = [(span.start, span.end) for task in tasks for span in task.spans]
    assert len(tasks) > FILES and len(groups) < 0.7 * FILES * GROUPS
    site.forget()
    fingerprint = tokenized(tmp_path / "hub")
    opened = site.count("storage") - FILES * GROUPS  # footers: of the plan, and of each span
    assert opened <= 2 * (FILES + len(groups)) + FILES
    assert fingerprint == plain(site, tmp_path / "plain")


KINDS = ("info", "tree", "resolve", "storage")
FAULTS = ("503", "429", "close", "hang")


@pytest.mark.parametrize(("kind", "fault"), [*itertools.product(KINDS, FAULTS), ("storage", "cut")])
def test_a_request_that_fails_twice_is_sent_again(
    site: HubSite, waits: list[float], kind: str, fault: Any, tmp_path: Path
) -> None:
    site.script(kind, fault, after=1 if kind in ("resolve", "storage") else 0, times=2)
    fingerprint = tokenized(tmp_path / "hub")
    # After `Retry-After` a second more, else 1 s, then 2 s.
    assert waits == ([2.0, 2.0] if fault == "429" else [1, 2])
    assert fingerprint == plain(site, tmp_path / "plain")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hub_that_stops_answering_is_one_sentence_and_the_command_continues(
    site: HubSite, waits: list[float], fault: Any, tmp_path: Path
) -> None:
    plan_tasks(find_inputs([ADDRESS]))
    opening = site.count("storage")
    site.forget()
    site.script("storage", fault, after=opening + 12, times=6)
    with pytest.raises(BucketError) as failed:
        tokenized(tmp_path / "hub")
    (sentence,) = str(failed.value).splitlines()
    assert sentence.startswith(f"hub:{DATASET}@") and ".parquet: " in sentence
    assert sentence.endswith("Check the name, HF_TOKEN and the connection.")
    assert len(waits) == 5  # six tries
    kept = site.count("storage") - opening - 6
    site.forget()
    fingerprint = tokenized(tmp_path / "hub")
    again = site.count("storage")
    site.forget()
    tokenized(tmp_path / "other")
    assert again < site.count("storage") - kept / 2  # finished tasks are kept
    assert fingerprint == plain(site, tmp_path / "plain")


@pytest.mark.parametrize("kind", ["info", "tree"])
def test_a_list_that_never_comes_ends_in_one_sentence(
    site: HubSite, waits: list[float], kind: str
) -> None:
    site.script(kind, "hang", times=6)
    with pytest.raises(BucketError, match=rf"^hub:{DATASET}: .*Check the name, HF_TOKEN and the"):
        find_inputs([ADDRESS])
    assert len(waits) == 5
    assert len(find_inputs([ADDRESS])) == FILES  # which is two pages of the list


@pytest.mark.parametrize(
    ("listed", "error", "message"),
    [
        (True, BucketError, r"001_00000.parquet: [\d,]+ of [\d,]+ bytes received from byte"),
        (False, ShardError, r"001_00000.parquet: the parquet file cannot be read \(.*Download it"),
    ],
)
def test_a_truncated_file_is_named(
    site: HubSite, waits: list[float], tmp_path: Path, listed: bool, error: Any, message: str
) -> None:
    name = "sample/10BT/001_00000.parquet"
    whole = site.files[DATASET][name]
    site.files[DATASET][name] = whole[: len(whole) * 2 // 3]
    if listed:  # the storage lacks what the list has
        site.listed_sizes[name] = len(whole)
    with pytest.raises(RefocusedError, match=message) as failed:
        tokenized(tmp_path / "hub")
    assert isinstance(failed.value, error) and len(str(failed.value).splitlines()) == 1
    site.files[DATASET][name] = whole
    site.listed_sizes.clear()
    assert tokenized(tmp_path / "hub") == plain(site, tmp_path / "plain")
