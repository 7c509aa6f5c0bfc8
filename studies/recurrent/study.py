"""Recurrent matrices: the rate of a weight used T times, and rivals of the constraint."""

import dataclasses
import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from studies import training
from studies.display import COLOURS, dress, panels, text_table
from studies.estimates import estimate, half_width, shown
from studies.recurrent.networks import METHODS, Params
from studies.recurrent.tasks import LONGEST, RIVAL_TASKS, TASKS, Task
from studies.study import Cell, Record, Row, Study, check_choices, check_rival, option

RULE, RIVALS = "rule", "rivals"
"""The parts of the study: the purpose of a cell."""

AROUND = 1.5
"""Octaves around the lowest loss through which the parabola goes."""

LEARNT = 0.9

CHUNK = 50
"""Steps of which the loss is averaged."""

RAISED = 4.0
"""The factor of the rates where they fall to zero, on digits."""

HELD_OUT = 512
RIVAL = "Adam"
ONLY = {
    "GRU": ("copy-100", "adding", "digits"),
    "Stiefel input": ("copy-100", "digits"),
    "Cayley retraction": ("copy-100", "digits"),
}
"""The tasks of methods that are not measured on all."""

MEASURED = "solved_steps", "seconds", "held_out", "accuracy"


# --- The rule ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _sweep(name: str, uses: int, width: int, steps: int, batch: int, rest: float) -> Any:
    """Return a compiled program that trains with every rate and returns held-out losses."""
    task, method = TASKS[name](uses), METHODS["Orthogonal"]

    @jax.jit
    def run(seed: Any, rates: Any) -> Any:
        def train(rate: Any) -> Any:
            decay = functools.partial(optax.linear_schedule, end_value=0.0, transition_steps=steps)
            tx = method.optimizer(decay(rate), decay(rest), 1)

            def loss(params: Params, key: Any) -> Any:
                return method.loss(task, params, task.draw(seed, key, batch))[0]

            keys = jax.random.split(jax.random.fold_in(jax.random.key(1), seed), steps)
            start = method.init(task, width, jax.random.key(seed))
            (params, _), _ = training.train(tx, loss, training.begin(tx, start), keys)
            return method.loss(task, params, task.draw(seed, None, HELD_OUT))[0]

        return jax.lax.map(train, rates)

    return run


def lowest(
    exponents: Sequence[float], losses: Sequence[float | None], classes: int
) -> float | None:
    """Return log2 of the best rate, by a parabola through the logarithms of all losses within
    `AROUND` octaves of the lowest; None if the lowest is at an end of the grid, or above
    `LEARNT` of the loss of guessing among `classes`."""
    values = np.array([np.nan if loss is None else loss for loss in losses], np.float64)
    heights = np.log(np.where(np.isfinite(values), values, np.nanmax(values)))
    k = int(heights.argmin())
    if k in (0, len(heights) - 1) or values[k] > LEARNT * np.log(classes):
        return None
    off = np.subtract(exponents, exponents[k])
    near = np.abs(off) <= AROUND
    curvature, tilt, _ = np.polyfit(off[near], heights[near], 2)
    vertex = -tilt / (2 * curvature) if curvature > 0 else 0.0
    return float(exponents[k] + np.clip(vertex, -AROUND, AROUND))


