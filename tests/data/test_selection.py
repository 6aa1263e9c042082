import dataclasses

import pytest
from shard_samples import settings

from refocused.data.manifest.shard_manifest import Manifest, Shard, chosen_names
from refocused.prepare.manifest_changes import choose_validation
from refocused.system.errors import BucketError, ShardError

NAMES = ["README.txt", "a/b/x.npz", "c/b/x.npz", "t_0.npy", "t_1.npy", "val_0.npy", "z.json"]
VALIDATED = {"validation_files": ["val_*"], "max_files": 1}


@pytest.mark.parametrize(
    ("names", "data", "chosen"),
    [
        (NAMES[::-1], {}, ["a/b/x.npz", "c/b/x.npz", "t_0.npy", "t_1.npy", "val_0.npy"]),
        (NAMES, {"include": ["x.npz"], "exclude": ["c/*"]}, ["a/b/x.npz"]),
        (NAMES, {"include": ["x.*"], "exclude": ["b/*"]}, ["a/b/x.npz", "c/b/x.npz"]),
        (NAMES, VALIDATED, ["a/b/x.npz", "val_0.npy"]),  # max_files counts training files alone
        (NAMES, {"include": ["t_*"], **VALIDATED}, ["t_0.npy", "val_0.npy"]),
        (["g.bin", "g.idx", "train.bin"], {"exclude": ["g.*"]}, ["train.bin"]),
        (["a/x.npy", "a//x.npy"], {"exclude": ["a//*"]}, ["a/x.npy"]),
    ],
)
def test_token_files_are_chosen_in_name_order(names, data, chosen):
    assert chosen_names(names, data=settings(**data), url="gs://tokens") == chosen


@pytest.mark.parametrize(
    ("names", "data", "said"),
    [
        (NAMES, {"include": ["nothing_*"]}, r"'nothing_\*'"),
        (NAMES, {"validation_files": ["nothing_*"]}, r"'nothing_\*'"),
        (NAMES, {"exclude": ["*"]}, r"data\.exclude leaves none of its 7 objects"),
        ([], {}, r"gs://tokens: no token files; it holds no files\..*\*\.npz"),
        (["z.csv", "z"], {}, r"it holds 1 \.csv file, 1 other file\..*Correct data\.source"),
        (
            ["a.jsonl.gz", "b.txt", "c/d.txt", "z.json"],
            {"validation_files": ["val_*"]},  # of another run file: the texts are the problem
            r"it holds 2 \.txt files, 1 \.jsonl file, 1 \.json file\. Tokenize them: "
            r".*prepare_data\S* tokenize gs://tokens --out",
        ),
        (NAMES, {"include": ["*"]}, r"README\.txt: this is text"),
        (["g_text.bin", "g_text.idx", "train.bin"], {}, r"g_text\.bin: .*Megatron"),
    ],
)
def test_an_impossible_selection_is_refused(names, data, said):
    with pytest.raises(ShardError, match=said):
        chosen_names(names, data=settings(**data), url="gs://tokens")


def test_objects_that_would_be_one_local_shard_are_refused():
    for names, said in (
        (["a/x.npy", "a//x.npy"], r"'a//x\.npy' and 'a/x\.npy' cannot both be files"),
        (["../x.npy"], "outside its folder"),
    ):
        with pytest.raises(BucketError, match=said):
            chosen_names(names, data=settings(), url="gs://tokens")


def of_sizes(*tokens: int) -> Manifest:
    rows = (Shard(f"{n:04d}.npy", t, "uint16", 2 * t, None, None) for n, t in enumerate(tokens))
    return Manifest(tuple(rows), "x")


def test_whole_files_near_the_share_are_held_out_by_the_seed_in_any_order():
    names, tokens = choose_validation(of_sizes(*[100] * 1000), ratio=0.01, seed=0)
    assert (len(names), tokens) == (10, 1000)
    data = of_sizes(*[100] * 200)
    turned = dataclasses.replace(data, shards=data.shards[::-1])
    first = choose_validation(data, ratio=0.05, seed=1)
    assert choose_validation(turned, ratio=0.05, seed=1) == first
    assert choose_validation(data, ratio=0.05, seed=2) != first
    for seed in range(20):  # a large file is passed over
        names, _ = choose_validation(of_sizes(100_000, *[100] * 100), ratio=0.01, seed=seed)
        assert "0000.npy" not in names
        assert len(names) == 11


@pytest.mark.parametrize("tokens", [(1000,), (1000, 1000, 1000)])
def test_too_few_files_get_a_share_of_the_sequences(tokens):
    chosen = choose_validation(of_sizes(*tokens), ratio=0.01, seed=0)
    assert chosen == ([], round(0.01 * sum(tokens)))
    for ratio in (0.0, 1.0):
        with pytest.raises(ShardError, match="--val-ratio"):
            choose_validation(of_sizes(1), ratio=ratio, seed=0)
