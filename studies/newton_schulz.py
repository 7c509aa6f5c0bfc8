"""Design Newton-Schulz schedules for an interval, and compare their cost with named schedules."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from manifoldmuon.linalg import (
    CUBIC,
    MODULA_SIX_STEP,
    MUON,
    POLAR_EXPRESS,
    QUINTIC,
    FixedSchedule,
    PolarExpress,
    Schedule,
)
from studies.display import COLOURS, dress, legend_above, panels, short, text_table
from studies.study import Cell, Record, Row, Study, option

NAMED = {
    "cubic": CUBIC,
    "quintic": QUINTIC,
    "Muon": MUON,
    "Modula, six steps": MODULA_SIX_STEP,
    "Polar Express": POLAR_EXPRESS,
}
DESIGN = "the design"

# Head-room for values rounded above the interval, as `PolarExpress` advises.
SAFETY = {"float64": 1.000001, "float32": 1.001, "float16": 1.01, "bfloat16": 1.01}


@dataclasses.dataclass(frozen=True)
class NewtonSchulzDesigner(Study):
    """Which schedule of odd polynomials brings singular values to one, and at what cost?

    Designs a schedule for a degree, a number of steps and an interval [lower, 1], and compares it
    with named schedules. Measures the largest |f(x) - 1| over several intervals, for the
    polynomials in float64 and for matrices with such singular values in the dtype, and the cost in
    products of square matrices.
    """

    name: ClassVar[str] = "newton-schulz"

    degree: int = option(5, "degree of every step: odd, 3 or more")
    steps: int | None = option(
        None, "number of steps; left out: one more than the dtype can resolve"
    )
    lower: float = option(1e-3, "smallest singular value that converges to 1")
    dtype: str = option("float32", "dtype of the products", choices=tuple(SAFETY))
    safety: float | None = option(None, "factor for rounding; left out: the dtype's own")
    cushion: float = option(
        0.0, "smallest lower end of a step's interval, as a share of its upper end"
    )
    bounds: tuple[float, ...] = option((1e-1, 1e-2, 1e-3, 1e-4), "lower bounds in the table")
    size: int = option(96, "size of the square matrices")
    seeds: tuple[int, ...] = option((0, 1, 2), "seeds of the bases; the worst counts")

    def __post_init__(self):
        if not self.bounds or not all(0 < bound < 1 for bound in self.bounds):
            raise ValueError(f"bounds must be between 0 and 1; got {self.bounds}")
        if self.size < 2 or not self.seeds:
            raise ValueError(
                f"size must be 2 or more, seeds not empty; got {self.size}, {self.seeds}"
            )
        self.schedule()

    def schedule(self) -> Schedule:
        """Return the designed schedule.

        Raises:
          ValueError: no schedule exists for these settings.
        """
        safety = SAFETY[self.dtype] if self.safety is None else self.safety
        design = PolarExpress(self.lower, self.degree, self.steps, safety, self.cushion)
        if self.steps is not None:
            return design
        goal = float(jnp.finfo(self.dtype).eps)
        lengths = range(1, design.length + 3)
        errors = [polynomial_error(design.with_steps(k), self.lower) for k in lengths]
        enough = next((k for k, e in zip(lengths, errors, strict=True) if e <= goal), lengths[-1])
        # The extra step removes rounding errors of the steep steps before.
        return design.with_steps(enough + 1)

    def cells(self) -> Sequence[Cell]:
        return [{"schedule": name} for name in (DESIGN, *NAMED)]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        schedule = NAMED.get(cell["schedule"]) or self.schedule()
        bounds = sorted({*self.bounds, self.lower}, reverse=True)
        lengths = range(1, schedule.length + 1)
        prefixes = [FixedSchedule(schedule.coefficients, steps=k) for k in lengths]
        return {
            "coefficients": schedule.coefficients,
            "products": schedule.products,
            "bounds": bounds,
            "polynomial_error": [polynomial_error(schedule, bound) for bound in bounds],
            "matrix_error": [
                max(matrix_error(schedule, b, self.dtype, self.size, s) for s in self.seeds)
                for b in bounds
            ],
            "products_after": [prefix.products for prefix in prefixes],
            "error_after": [polynomial_error(prefix, self.lower) for prefix in prefixes],
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        def at_lower(row: Row, what: str) -> float | None:
            return row[what][row["bounds"].index(self.lower)]

        return {
            "lower": self.lower,
            "schedules": {
                row["schedule"]: {
                    "steps": len(row["coefficients"]),
                    "products": row["products"],
                    "polynomial_error": at_lower(row, "polynomial_error"),
                    "matrix_error": at_lower(row, "matrix_error"),
                }
                for row in rows
            },
        }

    def table(self, record: Record) -> str:
        rows = record["rows"]
        bounds = [f"[{bound:g}, 1]" for bound in rows[0]["bounds"]]
        lines = [
            [row["schedule"], str(len(row["coefficients"])), str(row["products"])]
            + [short(error) for error in row[what]]
            for row in rows
            for what in ("polynomial_error", "matrix_error")
        ]
        for line in lines[1::2]:
            line[:3] = [f"  on matrices, {self.dtype}", "", ""]
        design = "\n".join(
            "  " + "  ".join(f"{number:+.6f}" for number in step)
            for step in rows[0]["coefficients"]
        )
        return "\n".join(
            [
                f"the design for [{self.lower:g}, 1], its steps (a, b, ...):",
                design,
                "\nthe largest |f(x) - 1| over an interval:",
                text_table(["", "steps", "products", *bounds], lines),
            ]
        )

    def plot(self, record: Record) -> Any:
        figure, [(iterates, errors, costs)] = panels(1, 3, width=3.6, height=3.6)
        x = np.geomspace(self.lower / 10, 1, 4000)
        _iterates(iterates, x, record["rows"][0]["coefficients"], self.lower)
        for row, colour in zip(record["rows"], COLOURS, strict=False):
            style = {"color": colour, "linewidth": 2.2 if row["schedule"] == DESIGN else 1.3}
            error = np.abs(FixedSchedule(_tuples(row["coefficients"])).apply(x) - 1)
            errors.plot(x, np.maximum(error, 1e-16), label=row["schedule"], **style)
            costs.plot(row["products_after"], row["error_after"], marker="o", markersize=4, **style)
        for panel in (errors, costs):
            panel.set_yscale("log")
        errors.set_xscale("log")
        errors.axvline(self.lower, color="#444444", linewidth=1, linestyle=(0, (4, 3)))
        costs.set_ylim(1e-16, 3)
        costs.set_xlim(0, 46)
        legend_above(figure, errors, columns=6)
        dress(errors, "Error", "of the whole schedules; dashed: the lower bound",
              "singular value x", "|f(x) - 1|")  # fmt: skip
        dress(costs, "What a product buys", f"largest error over [{self.lower:g}, 1] by the steps",
              "products of square matrices", "largest |f(x) - 1|")  # fmt: skip
        return figure


def polynomial_error(schedule: Schedule, lower: float) -> float:
    """Return the largest `|f(x) - 1|` over 10^4 points x in `[lower, 1]`, in float64."""
    x = np.concatenate([np.geomspace(lower, 1, 8000), np.linspace(lower, 1, 2000)])
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.max(np.abs(schedule.apply(x) - 1)))


def matrix_error(schedule: Schedule, lower: float, dtype: str, size: int, seed: int) -> float:
    """Return the largest `|sigma - 1|` after the schedule, for a matrix with sigma in `[lower, 1]`.

    As on accelerators, factors of products are rounded to the dtype, and sums are in float32 or
    wider. Infinite if the schedule diverges.
    """
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((size, size)))[0] for _ in range(2))
    wide = np.float64 if dtype == "float64" else np.float32
    x = ((u * np.geomspace(lower, 1, size)) @ v.T).astype(wide)
    narrow = jnp.dtype(dtype)

    def multiply(left: Float[np.ndarray, "n n"], right: Float[np.ndarray, "n n"]) -> np.ndarray:
        return left.astype(narrow).astype(wide) @ right.astype(narrow).astype(wide)

    with np.errstate(over="ignore", invalid="ignore"):
        for step in schedule.coefficients:
            gram = multiply(x.T, x)
            factor = wide(step[-1]) * gram + wide(step[-2]) * np.eye(size, dtype=wide)
            for number in step[-3::-1]:
                factor = multiply(gram, factor) + wide(number) * np.eye(size, dtype=wide)
            x = multiply(x, factor)
    if not np.isfinite(x).all():
        return float("inf")
    return float(np.abs(np.linalg.svd(x.astype(np.float64), compute_uv=False) - 1).max())


def _iterates(panel: Any, x: np.ndarray, coefficients: Any, lower: float) -> None:
    """Plot the values after each step of the design, from light to dark."""
    from matplotlib import colormaps

    steps = _tuples(coefficients)
    for k in range(1, len(steps) + 1):
        shade = colormaps["Blues"](0.25 + 0.75 * k / len(steps))
        panel.plot(
            x, FixedSchedule(steps, steps=k).apply(x), color=shade, label=str(k), linewidth=1.2
        )
    panel.axvline(lower, color="#444444", linewidth=1, linestyle=(0, (4, 3)))
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.legend(title="after step", frameon=False, fontsize=8, ncols=2, loc="lower right")
    dress(panel, "The design", "values after each step; dashed: the lower bound",
          "singular value x", "f(x)")  # fmt: skip


def _tuples(coefficients: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(step) for step in coefficients)
