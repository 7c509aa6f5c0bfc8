"""Replace TeX in the search index of a built site by plain text.

The index is built from pages before KaTeX typesets their formulas, and search excerpts show only
text. Each formula therefore becomes a line such as `W^⊤ W = I`, derived from KaTeX's MathML.
"""

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

_MARKED = re.compile(r"\\\((?P<inline>.*?)\\\)|\\\[(?P<display>.*?)\\\]", re.DOTALL)
_MATH = re.compile(r"<math.*?</math>", re.DOTALL)


def write(site: Path, formulas: Mapping[tuple[str, bool], str]) -> None:
    """Rewrite the index under `site`, as JSON and as a script for use without a server.

    Args:
        site: A built site.
        formulas: KaTeX's output for each formula, by its TeX and whether it is displayed.

    Raises:
        KeyError: A formula in the index is on no page.
    """
    file = site / "search.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    # Line breaks in the index differ from the pages.
    formulas = {(_in_one_line(tex), displayed): made for (tex, displayed), made in formulas.items()}

    def put(mark: re.Match[str]) -> str:
        displayed = mark["inline"] is None
        tex = html.unescape(mark["display"] if displayed else mark["inline"])
        return html.escape(as_text(formulas[_in_one_line(tex), displayed]), quote=False)

    for item in index["items"]:
        for key in ("title", "text"):
            item[key] = _MARKED.sub(put, item[key])
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    file.write_text(text, encoding="utf-8")
    file.with_suffix(".js").write_text(f"var __index = {text}", encoding="utf-8")


def as_text(formula: str) -> str:
    """Return a line of text for KaTeX's output."""
    found = _MATH.search(formula)
    if found is None:
        raise ValueError(f"KaTeX has made no MathML: {formula}")
    # Remove invisible operators, such as function application.
    text = re.sub(r"[\u2061-\u2064\u200b]", "", _line(ElementTree.fromstring(found[0])))
    text = _in_one_line(text)
    return re.sub(r"([(^]|[=≤≥<>,:] |^)− ", r"\1−", text)  # a sign, not a subtraction


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _line(node: ElementTree.Element) -> str:
    tag = node.tag.rpartition("}")[2]
    parts = [_line(child) for child in node]
    if tag in ("annotation", "mspace", "mphantom"):
        return " " if tag == "mspace" else ""
    if tag in ("msup", "msub", "munder", "msubsup", "munderover"):
        marks = {"msup": "^", "msubsup": "_^", "munderover": "_^"}.get(tag, "_")
        raised = zip(marks, parts[1:], strict=True)
        return parts[0] + "".join(mark + _together(part) for mark, part in raised if part.strip())
    if tag == "mover":  # an accent, or a label above an arrow
        return parts[0] + (parts[1] if parts[1].strip().isalnum() else "")
    if tag == "mfrac":
        return f"{_together(parts[0])}/{_together(parts[1])}"
    if tag == "msqrt":
        return "√" + _together("".join(parts))
    if tag == "mtr":
        return " ".join(parts) + "; "
    if tag == "mo":
        sign = node.text or ""
        return f" {sign} " if sign in _SPACED else sign
    return (node.text or "").strip("\n") + "".join(parts)


_SPACED = set("=≤≥<>≈≡∼≠→←↦∈⊂+−±×⋅≪≫⪰⪯∝")


def _together(part: str) -> str:
    """Add parentheses, unless the part is a single character or a number."""
    part = part.strip()
    return part if len(part) == 1 or part.isdecimal() else f"({part})"
