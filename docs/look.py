"""Pictures of the built pages as a browser shows them, wide and narrow, light and dark.

    make docs
    python -m docs.look                                    # a page of each kind
    python -m docs.look tutorials/choosing.html --height 4000

It needs Chromium or Chrome; the browser is given no network. The pictures are put into `runs/look`.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
KINDS = (
    "index", "tutorials/first-network", "choosing", "comparison", "math/solvers", "lab/solvers",
    "api/optim",
)  # fmt: skip
WIDTHS = {"desktop": 1280, "phone": 390}
SCHEMES = {"dark": 0, "light": 1}  # as Blink numbers them


def main(arguments: Sequence[str] | None = None) -> None:
    """Takes the pictures; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", nargs="*", default=[f"{kind}.html" for kind in KINDS])
    parser.add_argument("--height", type=int, default=1200, help="in pixels (default: %(default)s)")
    options = parser.parse_args(arguments)
    found = [path for path in map(shutil.which, BROWSERS) if path]
    if not found:
        sys.exit(f"look: no browser; install Chromium ({', '.join(BROWSERS)} were looked for)")
    to = ROOT / "runs" / "look"
    to.mkdir(parents=True, exist_ok=True)
    for page in options.pages:
        path = ROOT / "site" / page
        if not path.is_file():
            sys.exit(f"look: there is no {path}; run 'make docs' first, or name another page")
        for width_name, width in WIDTHS.items():
            for scheme_name, scheme in SCHEMES.items():
                name = Path(page).with_suffix("").as_posix().replace("/", "-")
                picture = to / f"{name}-{width_name}-{scheme_name}.png"
                flags = [
                    f"--screenshot={picture}",
                    f"--window-size={width},{options.height}",
                    f"--blink-settings=preferredColorScheme={scheme}",
                    "--allow-file-access-from-files",
                    "--hide-scrollbars",
                    "--host-resolver-rules=MAP * ~NOTFOUND",
                    "--no-sandbox",  # the pages are our own, and root has none
                    "--virtual-time-budget=3000",
                ]
                command = [found[0], "--headless", *flags, path.as_uri()]
                subprocess.run(command, check=True, capture_output=True)
                print(picture.relative_to(ROOT))


if __name__ == "__main__":
    main()
