"""The code of a model of our own families, written beside its weights: one file for transformers.

It is made of the modules that train the model, so that there is no second copy to maintain.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

PACKAGE = "refocused"


def add_modeling_file(config: Any, folder: Path) -> None:
    """Write the code of a model that transformers lack, and name it in its configuration.

    With `trust_remote_code=True` transformers load the model then without this package.

    Args:
        config: transformers' configuration; that of a family of transformers' own stays as it is.
        folder: Where the configuration goes.
    """
    import transformers

    name = modeling_name(config)
    if name is None:
        return
    classes = {
        "AutoConfig": type(config),
        "AutoModel": transformers.MODEL_MAPPING[type(config)],
        "AutoModelForCausalLM": transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)],
    }
    config.auto_map = {auto: f"{name}.{known.__name__}" for auto, known in classes.items()}
    (folder / f"{name}.py").write_text(modeling_source(type(config).__module__))


def modeling_name(config: Any) -> str | None:
    """Return the module that a model's code is written as; None: transformers have its code."""
    is_ours = type(config).__module__.startswith(f"{PACKAGE}.")
    return f"modeling_{config.model_type}" if is_ours else None


def modeling_source(module: str) -> str:
    """Return the source of a module with that of all it imports from this package before it.

    All modules share one namespace, so none of their names may be another's (a test compares them),
    and they must import from this package by `from refocused.x import name`, at their top.
    """
    imports: dict[str, None] = {}
    bodies: dict[str, str] = {}
    _collect(module, imports, bodies)
    head = f"The code of a model that {PACKAGE} trained, made of these of its modules:"
    title = "\n".join((f'"""{head}', "", *bodies, '"""'))
    first = "\n".join((title, "", "from __future__ import annotations", "", *sorted(imports)))
    return re.sub(r"\n{4,}", "\n\n\n", "\n\n\n".join((first, *bodies.values()))) + "\n"


def _collect(module: str, imports: dict[str, None], bodies: dict[str, str]) -> None:
    """Add a module's imports from elsewhere, and its other lines behind those that it builds on."""
    if module in bodies:
        return
    source = inspect.getsource(importlib.import_module(module))
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for number in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[number] = ""
        origin = str(getattr(node, "module", ""))
        if origin.startswith(f"{PACKAGE}."):
            _collect(origin, imports, bodies)
        elif origin != "__future__":
            imports[ast.unparse(node)] = None
    bodies[module] = "\n".join(lines).strip()
