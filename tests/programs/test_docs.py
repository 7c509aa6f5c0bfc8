"""The documentation: every public name is on a page, and the shown code runs."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import griffe
import jax
import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from docs import coverage, excerpts, links, references, thumbnails
from docs.annotations import PlainAnnotations
from studies import STUDIES, claims
from tests.optim.test_processes import free_port, outputs

ROOT = Path(__file__).parents[2]
_CONFIGURATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
# A program, and what it prints: numbers to 5 %, unless a comment before the output says otherwise.
_PROGRAM = re.compile(
    r"^```python\n(?P<code>.*?)^```\n"
    r"(?:\n(?:<!-- numbers within (?P<percent>\d+)% -->\n)?```text\n(?P<shown>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.?\d*(?:e[-+]?\d+)?(?!\w)")


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")


def test_every_public_name_is_documented():
    assert coverage.problems() == []


# KaTeX's output: the typeset formula, and the TeX source as an annotation.
_MATHML = (
    '<span><math xmlns="http://www.w3.org/1998/Math/MathML"><semantics><mrow>{}</mrow>'
    '<annotation encoding="application/x-tex">no</annotation></semantics></math>no</span>'
)
_SET = {
    "W^⊤W ≤ I": "<msup><mi>W</mi><mo>⊤</mo></msup><mi>W</mi><mo>≤</mo><mi>I</mi>",
    "10^(−7)": "<msup><mn>10</mn><mrow><mo>−</mo><mn>7</mn></mrow></msup>",
    "1/(√(2d))": "<mfrac><mn>1</mn><msqrt><mrow><mn>2</mn><mi>d</mi></mrow></msqrt></mfrac>",
    "σ_i^2": "<msubsup><mi>σ</mi><mi>i</mi><mn>2</mn></msubsup>",
}


@pytest.mark.parametrize("line", _SET)
def test_formulas_become_plain_text(line):
    assert excerpts.as_text(_MATHML.format(_SET[line])) == line


def test_search_index_contains_no_tex(tmp_path):
    page = {"title": r"Where \(a &lt; b\)", "text": r"<p>\[a &lt; b\] holds</p>", "level": 1}
    index = json.dumps({"config": {"lang": ["en"]}, "items": [page]})
    (tmp_path / "search.json").write_text(index, encoding="utf-8")
    as_set = _MATHML.format("<mi>a</mi><mo>&lt;</mo><mi>b</mi>")
    excerpts.write(tmp_path, {("a < b", False): as_set, ("a < b", True): as_set})
    script = (tmp_path / "search.js").read_text(encoding="utf-8")
    assert script == "var __index = " + (tmp_path / "search.json").read_text(encoding="utf-8")
    (item,) = json.loads(script.removeprefix("var __index = "))["items"]
    assert item == {"title": "Where a &lt; b", "text": "<p>a &lt; b holds</p>", "level": 1}


def test_undocumented_names_are_detected(tmp_path):
    files = {
        "manifoldmuon/__init__.py": '"""Doc."""\nfrom . import linalg\n__all__ = ["linalg"]',
        "manifoldmuon/linalg/__init__.py": """
            '''Doc.'''
            from ._a import explained, silent, unlisted, CONSTANT
            __all__ = ["explained", "silent", "unlisted", "CONSTANT"]
            """,
        "manifoldmuon/linalg/_a.py": """
            def explained(): '''Doc.'''
            def unlisted(): '''Doc.'''
            def silent(): pass
            CONSTANT = 1
            '''Doc.'''
            """,
        "manifoldmuon/testing.py": "",
        "docs/api/linalg.md": """
            ::: manifoldmuon.linalg.explained
            ::: manifoldmuon.linalg.silent
            ::: manifoldmuon.linalg.CONSTANT
            ::: manifoldmuon.linalg._a.gone
            """,
    }
    _write(tmp_path, files)
    assert sorted(coverage.problems(tmp_path)) == [
        "linalg.md lists manifoldmuon.linalg._a.gone, not a public name",
        "manifoldmuon.linalg.silent has no docstring",
        "manifoldmuon.linalg.unlisted is on no page of docs/api",
        "manifoldmuon.testing has no __all__",
        "manifoldmuon.testing has no docstring",
    ]


def test_named_files_and_commands_exist():
    pages = [*_PAGES, ROOT / "CONTRIBUTING.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ours = "benchmarks|docs|examples|manifoldmuon|manifoldmuon_verify|studies|tests"
    named = {x for x in re.findall(rf"`((?:{ours})/[\w./-]+)`", text) if "name" not in x}
    missing = {path for path in named if not (ROOT / path).exists()}
    for name in set(re.findall(rf"python -m ((?:{ours})[\w.]*)", text)):
        path = ROOT / name.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            missing.add(name)
    missing |= set(re.findall(r"python -m studies ([a-z][\w-]*)", text)) - {*STUDIES, "check"}
    files = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    missing |= set(re.findall(r"python -m benchmarks ([a-z]\w*)", text)) - files
    assert not missing


def test_named_tables_of_tests_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([A-Z_]+)` of\s+`(tests/[\w/]+\.py)`", text)
    assert len(named) > 5
    for table, path in named:
        tests = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^{table}\b", tests, re.MULTILINE), (table, path)


def test_every_page_is_in_navigation():
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    pages = {page for page in pages if "/results/" not in page}  # tables, which pages include
    pages |= {f"tutorials/{path.stem}.md" for path in _TUTORIALS}  # the build writes them
    assert set(re.findall(r"[\w/-]+\.md$", _CONFIGURATION, re.MULTILINE)) == pages


def test_errors_name_existing_pages():
    titles = re.findall(r"- ([^:\n]+): \S+\.md$", _CONFIGURATION, re.MULTILINE)
    named = set()
    for path in (ROOT / "manifoldmuon").rglob("*.py"):
        joined = re.sub(r'"\n\s+f?"', "", path.read_text(encoding="utf-8"))
        named |= set(re.findall(r"\bpage '([^']+)'", joined))
    assert len(named) > 5
    assert named - set(titles) == set()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_landing_pictures_fit_phones(page):
    """Scaled to the 358 pixels of a phone's column, their text of 9 pt has 10 pixels or more."""
    path = ROOT / page
    names = re.findall(r"!\[.*?\]\((.*?\.svg)\)", path.read_text(encoding="utf-8"))
    assert names
    for name in names:
        picture = (path.parent / name).read_text(encoding="utf-8")
        (width,) = re.findall(r'<svg [^>]*width="([\d.]+)pt"', picture)
        assert 9 * 358 / float(width) > 10


