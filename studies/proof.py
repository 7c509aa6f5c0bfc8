"""A classifier with a proof: trained on manifolds, certified, attacked, exported and verified.

    python -m studies.proof
    python -m studies.proof --data mnist --data-dir path/to/mnist

A network of orthonormal layers learns handwritten digits, with every matrix on its manifold. Each
test image then has a certified radius: no perturbation of smaller Euclidean length changes its
label. Attacks search for perturbations that do, which bounds the accuracy from above. Weights,
images and claims are exported to a folder. A verifier that shares no code with the package, and
does not import JAX, derives the claims again from these numbers.
"""

import argparse
import dataclasses
import functools
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import manifoldmuon as mm
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.modules import Bias, GroupSort, Linear, Module
from manifoldmuon.robustness import (
    CertificationResult,
    certified_accuracy,
    certify,
    export,
    margin_cross_entropy,
    pgd,
)
from studies.auto_attack import auto_attack
from studies.datasets import load_digits, load_mnist
from studies.program import command, errors_in_one_line, interrupted, load, parse, progress, save
from studies.records import not_written, whole

FRAMES = Stiefel(solver=ProjectedPolar())


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the training.

    Attributes:
      width: the width of the hidden layers.
      layers: the number of matrices; the last has a row for each class.
      epochs: the number of passes over the training images.
      batch: images per step.
      rate: the initial learning rate in the modular norm, with cosine decay to zero.
      offset: the offset of the loss: sqrt(2) times the target radius, or somewhat more.
      temperature: the temperature of the loss.
      radii: the radii in the table, with pixels between 0 and 1.
      attacked: the number of attacked test images.
    """

    width: int
    layers: int
    epochs: int
    batch: int
    rate: float
    offset: float
    temperature: float
    radii: tuple[float, ...]
    attacked: int


SETTINGS = {
    "digits": Settings(128, 3, 60, 100, 0.3, 0.7, 0.1, (0.1, 0.25, 0.5, 0.75, 1.0), 359),
    "mnist": Settings(256, 4, 8, 250, 0.7, 2.4, 0.25, (0.5, 1.0, 1.58, 2.0), 1000),
}


@dataclasses.dataclass(frozen=True)
class Images:
    """Flattened images with pixels between 0 and 1, and their labels."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def read(p: Any, given: argparse.Namespace) -> Images:
    """Load the chosen data set."""
    mnist = given.data == "mnist"
    found = load(p, load_mnist, given.data_dir) if mnist else load_digits(given.seed)
    train, test = (x.reshape(len(x), -1) for x in (found.train_x, found.test_x))
    return Images(train, found.train_y, test, found.test_y)


def network(pixels: int, settings: Settings) -> Module:
    """Return linear layers with orthonormal rows or columns, with biases and MaxMin in between."""
    width = settings.width
    net = GroupSort(2) @ Bias(width) @ Linear(width, pixels, FRAMES)
    for _ in range(settings.layers - 2):
        net = GroupSort(2) @ Bias(width) @ Linear(width, width, FRAMES) @ net
    return Linear(10, width, FRAMES) @ net


def train(net: Module, data: Images, settings: Settings, seed: int, bar: tqdm) -> Any:
    """Train for all epochs and return the weights; the bar shows the certified training share."""
    per_epoch = len(data.train_y) // settings.batch
    schedule = optax.cosine_decay_schedule(settings.rate, per_epoch * settings.epochs)
    optimizer = mm.optim.modular(schedule, net, momentum=0.8)
    x, y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    target = settings.offset / np.sqrt(2)

    def loss(params, rows):
        logits = net.apply(params, x[rows])
        losses = margin_cross_entropy(logits, y[rows], settings.offset, settings.temperature)
        return losses.mean(), certified_accuracy(logits, y[rows], target)

    @jax.jit
    def epoch(carry, order):
        def step(carry, rows):
            params, state = carry
            (_, certified), grads = jax.value_and_grad(loss, has_aux=True)(params, rows)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), certified

        return jax.lax.scan(step, carry, order)

    params = net.init(jax.random.key(seed))
    carry, rng = (params, optimizer.init(params)), np.random.default_rng(seed)
    for _ in range(settings.epochs):
        order = rng.permutation(len(y))[: per_epoch * settings.batch]
        carry, certified = epoch(carry, jnp.asarray(order.reshape(per_epoch, -1)))
        bar.set_postfix_str(f"certified at {target:.2f}: {float(certified.mean()):.1%}")
        bar.update(per_epoch)
    return carry[0]


def measure(
    net: Module, params: Any, data: Images, settings: Settings, seed: int, bar: tqdm
) -> tuple[CertificationResult, list[dict[str, float]]]:
    """Certify the test images, and attack the first images at every radius.

    Raises:
      AssertionError: an attack breaks a certified image.
    """
    found = certify(net, params, data.test_x, data.test_y)
    some = found.first(settings.attacked)
    f = functools.partial(net.apply, params)
    x, y = data.test_x[: settings.attacked], data.test_y[: settings.attacked]
    rows = []
    for radius in settings.radii:
        given = {"radius": radius, "key": jax.random.key(seed), "bounds": (0.0, 1.0)}
        simple = pgd(f, x, y, **given)
        strong = auto_attack(f, x, y, steps=30, targets=3, **given)
        standing = simple.robust & strong.robust
        certain = (some.predicted == y) & (some.radii >= radius)
        if np.any(certain & ~standing):
            raise AssertionError(f"an attack broke an image that is certified at {radius}")
        rows.append(
            {
                "radius": radius,
                "certified": found.accuracy(radius),
                "certified among attacked": some.accuracy(radius),
                "pgd": simple.accuracy,
                "all attacks": float(np.mean(standing)),
            }
        )
        bar.update(1)
    return found, rows


