"""Thumbnails of the pictures in the gallery, docs/examples.md; their names are `origin-name`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

_ROOT = Path(__file__).parents[1]
_FOLDERS = {
    "lab": _ROOT / "docs" / "lab" / "results",
    "benchmarks": _ROOT / "docs" / "benchmarks" / "results",
    "studies": _ROOT / "studies" / "results",
}
_WIDEST = 640  # twice the size in the gallery, for high-resolution screens


def pictures() -> Iterator[tuple[str, Path]]:
    """Yield the name and picture of each thumbnail; for a tutorial, its last picture."""
    for origin, folder in _FOLDERS.items():
        yield from ((f"{origin}-{path.name}", path) for path in sorted(folder.glob("*.png")))
    tutorials = _ROOT / "docs" / "tutorials"
    for source in sorted(tutorials.glob("*.py")):
        found = tutorials.glob(f"{source.stem}-*.svg")
        for path in sorted(found, key=lambda path: int(path.stem.rsplit("-", 1)[1]))[-1:]:
            yield f"tutorial-{source.stem}.svg", path


def write(to: Path) -> None:
    """Empty the folder, then write the thumbnails that the gallery shows."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    gallery = (_ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for name, path in pictures():
        if f"thumbnails/{name})" not in gallery:
            continue
        if path.suffix == ".svg":
            shutil.copy(path, to / name)
            continue
        with Image.open(path) as picture:
            picture.thumbnail((_WIDEST, _WIDEST))
            picture.convert("RGB").quantize(64).save(to / name, optimize=True)
