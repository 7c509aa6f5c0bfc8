"""Add links to a built site: from `code` to the object's API entry, from entries to their source.

An ambiguous name is not linked, unless exactly one candidate is on the same page. Source files
become pages under `site/source`, so that links work offline.
"""

import html
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import griffe
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from docs import coverage

_ENTRY = re.compile(r'<h[1-6] id="(?P<name>manifoldmuon[\w.]*)" class="doc doc-heading">')
_CALL = re.compile(r"(?:mm\.|manifoldmuon\.)?(?P<name>[A-Za-z_][\w.]*)(?:\(.*\))?", re.DOTALL)
# Skipped: code blocks, links, bold text (names of arguments) and headings.
_PIECES = re.compile(
    r'(?P<skipped><(?P<tag>pre|a|b)\b.*?</(?P=tag)>)|(?P<heading><h[1-6]\b.*?</h[1-6]>)'
    r"|<code>(?P<code>[^<]+)</code>"
    r'|<span title="(?P<typed>manifoldmuon[\w.]+)">(?P<text>\w+)</span>',
    re.DOTALL,
)  # fmt: skip
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ margin: 1rem; }} {light}
.highlight pre {{ overflow-x: auto; }} .highlight :target {{ background: #ffd54f55; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #1e2129; color: #e2e4e9; }} {dark} }}
</style></head><body><h1><code>{title}</code></h1>
{body}</body></html>
"""


def write(site: Path, root: Path = coverage.ROOT) -> int:
    """Link names and sources on every page under `site`.

    Returns:
        The number of added links.
    """
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(site.rglob("*.html"))}
    entries = {mark["name"]: path for path, text in pages.items() for mark in _ENTRY.finditer(text)}
    sources = _sources(root, site)
    count = 0
    for path, text in pages.items():
        head, opening, body = text.partition("<article")
        linked, names = _link_names(path, body, entries)
        linked, files = _link_sources(path, linked, sources)
        if names + files:
            path.write_text(head + opening + linked, encoding="utf-8")
        count += names + files
    return count


def _link_names(page: Path, body: str, entries: Mapping[str, Path]) -> tuple[str, int]:
    """Link every name in API entries, and the first occurrence of each name in other text."""
    suffixes = defaultdict(set)
    for name in entries:
        parts = name.split(".")
        for i in range(1, len(parts)):
            suffixes[".".join(parts[i:])].add(name)
    entry, count, seen = "", 0, set()

    def find(text: str) -> str | None:
        mark = _CALL.fullmatch(html.unescape(text))
        found = suffixes.get(mark["name"], set()) if mark else set()
        if mark and "." not in mark["name"]:
            owner = entry if _is_class(entry) else entry.rpartition(".")[0]
            if f"{owner}.{mark['name']}" in found and _is_class(owner):
                return f"{owner}.{mark['name']}"
            methods = {name for name in found if _is_class(name.rpartition(".")[0])}
            found = {name for name in found - methods if not methods or entries[name] == page}
        if len(found) > 1:
            found = {name for name in found if entries[name] == page}
        return next(iter(found)) if len(found) == 1 else None

    def put(mark: re.Match[str]) -> str:
        nonlocal entry, count
        if mark["heading"] and (here := _ENTRY.match(mark["heading"])):
            entry = here["name"]
        if mark["code"]:
            name = find(mark["code"])
        elif mark["typed"]:  # the title names the private module of the definition
            package, _, last = mark["typed"].partition("._")
            name = f"{package}.{last.rpartition('.')[2]}"
        else:
            return mark[0]
        if not name or name not in entries or (mark["code"] and name in seen):
            return mark[0]
        if name == entry or entry.startswith(f"{name}."):
            return mark[0]
        if not entry:
            seen.add(name)
        count += 1
        inside = f"<code>{mark['code']}</code>" if mark["code"] else mark["text"]
        return f'<a href="{_relative(page, entries[name])}#{name}">{inside}</a>'

    return _PIECES.sub(put, body), count


def _is_class(name: str) -> bool:
    return name.rpartition(".")[2][:1].isupper()


def _link_sources(
    page: Path, body: str, sources: Mapping[str, tuple[Path, int]]
) -> tuple[str, int]:
    """Add a link to the source after the heading of each entry."""
    count = 0

    def put(mark: re.Match[str]) -> str:
        nonlocal count
        if mark["name"] not in sources:
            return mark[0]
        file, line = sources[mark["name"]]
        count += 1
        link = f'<a class="source" href="{_relative(page, file)}#L-{line}">source</a>'
        return f"{mark[0]}{link}"

    return _ENTRY.sub(put, body), count


def _sources(root: Path, site: Path) -> dict[str, tuple[Path, int]]:
    """Write the source pages; return the page and line of each public name."""
    places: dict[str, tuple[Path, int]] = {}
    written: dict[Path, Path] = {}
    for name in coverage.PACKAGES:
        if not (root / name).is_dir():
            continue
        package = griffe.load(name, search_paths=[root], try_relative_path=False)
        for listed in coverage.listed(root):
            if listed.split(".")[0] != name:
                continue
            found = package[listed.partition(".")[2]]
            found = found.final_target if found.is_alias else found
            file = Path(str(found.filepath))
            if file not in written:
                written[file] = _write_source(file, root, site)
            places[listed] = written[file], found.lineno or 1
    return places


def _write_source(file: Path, root: Path, site: Path) -> Path:
    title = file.relative_to(root).as_posix()
    page = site / "source" / f"{title}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    form = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)
    styles = [HtmlFormatter(style=style).get_style_defs(".highlight") for style in
              ("default", "github-dark")]  # fmt: skip
    body = highlight(file.read_text(encoding="utf-8"), PythonLexer(stripnl=False), form)
    text = _PAGE.format(title=title, light=styles[0], dark=styles[1], body=body)
    page.write_text(text, encoding="utf-8")
    return page


def _relative(page: Path, to: Path) -> str:
    return "" if page == to else Path(os.path.relpath(to, page.parent)).as_posix()
