"""Find public names that the documentation lacks.

Used by the build (docs/build.py) and by a test (tests/programs/test_docs.py). Public names are
listed in the `__all__` of a package or module, with no underscore at the start of any part of its
dotted name.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PACKAGES = ("manifoldmuon", "manifoldmuon_verify")
_LISTED = re.compile(r"^::: +(\S+)", re.MULTILINE)


def problems(root: Path = ROOT) -> list[str]:
    """Return a line for each public name without a docstring or page, each module without a
    docstring or `__all__`, and each listed name that is not public."""
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
    """Return the problems of a package, and its public names."""
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
    """Return the names in `__all__` except dunder names and modules, which have separate pages."""
    names = [str(name) for name in module.exports or []]
    return [name for name in names if not name.startswith("__") and not module[name].is_module]


def listed(root: Path) -> dict[str, str]:
    """Return the names on the pages of docs/api, each with its page."""
    pages = sorted((root / "docs" / "api").glob("*.md"))
    return {
        name: page.name
        for page in pages
        for name in _LISTED.findall(page.read_text(encoding="utf-8"))
    }
