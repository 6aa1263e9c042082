"""What prepared data was made of and how: written first, compared before anything is added."""

from __future__ import annotations

import json
from collections.abc import Mapping

from refocused.bucket.bucket import Bucket
from refocused.system.errors import ShardError
from refocused.system.strict_json import MalformedError, parse_json_object

RECIPE_NAME = "recipe.json"


def check_recipe(bucket: Bucket, recipe: Mapping[str, object]) -> None:
    """Write the recipe into an empty bucket, or find the same one there.

    Raises:
        ShardError: The bucket holds something else, or what another recipe made.
    """
    text = json.dumps(recipe, indent=1)
    if bucket.info(RECIPE_NAME) is None:
        _check_empty(bucket)
        bucket.write(RECIPE_NAME, text.encode())
        return
    try:
        there = parse_json_object(bucket.read(RECIPE_NAME))
    except MalformedError as error:
        raise ShardError(
            f"{bucket.url}: its {RECIPE_NAME} is no JSON object ({error}). Name an empty place."
        ) from None
    wanted = json.loads(text)
    for key in {**there, **wanted}:
        if there.get(key) != wanted.get(key):
            raise ShardError(
                f"{bucket.url}: it holds data that were made otherwise: {_difference(key, there)} "
                f"there, {_difference(key, wanted)} now. Name an empty place, or the same "
                "command as then."
            )


def _check_empty(bucket: Bucket) -> None:
    first = next(iter(bucket.list()), None)
    if first is not None:
        raise ShardError(
            f"{bucket.url}: it is not empty; it holds {first.name}. Name an empty place: shards of "
            "two data sets must not mix."
        )


def _difference(key: str, recipe: Mapping[str, object]) -> str:
    value = recipe.get(key)
    if isinstance(value, list):
        return f"{len(value):,} {key}"
    return f"{key} = {value!r}"
