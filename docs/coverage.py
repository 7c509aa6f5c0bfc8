"""Fails the documentation's build on a public name that a reader could not find.

A step of the build (docs/build.py), and a test (tests/programs/test_docs.py). Public are the names
in the `__all__` of every package and module whose dotted name has no underscore.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PACKAGES = ("manifoldmuon", "manifoldmuon_verify")
_LISTED = re.compile(r"^::: +(\S+)", re.MULTILINE)


def problems(root: Path = ROOT) -> list[str]:
    """One line for each public name that has no docstring or is on no page, and the reverse."""
    found, public = [], set()
    for name in PACKAGES:
        if (root / name).is_dir():
            lines, names = _gaps(name, root)
            found += lines
            public |= names
    pages = listed(root)
    found += [f"{path} is on no page of docs/api" for path in sorted(public - set(pages))]
    found += [f"{pages[path]} lists {path}, not a public name" for path in set(pages) - public]
    return found


def _gaps(name: str, root: Path) -> tuple[list[str], set[str]]:
    """Lines about what a package lacks, and its public names."""
    package = griffe.load(name, search_paths=[root], try_relative_path=False, resolve_aliases=True)
    assert isinstance(package, griffe.Module)
    found, public = [], set()
    for module in _public_modules(package):
        if module.exports is None:
            found.append(f"{module.path} has no __all__")
        if not module.has_docstring:
            found.append(f"{module.path} has no docstring")
        for exported in _exported(module):
            path = f"{module.path}.{exported}"
            public.add(path)
            if not module[exported].has_docstring:
                found.append(f"{path} has no docstring")
    return found, public


def _public_modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for name, inner in module.modules.items():
        if not inner.is_alias and not name.startswith("_"):
            yield from _public_modules(inner)


def _exported(module: griffe.Module) -> list[str]:
    """The names in `__all__` except modules, which have pages of their own, and `__version__`."""
    names = [str(name) for name in module.exports or []]
    return [name for name in names if not name.startswith("__") and not module[name].is_module]


def listed(root: Path) -> dict[str, str]:
    """The names on the pages of docs/api, each with its page."""
    pages = sorted((root / "docs" / "api").glob("*.md"))
    return {
        name: page.name
        for page in pages
        for name in _LISTED.findall(page.read_text(encoding="utf-8"))
    }