def test_gallery_shows_each_picture_once(tmp_path, monkeypatch):
    tutorials = [f"tutorial-{path.stem}" for path in _TUTORIALS]  # the build draws them
    assert sorted(thumbnails.shown()) == sorted([*thumbnails.DRAWN, *tutorials])
    monkeypatch.setattr(thumbnails, "shown", lambda: list(thumbnails.DRAWN))
    thumbnails.write(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(thumbnails.DRAWN)


def test_claims_on_pages_match_records():
    assert claims.problems() == []


_CLAIM = "| Muon | 98.50 ± 0.09 % |"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"Digits:\n{_CLAIM}\n`0.5`, Python 3.11", []),
        ("| Muon | **98.50 ± 0.09** % |", []),
        ("| Muon | 98.51 ± 0.09 % |", ["does not say", "says 98.51", "says ± 0.09"]),
        (f"{_CLAIM} and 12 % more, in 1.5 s", ["says 12 %", "says 1.5"]),
    ],
)
def test_number_without_record_is_detected(text, found):
    lines = list(claims.unproved({"page.md": text}, {"page.md": [_CLAIM]}))
    assert len(lines) == len(found)
    assert all(part in line for part, line in zip(found, lines, strict=True))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_linked_files_exist(page):
    """The build checks the pages of docs; these pages are read in the repository."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert links or page == "CONTRIBUTING.md"
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_configuration_names_no_external_host():
    assert "//" not in _CONFIGURATION
    assert "\n  font: false\n" in _CONFIGURATION  # otherwise the theme loads fonts from a server
    lock = json.loads((ROOT / "docs" / "node" / "package-lock.json").read_text(encoding="utf-8"))
    assert all("integrity" in entry for name, entry in lock["packages"].items() if name)


def test_missing_and_external_references_are_detected(tmp_path):
    text = """
        <script src="own.js"></script> <a href="math/#a">in</a> <a href="https://host.org">out</a>
        <img src="data:image/png;base64,"> <script src="https://host.org/a.js"></script>
        <link rel="stylesheet" href="//host.org/a.css"> <img src="gone.png"> <a href="gone/">x</a>
        <a href="/math/">root</a>
        """
    _write(tmp_path, {"math/index.html": "", "own.js": "", "index.html": text})
    assert references.problems(tmp_path) == [
        "index.html loads https://host.org/a.js",
        "index.html loads //host.org/a.css",
        "index.html names gone.png, which is not there",
        "index.html names gone/, which is not there",
        "index.html names /math/ from the root of the host",
    ]


def test_names_and_sources_get_links(tmp_path):
    files = {
        "manifoldmuon/__init__.py": "",
        "manifoldmuon/optim/__init__.py": "from ._a import muon",
        "manifoldmuon/optim/_a.py": "\n\ndef muon(): '''Doc.'''",
        "docs/api/optim.md": "::: manifoldmuon.optim.muon",
        "site/api/optim.html": """<article>
            <h3 id="manifoldmuon.optim.muon" class="doc doc-heading">muon</h3> <code>muon</code>
            <h3 id="manifoldmuon.optim.A" class="doc doc-heading">A</h3> <code>f</code>
            <h4 id="manifoldmuon.optim.A.f" class="doc doc-heading">f</h4> <b><code>muon</code></b>
            """,
        "site/page.html": """<article> <code>mm.optim.muon(0.1, &quot;&quot;)</code>
            <code>muon</code> <code>f</code> <pre><code>muon</code></pre> <code>optax.muon</code>
            """,
    }
    _write(tmp_path, files)
    site = tmp_path / "site"
    assert links.write(site, tmp_path) == 3
    page = (site / "page.html").read_text(encoding="utf-8")
    assert page.count("<a href") == 1
    assert '<a href="api/optim.html#manifoldmuon.optim.muon"><code>mm.optim.muon(' in page
    api = (site / "api" / "optim.html").read_text(encoding="utf-8")
    assert '<a href="#manifoldmuon.optim.A.f"><code>f</code></a>' in api
    assert 'href="../source/manifoldmuon/optim/_a.py.html#L-3">source</a>' in api
    source = (site / "source" / "manifoldmuon" / "optim" / "_a.py.html").read_text(encoding="utf-8")
    assert 'id="L-3"' in source
    assert references.problems(site) == []


@pytest.mark.slow_except("README.md")
@pytest.mark.parametrize(
    "page",
    # The build writes the tutorials; the other page joins processes, below.
    [page for page in _PAGES if _PROGRAM.search(page.read_text(encoding="utf-8"))
     and page.parent.name != "tutorials" and page.stem != "several-processes"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)  # fmt: skip
def test_programs_print_what_page_shows(page):
    if page.stem == "scale" and jax.__version_info__ < (0, 10):
        pytest.skip("CPUs have a host memory from JAX 0.10 on")
    text, names = page.read_text(encoding="utf-8"), {"__name__": "__main__"}
    for program in _PROGRAM.finditer(text):
        above = text.count("\n", 0, program.start("code"))  # tracebacks have the page's lines
        code = compile("\n" * above + program["code"], str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        shown, percent = program["shown"] or "", int(program["percent"] or 5)
        assert _agree(out.getvalue(), shown, percent), (
            f"{page}:{above}: prints\n{out.getvalue()}\nand the page shows\n{shown}"
        )


@pytest.mark.slow
def test_inference_runs_in_a_new_process(tmp_path):
    """Run the page's inference with the imports of the page, but not its training."""
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    train, load, orbax = _PROGRAM.finditer(text)
    place = f"folder = Path({str(tmp_path / 'run')!r})\n"
    imports, training = re.split(r"^folder = .*\n", train["code"], flags=re.MULTILINE)
    for code, shown in (
        (imports + place + training, train["shown"]),
        (imports + place + load["code"] + orbax["code"], load["shown"] + orbax["shown"]),
    ):
        command = [sys.executable, "-W", "error", "-c", code]
        out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        assert _agree(out, shown, 5)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_program_of_several_processes_prints_what_page_shows(count, tmp_path):
    text = (ROOT / "docs" / "several-processes.md").read_text(encoding="utf-8")
    (program,) = _PROGRAM.finditer(text)
    (tmp_path / "train.py").write_text(program["code"], encoding="utf-8")
    address = f"COORDINATOR=127.0.0.1:{free_port()}"
    commands = [
        ["env", address, f"PROCESSES={count}", f"PROCESS={process}", sys.executable, "train.py"]
        for process in range(count)
    ]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    first, *others = (
        "\n".join(re.findall(r"^step.*", out, re.MULTILINE))  # Gloo prints, too
        for out in outputs(commands, cwd=tmp_path, env=variables)
    )
    assert _agree(first, program["shown"], 5)
    assert others == [""] * (count - 1)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "10", "20"}


