"""Check that the pages of a built site load nothing from other hosts and have no broken links.

The site may be in any folder of its host, or on a disk, so addresses are relative.
"""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes with addresses: loaded by the browser, or followed by the reader.
_LOADED = {
    "audio": "src", "embed": "src", "iframe": "src", "img": "src", "link": "href", "object": "data",
    "script": "src", "source": "src", "video": "src",
}  # fmt: skip
_FOLLOWED = {"a": "href"}


def problems(site: Path) -> list[str]:
    """Return a line for each resource loaded from another host, and for each broken link."""
    found = []
    for page in sorted(site.rglob("*.html")):
        name = page.relative_to(site).as_posix()
        for tag, address in _addresses(page.read_text(encoding="utf-8")):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if tag in _LOADED and parts.scheme != "data":
                    found.append(f"{name} loads {address}")
            elif parts.path.startswith("/"):
                found.append(f"{name} names {address} from the root of the host")
            elif parts.path and not _target(page, unquote(parts.path)).is_file():
                found.append(f"{name} names {address}, which is not there")
    return found


def _target(page: Path, path: str) -> Path:
    target = page.parent / path
    return target / "index.html" if target.is_dir() else target


def _addresses(text: str) -> Iterator[tuple[str, str]]:
    """Yield the tags with addresses, and their addresses."""
    found: list[tuple[str, str]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            key = (_LOADED | _FOLLOWED).get(tag)
            found.extend((tag, value) for name, value in attrs if name == key and value)

    Reader().feed(text)
    yield from found