def picture(
    found: CertificationResult, rows: Sequence[dict[str, float]], attacked: int, title: str
) -> Figure:
    """Plot certified accuracy and accuracy under attack against the radius."""
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    panel = figure.subplots()
    radii = np.linspace(0, 1.25 * max(row["radius"] for row in rows), 300)
    panel.fill_between(radii, 100 * found.curve(radii), color="#0072B2", alpha=0.12, linewidth=0)
    panel.plot(radii, 100 * found.curve(radii), color="#0072B2", linewidth=2, label="certified")
    if attacked < len(found.radii):
        label = f"certified, the {attacked} attacked"
        curve = 100 * found.first(attacked).curve(radii)
        panel.plot(radii, curve, "--", color="#0072B2", linewidth=1, label=label)
    places = [row["radius"] for row in rows]
    for name, colour, mark in (("pgd", "#E69F00", "s"), ("all attacks", "#D55E00", "v")):
        left = [100 * row[name] for row in rows]
        panel.plot(
            places, left, mark, color=colour, label=f"right under {name.replace('pgd', 'PGD')}"
        )
    panel.set_xlabel("movement of the image (Euclidean, pixels between 0 and 1)")
    panel.set_ylabel("test images (%)")
    panel.set_ylim(0, 100)
    panel.set_xlim(0, radii[-1])
    panel.grid(color="#e2e2e2", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
    return figure


def table(found: CertificationResult, rows: Sequence[dict[str, float]], settings: Settings) -> str:
    """Format certified and attacked accuracies by radius."""
    lines = [
        f"clean accuracy {found.accuracy():.1%}; Lipschitz constant of all layers but the last "
        f"{found.bounds.lipschitz_inputs:.6f}",
        "",
        f"                    {settings.attacked} images, attacked",
        "radius  certified   certified  after PGD  after all",
    ]
    for row in rows:
        shares = (row[name] for name in ("certified among attacked", "pgd", "all attacks"))
        cells = "  ".join(f"{share:9.1%}" for share in shares)
        lines.append(f"{row['radius']:6.2f}  {row['certified']:9.1%}   {cells}")
    return "\n".join(lines)


def prove(folder: Path, found: CertificationResult, at: Sequence[float]) -> None:
    """Export the proof: replace files of an earlier proof, keep all other files."""
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as begun:
            export(f"{begun}/proof", found, at=at)
            folder.mkdir(exist_ok=True)
            for file in Path(begun, "proof").iterdir():
                file.replace(folder / file.name)
    except OSError as error:
        raise not_written(folder, error) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Train, certify, attack, export and verify; return the exit status."""
    what = "A classifier with a proof that others can check."
    p = command("studies.proof", what, "mnist", record="certified")
    p.add_argument("--data", choices=tuple(SETTINGS), default="digits",
                   help="what is classified (default: %(default)s)")  # fmt: skip
    p.add_argument("--epochs", type=int, metavar="N", help="default: 60 for digits, 8 for mnist")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    given = parse(p, argv, beside=(".png",))
    if importlib.util.find_spec("safetensors") is None:
        p.error("the proof is exported by safetensors: pip install -e '.[examples]'")
    proof = given.out.with_suffix("")
    if proof.exists() and not given.overwrite:
        p.error(f"{proof} exists; pass --overwrite, or another --out")
    if proof.is_file():
        p.error(f"{proof} is a file, where a folder goes; move it away, or pass another --out")
    settings = SETTINGS[given.data]
    if given.epochs is not None:
        settings = dataclasses.replace(settings, epochs=given.epochs)
    data = read(p, given)
    net = network(data.train_x.shape[1], settings)
    print(net, "\n", file=sys.stderr)
    steps = settings.epochs * (len(data.train_y) // settings.batch)
    try:
        with progress(steps) as bar:
            bar.set_description("training")
            params = train(net, data, settings, given.seed, bar)
        with progress(len(settings.radii)) as bar:
            bar.set_description("attacking")
            found, rows = measure(net, params, data, settings, given.seed, bar)
    except KeyboardInterrupt:
        return interrupted()
    with errors_in_one_line():
        prove(proof, found, settings.radii)
        title = f"{given.data}: certified and attacked"
        figure = picture(found, rows, settings.attacked, title)
        with whole(given.out.with_suffix(".png")) as temporary:
            figure.savefig(temporary, format="png")
    print(table(found, rows, settings))
    print(f"\nverifying {proof}, without JAX:")
    verdict = subprocess.run(
        [sys.executable, "-m", "manifoldmuon_verify", str(proof)], text=True, capture_output=True
    )
    print(verdict.stdout + verdict.stderr, end="")
    record = {
        "data": given.data,
        "seed": given.seed,
        "settings": dataclasses.asdict(settings),
        "clean": found.accuracy(),
        "lipschitz": found.bounds.lipschitz_inputs,
        "rows": rows,
        "verified": verdict.returncode == 0,
    }
    save(given, record)
    print("written:", given.out, given.out.with_suffix(".png"), proof)
    return verdict.returncode


if __name__ == "__main__":
    sys.exit(main())
