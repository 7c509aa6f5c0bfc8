"""Thumbnails of all pictures, for the gallery docs/examples.md; their names are `origin-name`.

The gallery includes `more.txt`, which lists thumbnails that the gallery does not name.
"""

import shutil
from collections.abc import Iterable, Iterator
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


def more(gallery: str, names: Iterable[str]) -> str:
    """Return gallery entries for files that the gallery does not name."""
    missing = [name for name in names if f"thumbnails/{name})" not in gallery]
    words = {name: Path(name).stem.partition("-")[2].replace("-", " ") for name in missing}
    return "".join(f"* ![{words[name]}](thumbnails/{name})<br>{words[name]}\n" for name in missing)


def write(to: Path) -> None:
    """Empty the folder, then write all thumbnails and `more.txt`."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for name, path in pictures():
        if path.suffix == ".svg":
            shutil.copy(path, to / name)
            continue
        with Image.open(path) as picture:
            picture.thumbnail((_WIDEST, _WIDEST))
            picture.convert("RGB").quantize(64).save(to / name, optimize=True)
    gallery = (_ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    left = more(gallery, (name for name, _ in pictures()))
    (to / "more.txt").write_text(left, encoding="utf-8")
