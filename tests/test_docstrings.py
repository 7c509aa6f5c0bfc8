"""Examples in the docstrings of public names run and print the shown output."""

import doctest
import importlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import manifoldmuon as mm
from tests.test_package import public_modules

# Names that examples may use without an import, in addition to their package's public names.
PRELUDE = {"jax": jax, "jnp": jnp, "mm": mm, "np": np, "optax": optax}


def explained() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the public classes and functions with the names that their examples may use."""
    for name in public_modules()[1:]:
        module = importlib.import_module(name)
        names = {public: getattr(module, public) for public in module.__all__}
        for public, value in names.items():
            constant = value.__doc__ == type(value).__doc__ and not isinstance(value, type)
            if callable(value) and not constant:
                yield f"{name.removeprefix('manifoldmuon.')}.{public}", value, PRELUDE | names


def examples() -> dict[str, list[doctest.DocTest]]:
    """Return the examples by public name, including the examples of methods."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {name: finder.find(value, name, False, names) for name, value, names in explained()}
    return {name: tests for name, tests in found.items() if any(test.examples for test in tests)}


EXAMPLES = examples()


# Long examples of what other cases of the default suite run as well.
SLOW = (
    "contrib.ComplexStiefel", "lab.random_walk", "lab.retraction_order", "manifolds.solvers.Normal",
    "testing.check_manifold", "testing.check_slopes", "testing.check_transformation",
)  # fmt: skip


@pytest.mark.slow_except(*(name for name in EXAMPLES if name not in SLOW))
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_prints_shown_output(name):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for test in EXAMPLES[name]:
        runner.run(test, out=said.append)
        # mkdocstrings formats lines with >>> as code only in the section `Examples:`.
        assert not re.search(r"\bExample:\s+(?:.*\n+)?\s*>>>", test.docstring or ""), (
            f"{test.name}: name the section `Examples:`, or the page does not show it as code"
        )
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_every_public_function_has_an_example():
    functions = {name for name, value, _ in explained() if not isinstance(value, type)}
    assert sorted(functions - EXAMPLES.keys()) == []
