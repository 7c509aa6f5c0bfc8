"""The answer: bounds for a module and, inside of it, for each of its parts."""

import dataclasses

import numpy as np

from manifoldmuon.certificates._measures import Size
from manifoldmuon.certificates._transfer import Sizes, Transfer, leaves
from manifoldmuon.modules import Module, Sharpness, Stack

_HEADER = ("module", "input", "output", "Lipschitz: input", "weights", "sharpness")


@dataclasses.dataclass(frozen=True, eq=False)
class Certificate:
    """Bounds that hold for every input and all weights that it was asked for; see `certify`.

    Movements of the input are measured in the norms of `inputs`, movements of the weights in the
    modular norm of the whole network, for the certificates of parts as well: there
    `lipschitz_weights` says what the part's own weights do to its own output. The norm of a tuple
    is the sum of its parts' norms.

    A bound that does not exist is infinite, and `reasons` says why. `print` shows the tree.

    Attributes:
      module: what the bounds are for.
      inputs: the size of the input, or a tuple of them.
      transfer: the bounds, one for each pair of an output array and an input array.
      assumptions: what no constraint ensures, and the bounds need: one line each.
    """

    module: Module
    inputs: Sizes
    transfer: Transfer
    assumptions: tuple[str, ...] = ()

    @property
    def outputs(self) -> Sizes:
        """The size of the output, or a tuple of them."""
        return self.transfer.outputs

    @property
    def input_norm(self) -> float:
        """The largest norm of an input that the bounds hold for."""
        return _sum(self.inputs)

    @property
    def output_norm(self) -> float:
        """The output is not larger than this."""
        return _sum(self.outputs)

    @property
    def lipschitz_inputs(self) -> float:
        """The norm of the derivative in the input is at most this.

        Between two inputs, `||f(x') - f(x)|| <= L ||x' - x||` if all inputs between them are
        among those that the certificate is for: always, unless a least size was declared.
        """
        return float(self.transfer.slopes.sum(axis=0).max())

    @property
    def lipschitz_weights(self) -> float:
        """The norm of the derivative in the weights is at most this.

        For a step within the radius of the certificate, `||f(w + dw) - f(w)|| <= L ||dw||` in
        the modular norm.
        """
        return float(self.transfer.weights.sum())

    @property
    def sharpness(self) -> Sharpness:
        """Bounds on the second derivatives; infinite where a bond has a kink."""
        t = self.transfer
        return Sharpness(
            float(t.alpha.sum()), float(t.beta.sum(axis=0).max()), float(t.gamma.sum(axis=0).max())
        )

    @property
    def parts(self) -> tuple["Certificate", ...]:
        """The certificates of the module's parts; of a stack, those of its copies."""
        return self.transfer.parts

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why bounds are infinite: one line for each cause."""
        return tuple(dict.fromkeys(self.transfer.reasons))

    def __str__(self) -> str:
        rows = [_HEADER, *_rows(self, "", "")]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        notes = [f"infinite: {reason}" for reason in self.reasons]
        notes += [f"assumed: {assumption}" for assumption in self.assumptions]
        return "\n".join([*lines, *notes])


def _sum(x: Sizes) -> float:
    return float(np.sum([size.most for size in leaves(x)]))


def _rows(certificate: Certificate, first: str, rest: str) -> list[tuple[str, ...]]:
    inner, outer = (_text(x) for x in (certificate.inputs, certificate.outputs))
    sharpness = "({:.3g}, {:.3g}, {:.3g})".format(*certificate.sharpness)
    slopes = f"{certificate.lipschitz_inputs:.4g}", f"{certificate.lipschitz_weights:.4g}"
    rows = [(first + certificate.module.describe(), inner, outer, *slopes, sharpness)]
    if isinstance(certificate.module, Stack):
        # One tree for all copies: what the first and the last of them have in common.
        ends = (_rows(certificate.parts[i], rest + "└─ ", rest + "   ") for i in (0, -1))
        return rows + [tuple(map(_span, *pair)) for pair in zip(*ends, strict=True)]
    for i, part in enumerate(certificate.parts):
        last = i == len(certificate.parts) - 1
        branch, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
        rows += _rows(part, rest + branch, rest + below)
    return rows


def _text(x: Sizes) -> str:
    return str(x) if isinstance(x, Size) else "(" + ", ".join(_text(part) for part in x) + ")"


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} → {last}"
