"""Build the documentation into site/ and check it: `make docs`.

`--formulas-if-npm` continues without formulas if npm's registry cannot be reached.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from docs import bundle, coverage, landing, links, notebooks, references, thumbnails

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"


def build() -> None:
    """Build the site.

    Raises:
        SystemExit: A public name is undocumented, the generator warns, or a page loads from
            another host or has a broken link.
        Exception: A tutorial fails, or a formula cannot be typeset.
    """
    _stop_on("undocumented public names:", coverage.problems(ROOT))
    landing.draw(ROOT / "docs")
    notebooks.write_all()
    thumbnails.write(ROOT / "docs" / "thumbnails")
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit("docs: the build has failed")
    shutil.copy(ROOT / "docs" / "404.html", SITE)  # the theme's has links from the host's root
    print(f"docs: {links.write(SITE)} links to the API and the source")
    _keep_together(SITE)
    try:
        count = bundle.bundle(SITE)
    except bundle.Unreachable as error:
        if "--formulas-if-npm" not in sys.argv:
            raise
        broken = [line for line in references.problems(SITE) if "bundled/" not in line]
        print(f"docs: {error}; the formulas are neither checked nor set", file=sys.stderr)
    else:
        broken = references.problems(SITE)
        print(f"docs: site/index.html ({count} formulas)")
    _stop_on("pages that are not whole:", broken)


def _keep_together(site: Path) -> None:
    """Break no line around a plus-minus sign or before a percent sign."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        text = text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
        page.write_text(re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text), "utf-8")


def _stop_on(title: str, lines: list[str]) -> None:
    if lines:
        raise SystemExit("\n".join([f"docs: {title}", *lines]))


if __name__ == "__main__":
    build()