def rule(rows: Sequence[Row], classes: int) -> dict[str, Any]:
    """Estimate the slope of log(best rate) over log(uses), a line for each seed."""
    best: dict[int, dict[int, float | None]] = {}
    for row in rows:
        found = lowest(row["log2_rates"], row["losses"], classes)
        best.setdefault(row["seed"], {})[row["uses"]] = found
    uses = list(next(iter(best.values())))
    slopes, products = [], []
    for own in best.values():
        known = {u: value for u, value in own.items() if value is not None}
        x = np.log2(list(known))
        slopes.append(np.polyfit(x, list(known.values()), 1)[0] if len(known) > 1 else None)
        products.append(np.mean(x + list(known.values())) if known else None)
    return {
        "slope": estimate(slopes),
        "log2_product": estimate(products),
        "outside": sum(value is None for own in best.values() for value in own.values()),
        "log2_rates": {str(u): estimate(_known(own[u] for own in best.values())) for u in uses},
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# --- Rivals --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _task(name: str) -> Task:
    return RIVAL_TASKS[name]()


@functools.lru_cache(maxsize=1)
def _programs(name: str, method: str, width: int, steps: int, batch: int, rest: float) -> Any:
    """Return compiled programs: begin, take `CHUNK` steps, measure held-out loss and accuracy."""
    task, chosen = _task(name), METHODS[method]

    def optimizer(rate: Any) -> optax.GradientTransformation:
        if task.baseline:
            return chosen.optimizer(rate, rest, task.steps)
        decay = functools.partial(optax.linear_schedule, end_value=0.0, transition_steps=steps)
        return chosen.optimizer(decay(rate), decay(rest), task.steps)

    def begin(seed: Any, rate: Any) -> Any:
        return training.begin(optimizer(rate), chosen.init(task, width, jax.random.key(seed)))

    def take(carry: Any, seed: Any, rate: Any, start: Any) -> Any:
        def loss(params: Params, key: Any) -> Any:
            return chosen.loss(task, params, task.draw(seed, key, batch))[0]

        root = jax.random.fold_in(jax.random.key(1), seed)
        keys = jax.vmap(lambda step: jax.random.fold_in(root, step))(start + jnp.arange(CHUNK))
        carry, (losses, _) = training.train(optimizer(rate), loss, carry, keys)
        return carry, losses.mean()

    def measure(carry: Any, seed: Any) -> Any:
        return chosen.loss(task, carry[0], task.draw(seed, None, HELD_OUT))

    begin, measure = jax.jit(begin), jax.jit(measure)
    arguments = begin(0, 0.1), 0, 0.1, 0
    return begin, jax.jit(take).lower(*arguments).compile(), measure


def trained(programs: Any, name: str, steps: int, seed: int, rate: float) -> dict[str, Any]:
    """Train until the loss is below a tenth of the baseline, diverges, or the steps are taken."""
    begin, take, measure = programs
    carry, losses, goal, seconds = begin(seed, rate), [], _task(name).baseline, 0.0
    for start in range(0, steps, CHUNK):
        clock = time.process_time()
        carry, loss = take(carry, seed, rate, start)
        losses.append(float(loss))
        seconds += time.process_time() - clock
        if not np.isfinite(losses[-1]) or (goal and losses[-1] < goal / 10):
            break
    solved = bool(goal and losses[-1] < goal / 10)
    held_out, accuracy = measure(carry, seed)
    return {
        "solved_steps": CHUNK * len(losses) if solved else None,
        "seconds": seconds,
        "held_out": float(held_out),
        "accuracy": float(accuracy),
        "losses": [float(f"{loss:.4g}") for loss in losses],
    }


@functools.lru_cache(maxsize=1)
def _tuned(name: str, method: str, seed: int, *sizes: Any) -> tuple[float, dict[str, Any]]:
    """Return the best rate of the grid for a seed, and the results with each rate."""
    raised = 1 if _task(name).baseline else RAISED
    rates = [raised * rate for rate in METHODS[method].rates]
    programs = _programs(name, method, *sizes)
    found = [trained(programs, name, sizes[1], seed, rate) for rate in rates]
    tried = {key: [one[key] for one in found] for key in MEASURED}
    return rates[min(range(len(rates)), key=lambda k: rank(found[k]))], {"rates": rates, **tried}


def rank(found: Mapping[str, Any]) -> tuple[float, float]:
    """Return a key that sorts the best training first."""
    loss = found["held_out"]
    return found["solved_steps"] or np.inf, loss if loss is not None and np.isfinite(
        loss
    ) else np.inf


def rivals(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise every method, with differences to Adam paired by seed."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    by_method = {name: [row for row in rows if row["method"] == name] for name in methods}
    found: dict[str, Any] = {}
    for name, own in by_method.items():
        rate, rates = own[0]["rate"], own[0]["tried"]["rates"]
        steps = [CHUNK * len(row["losses"]) for row in own]
        found[name] = {
            "rate": rate,
            "edge": rate in (rates[0], rates[-1]),
            "solved": sum(row["solved_steps"] is not None for row in own),
            "seeds": len(own),
            **{key: estimate(_numbers(own, key)) for key in MEASURED},
            "milliseconds": estimate(
                [1e3 * row["seconds"] / count for row, count in zip(own, steps, strict=True)]
            ),
            "beyond_adam": {
                key: estimate(_differences(own, by_method[RIVAL], key)) for key in MEASURED
            },
        }
    return found


def _numbers(rows: Sequence[Row], key: str) -> list[float | None]:
    return [None if row[key] is None else float(row[key]) for row in rows]


def _differences(rows: Sequence[Row], others: Sequence[Row], key: str) -> list[float | None]:
    pairs = zip(_numbers(rows, key), _numbers(others, key), strict=True)
    return [None if one is None or other is None else one - other for one, other in pairs]


# --- The study -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recurrent(Study):
    """Which rate does a weight used T times need, and does an orthogonal recurrent matrix pay?

    `rule`: a network with modReLU and an `Orthogonal` recurrent matrix recalls five letters after
    a delay, or reads digits of 4 by 4 pixels with blank steps after each pixel. The number of steps
    and the schedule (linear, to zero) are fixed; the rate of the matrix and the number of its uses
    vary; Adam trains the rest at a fixed rate. A seed's best rate is the lowest point of a parabola
    through the logarithms of its held-out losses; it has none at the end of the grid, or where all
    losses are above 0.9 of that of guessing. The slope of log(best rate) over log(uses) has
    Student's 95 % interval over seeds.

    `rivals`: copy memory and adding, at constant rates until the mean loss of 50 steps is below a
    tenth of the baseline (10 ln 8 / (delay + 20), and 1/6); digits of 8 by 8 pixels and MNIST,
    pixel by pixel, with rates that fall to zero. The first seed chooses one of five rates; the
    others count, paired with Adam's. All but the GRU have modReLU and the same initial rotations.
    Adam trains the other weights at a fixed rate. Times are seconds of the processor. Some methods
    have fewer tasks (`ONLY`).
    """

    name: ClassVar[str] = "recurrent"

    # fmt: off
    tasks: tuple[str, ...] = option(tuple(TASKS), "tasks for the rule", choices=tuple(TASKS))
    uses: tuple[int, ...] = option(
        (16, 32, 64, 128, 256, 512, 800), "uses of the rule's matrices, multiples of 16")
    octaves: tuple[int, ...] = option((-13, -2), "log2 of the rule's first and last rate")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "seeds for the rule")
    width: int = option(32, "width of the rule's networks")
    steps: int = option(400, "steps of the rule's trainings")
    batch: int = option(16, "sequences per step, for the rule")
    rest: float = option(3e-3, "rate of Adam for other weights, for the rule")
    rival_tasks: tuple[str, ...] = option(
        tuple(RIVAL_TASKS), "tasks for the rivals", choices=tuple(RIVAL_TASKS))
    methods: tuple[str, ...] = option(tuple(METHODS), "rivals to compare", choices=tuple(METHODS))
    rival_seeds: tuple[int, ...] = option(
        (0, 1, 2, 3, 4, 5), "seeds for the rivals; the first tunes")
    rival_width: int = option(64, "width of the rivals' networks")
    solving_steps: int = option(4000, "maximum steps of copying and adding")
    reading_steps: int = option(1000, "steps of each training on images")
    rival_batch: int = option(32, "sequences per step, for the rivals")
    rival_rest: float = option(1e-2, "rate of Adam for other weights, for the rivals")
    # fmt: on

    def __post_init__(self):
        check_choices(self)
        check_rival(RIVAL, self.methods, self.rival_seeds)
        steps = self.solving_steps, self.reading_steps
        if any(uses < 16 or uses % 16 for uses in self.uses) or len(self.octaves) != 2:
            raise ValueError(
                f"uses must be multiples of 16, octaves 2 numbers; got {self.uses}, {self.octaves}"
            )
        if any(count < CHUNK or count % CHUNK for count in steps):
            raise ValueError(f"steps must be multiples of {CHUNK}; got {steps}")

    def cells(self) -> Sequence[Cell]:
        rule = [
            {"part": RULE, "task": task, "uses": uses, "seed": seed}
            for task in self.tasks
            for uses in self.uses
            for seed in self.seeds
            if uses <= LONGEST.get(task, uses)
        ]
        return rule + [
            {"part": RIVALS, "task": task, "method": method, "seed": seed}
            for task in self.rival_tasks
            for method in self.methods
            for seed in self.rival_seeds[1:]
            if task in ONLY.get(method, self.rival_tasks)
        ]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        if cell["part"] == RULE:
            first, last = self.octaves
            exponents = np.arange(2 * first, 2 * last + 1) / 2
            sizes = self.width, self.steps, self.batch, self.rest
            run = _sweep(cell["task"], cell["uses"], *sizes)
            found = run(cell["seed"], jnp.float32(2.0**exponents))
            return {"log2_rates": exponents, "losses": found}
        name, method = cell["task"], cell["method"]
        steps = self.solving_steps if _task(name).baseline else self.reading_steps
        sizes = self.rival_width, steps, self.rival_batch, self.rival_rest
        rate, tried = _tuned(name, method, self.rival_seeds[0], *sizes)
        programs = _programs(name, method, *sizes)
        return {"rate": rate, "tried": tried, **trained(programs, name, steps, cell["seed"], rate)}

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        def of(part: str, task: str) -> list[Row]:
            return [row for row in rows if row["part"] == part and row["task"] == task]

        return {
            RULE: {task: rule(of(RULE, task), TASKS[task](16).classes) for task in self.tasks},
            RIVALS: {task: rivals(of(RIVALS, task)) for task in self.rival_tasks},
        }

    def table(self, record: Record) -> str:
        rules, others = record["summary"][RULE], record["summary"][RIVALS]
        lines = [
            [task, shown(own["slope"], ".2f"), shown(own["log2_product"], ".2f"),
             str(own["outside"]),
             *(shown(own["log2_rates"].get(str(uses)), ".1f") for uses in self.uses)]
            for task, own in rules.items()
        ]  # fmt: skip
        header = ["log2 of the best rate", "slope", "rate times uses", "outside",
                  *map(str, self.uses)]  # fmt: skip
        texts = [text_table(header, lines)]
        for task, own in others.items():
            lines = [
                [name, f"{one['rate']:g}", f"{one['solved']} of {one['seeds']}",
                 shown(one["solved_steps"], ".0f"), shown(one["seconds"], ".1f"),
                 shown(one["milliseconds"], ".1f"), shown(one["accuracy"], ".2%"),
                 shown(one["beyond_adam"]["solved_steps"], "+.0f"),
                 shown(one["beyond_adam"]["accuracy"], "+.2%")]
                for name, one in own.items()
            ]  # fmt: skip
            header = [task, "rate", "solved", "steps", "seconds", "ms a step", "accuracy",
                      "steps beyond Adam", "accuracy beyond Adam"]  # fmt: skip
            texts += ["", text_table(header, lines)]
        return "\n".join(texts)

    def plot(self, record: Record) -> Any:
        figure, grid = panels(1, 1, width=5.6, height=4.0)
        panel = grid[0, 0]
        for colour, (task, own) in zip(COLOURS, record["summary"][RULE].items(), strict=False):
            known = [(int(u), e) for u, e in own["log2_rates"].items() if e["mean"] is not None]
            x, y = [u for u, _ in known], [2 ** e["mean"] for _, e in known]
            bars = [half_width(e["interval"]) or 0.0 for _, e in known]
            ends = [[v - v * 2**-b for v, b in zip(y, bars, strict=True)],
                    [v * 2**b - v for v, b in zip(y, bars, strict=True)]]  # fmt: skip
            label = f"{task}: slope {shown(own['slope'], '.2f')}"
            panel.errorbar(x, y, yerr=ends, fmt="o", color=colour, markersize=4, capsize=2,
                           label=label)  # fmt: skip
            line = [2 ** own["log2_product"]["mean"] / u for u in x]
            panel.plot(x, line, "--", color=colour, linewidth=0.9)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.legend(frameon=False, fontsize=8)
        dress(panel, "A recurrent matrix used T times",
              "95 % intervals; dashed: slope -1", "T", "best learning rate")  # fmt: skip
        return figure
