"""Results table for the terminal."""

from collections.abc import Mapping

from studies.digits.settings import Settings
from studies.digits.summary import Row
from studies.display import text_table

_LEGEND = """\
distance   the largest |singular value / target - 1| of any layer after any step (on a sphere: of
           the norm); residual, how far a direction was from tangent before its last projection
gap        how far a direction may be from steepest, at most: a certificate, the largest of any step
Lipschitz  bound of the network at the end: its multiplier times the product of spectral norms"""


def table(settings: Settings, rows: Mapping[str, Row]) -> str:
    """Return the rows as text, with a legend of the columns."""
    seeds = len(settings.seeds)
    header = ("", "test accuracy", "train loss", "distance", "residual", "gap", "ms/step",
              "Lipschitz")  # fmt: skip
    text = text_table(header, [_cells(row) for row in rows.values()])
    rule = text.splitlines()[1]
    count = f"{seeds} seeds, mean ± standard error" if seeds > 1 else "one seed"
    title = f"{settings.data}, {settings.steps} steps of {settings.batch_size} images, {count}"
    return "\n".join([title, rule, text, rule, _LEGEND])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.label,
        row.test_accuracy.text(".2f") + " %",
        f"{row.train_loss.mean:.1e}",
        *(_small(value) for value in (row.distance, row.residual, row.gap)),
        f"{row.milliseconds:.2f}",
        f"{row.lipschitz.mean:.4g}",
    )


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