def _agree(printed: str, shown: str, percent: int) -> bool:
    """Return whether words are equal, and numbers close: processors round differently."""
    words = [_NUMBER.sub("#", text).split() for text in (printed, shown)]
    numbers = [[float(x) for x in _NUMBER.findall(text)] for text in (printed, shown)]
    return words[0] == words[1] and numbers[0] == pytest.approx(
        numbers[1], rel=percent / 100, abs=1e-3
    )


@pytest.mark.parametrize(
    ("printed", "percent", "agree"),
    [
        ("w  (64, 8)  float32  97.1%, gap 3e-07\n", 5, True),
        ("w  (64, 8)  float32  91.0%, gap 0.", 5, False),
        ("w  (64, 8)  float32  91.0%, gap 0.", 10, True),
        ("w  (64, 8)  float64  97.5%, gap 2.e-07", 5, False),
        ("w  (64, 8)  float32  97.5%, gap nan", 5, False),
        ("w  (64, 8)  float32  97.5%", 5, False),
    ],
)
def test_output_that_differs_is_detected(printed, percent, agree):
    assert _agree(printed, "w (64, 8) float32 97.5%, gap 2.5e-07\n", percent) == agree


@pytest.mark.slow  # the documentation build also runs the tutorials
@pytest.mark.parametrize("tutorial", _TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(tutorial, monkeypatch):
    def subplots(*args: Any, figsize: Any, layout: Any, **options: Any) -> tuple[Figure, Any]:
        figure = Figure(figsize=figsize, layout=layout)  # without a screen
        return figure, figure.subplots(*args, **options)

    monkeypatch.setattr(plt, "subplots", subplots)
    try:
        runpy.run_path(str(tutorial))
    finally:
        jax.config.update("jax_enable_x64", False)  # a tutorial sets it, for all later tests


def test_api_pages_show_types_without_their_checks():
    extensions = griffe.load_extensions(PlainAnnotations)
    package = griffe.load(
        "manifoldmuon", search_paths=[ROOT], try_relative_path=False, extensions=extensions
    )
    muon = {p.name: str(p.annotation) for p in package["optim._aliases.muon"].parameters}
    assert muon["momentum"] == "ArrayLike | None"
    assert muon["method"] == "MsignMethod | None"
    assert muon["learning_rate"] == "optax.ScalarOrSchedule"
