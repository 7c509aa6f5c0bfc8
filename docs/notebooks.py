"""Run the tutorials and write each as a page and as a notebook, with its output.

A tutorial is a program, `docs/tutorials/name.py`, in Jupytext's percent format. The output goes to
the same folder: `name.md`, `name.ipynb` and pictures, all ignored by git.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

TUTORIALS = Path(__file__).parent / "tutorials"
_SECONDS = 300  # per cell, enough for a busy machine
# Compilation dominates the run time, so compile without optimisation. Eight devices for meshes.
_FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"

# Pictures that read at 200 pixels, in the gallery.
_STYLE = {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}

# Links to other pages, which a downloaded notebook lacks.
_BETWEEN_PAGES = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)")


def write_all() -> None:
    """Run and write all tutorials; see `write`."""
    for source in sorted(TUTORIALS.glob("*.py")):
        write(source)


def write(source: Path) -> None:
    """Run a tutorial in a separate process, and write its page and notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: The code raises.
    """
    for old in source.parent.glob(f"{source.stem}-*.svg"):
        old.unlink()
    notebook = jupytext.read(source)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    client = NotebookClient(
        notebook,
        timeout=_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(source.parent)}},
        extra_arguments=[
            "--log-level=ERROR",
            "--InlineBackend.figure_formats=svg",
            f"--InlineBackend.rc={_STYLE}",
            "--InteractiveShell.ast_node_interactivity=none",  # show only printed values
        ],
    )
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
    client.execute(env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags})
    title, *rest = _blocks(notebook, source)
    note = f"This page is a notebook, too: [{source.stem}.ipynb]({source.stem}.ipynb)."
    source.with_suffix(".md").write_text("\n\n".join([title, note, *rest]) + "\n", encoding="utf-8")
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _BETWEEN_PAGES.sub(r"\1", cell.source)
    nbformat.write(notebook, source.with_suffix(".ipynb"))


def _blocks(notebook: NotebookNode, source: Path) -> Iterator[str]:
    """Yield the blocks of the page: title, text, code and output."""
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            yield from cell.source.split("\n\n", 1)
            continue
        yield f"```python\n{cell.source}\n```"
        if text := "".join(output.get("text", "") for output in cell.outputs):
            yield f"```{{ .text .shown }}\n{text.rstrip()}\n```"
        for output in cell.outputs:
            if output.output_type == "display_data":
                picture = source.with_name(f"{source.stem}-{number}.svg")
                picture.write_text(output.data["image/svg+xml"], encoding="utf-8")
                yield f"![{cell.metadata['alt']}]({picture.name})"
