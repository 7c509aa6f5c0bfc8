"""Annotations of arguments on the API pages: types without the checks that they carry."""

import ast
from pathlib import Path
from typing import Any

import griffe

ARGUMENTS = Path(__file__).parents[1] / "manifoldmuon" / "_internal" / "arguments.py"


def kind_of(node: ast.expr) -> str | None:
    """Return the type in `Annotated[type, check]`; None for another expression."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated":
        assert isinstance(node.slice, ast.Tuple)
        return ast.unparse(node.slice.elts[0])
    return None


def aliases() -> dict[str, str]:
    """Return the types behind the names that `arguments.py` gives to annotations."""
    found = {}
    for node in ast.parse(ARGUMENTS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and (kind := kind_of(node.value)):
            found[ast.unparse(node.targets[0])] = kind
    return found


class PlainAnnotations(griffe.Extension):
    """Replace each checked annotation by its type."""

    def __init__(self):
        self.aliases = aliases()

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Replace the annotations of a function."""
        for parameter in func.parameters:
            text = str(parameter.annotation)
            whole = text.removesuffix(" | None")
            own = self.aliases.get(whole.removeprefix("arguments."))
            if kind := own or kind_of(ast.parse(whole, mode="eval").body):
                parameter.annotation = kind + text.removeprefix(whole)
