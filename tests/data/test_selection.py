from __future__ import annotations

import pytest
from shard_samples import settings

from refocused.data.formats.object_names import matches
from refocused.data.manifest.select_files import chosen_names, is_validation
from refocused.system.errors import BucketError, ShardError

NAMES = ["README.txt", "a/b/x.npz", "c/b/x.npz", "t_0.npy", "t_1.npy", "val_0.npy", "z.json"]


def chosen(names: list[str], **changes: object) -> list[str]:
    return chosen_names(names, data=settings(**changes), url="gs://tokens")


def test_every_known_form_at_any_depth_is_taken_in_name_order() -> None:
    assert chosen(NAMES[::-1]) == ["a/b/x.npz", "c/b/x.npz", "t_0.npy", "t_1.npy", "val_0.npy"]


def test_patterns_fit_the_whole_name_or_its_last_part() -> None:
    assert matches("a/b/x.npz", ["x.*"])
    assert matches("a/b/x.npz", ["a/*"])
    assert not matches("a/b/x.npz", ["b/*"])
    assert chosen(NAMES, include=["x.npz"], exclude=["c/*"]) == ["a/b/x.npz"]


def test_max_files_counts_training_files_alone() -> None:
    data = {"validation_files": ["val_*"], "max_files": 1}
    assert chosen(NAMES, **data) == ["a/b/x.npz", "val_0.npy"]
    assert chosen(NAMES, include=["t_*"], **data) == ["t_0.npy", "val_0.npy"]
    assert is_validation("val_0.npy", settings(validation_files=["val_*"]))


@pytest.mark.parametrize("key", ["include", "validation_files"])
def test_a_pattern_that_fits_nothing_is_named(key: str) -> None:
    with pytest.raises(ShardError, match="'nothing_\\*'"):
        chosen(NAMES, **{key: ["nothing_*"]})


def test_no_token_files_names_the_source_and_what_was_looked_for() -> None:
    for names in ([], ["z.json"]):
        with pytest.raises(ShardError, match=r"gs://tokens: no token files.*\*\.npz"):
            chosen(names)


def test_text_alone_is_sent_to_tokenize() -> None:
    with pytest.raises(ShardError, match=r"a\.parquet: this is text.*prepare_data tokenize"):
        chosen(["a.parquet", "z.json"])


def test_text_that_is_asked_for_is_refused() -> None:
    with pytest.raises(ShardError, match=r"README\.txt: this is text"):
        chosen(NAMES, include=["*"])


def test_megatron_pairs_are_refused_unless_left_out() -> None:
    names = ["g_text.bin", "g_text.idx", "train.bin"]
    with pytest.raises(ShardError, match=r"g_text\.bin: .*Megatron"):
        chosen(names)
    assert chosen(names, exclude=["g_text.*"]) == ["train.bin"]


def test_names_that_leave_the_folder_are_refused() -> None:
    with pytest.raises(BucketError, match="outside its folder"):
        chosen(["../x.npy"])


def test_objects_that_would_be_one_local_shard_are_refused() -> None:
    with pytest.raises(BucketError, match=r"'a//x\.npy' and 'a/x\.npy' cannot both be files"):
        chosen(["a/x.npy", "a//x.npy"])
    assert chosen(["a/x.npy", "a//x.npy"], exclude=["a//*"]) == ["a/x.npy"]
