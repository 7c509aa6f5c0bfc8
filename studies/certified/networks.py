"""1-Lipschitz networks, built from the layers of the package."""

import dataclasses
import itertools
from typing import Any

from manifoldmuon.contrib import LocallyConnected, Shift, SpaceToDepth, orthogonal_conv2d
from manifoldmuon.manifolds import Hypersphere, Orthogonal, Stiefel
from manifoldmuon.manifolds.solvers import StiefelSolver
from manifoldmuon.modules import Bias, Flatten, GroupSort, Identity, Linear, Module

UNIT_ROWS: Any = Hypersphere(ndim=1).stacked()


@dataclasses.dataclass(frozen=True)
class Perceptron:
    """Orthonormal layers with MaxMin in between, on flattened images.

    Attributes:
      widths: the widths of the hidden layers.
    """

    widths: tuple[int, ...] = (256, 256)

    def network(self, image: tuple[int, ...], classes: int, solver: StiefelSolver) -> Module:
        """Return the network for images of this shape; `solver` computes the steps."""
        height, width, channels = image
        return _head(Flatten(3), (height * width * channels, *self.widths), classes, solver)


@dataclasses.dataclass(frozen=True)
class Local:
    """A separate orthogonal matrix for every patch, then a perceptron.

    Attributes:
      patch: pixels along each side of a patch.
      widths: the widths of the perceptron's hidden layers.
    """

    patch: int = 14
    widths: tuple[int, ...] = (256, 256)

    def network(self, image: tuple[int, ...], classes: int, solver: StiefelSolver) -> Module:
        """Return the network for images of this shape; `solver` computes the steps."""
        height, width, colours = image
        places, features = (height // self.patch, width // self.patch), self.patch**2 * colours
        patches = LocallyConnected(places, features, features, Orthogonal(solver=solver))
        net = GroupSort(2) @ Bias(features) @ patches @ SpaceToDepth(self.patch)
        return _head(Flatten(3) @ net, (height * width * colours, *self.widths), classes, solver)


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """Convolutions with stride, each followed by convolutions of the same size, then dense layers.

    A strided convolution is `SpaceToDepth` and an orthonormal matrix on the channels, as in LipNeXt
    and BRONet; the others are an orthogonal matrix after a spatial shift (LipNeXt), or
    `orthogonal_conv2d` of 3 x 3 pixels. Every layer has a bias and MaxMin.

    Attributes:
      channels: channels after each strided convolution.
      depth: convolutions after each strided one.
      patch: the stride of the first; the others have 2.
      widths: the widths of the hidden layers after all pixels.
      circular: whether convolutions are `orthogonal_conv2d` instead of shifts.
      unit_rows: whether the rows of the last layer have length 1 instead of being orthonormal.
    """

    channels: tuple[int, ...]
    depth: int
    patch: int = 2
    widths: tuple[int, ...] = (256,)
    circular: bool = False
    unit_rows: bool = False

    def network(self, image: tuple[int, ...], classes: int, solver: StiefelSolver) -> Module:
        """Return the network; `orthogonal_conv2d` uses default solvers."""
        height, width, before = image
        net: Module = Identity()
        for place, channels in enumerate(self.channels):
            stride = 2 if place else self.patch
            height, width = height // stride, width // stride
            net = _layer(channels, stride**2 * before, solver) @ SpaceToDepth(stride) @ net
            for _ in range(self.depth):
                net = self._convolution(channels, solver) @ net
            before = channels
        widths = (height * width * before, *self.widths)
        return _head(Flatten(3) @ net, widths, classes, solver, self.unit_rows)

    def _convolution(self, channels: int, solver: StiefelSolver) -> Module:
        if self.circular:
            return GroupSort(2) @ Bias(channels) @ orthogonal_conv2d(channels, 3)
        return _layer(channels, channels, solver) @ Shift()


Architecture = Perceptron | Local | Pyramid

NETWORKS: dict[str, Architecture] = {
    "fc-256": Perceptron((256, 256)),
    "fc-256-deep": Perceptron((256, 256, 256)),
    "fc-1024": Perceptron((1024, 1024)),
    "local-14-deep": Local(14, (256, 256, 256)),
    "shifts-4": Pyramid((64,), 3, patch=4),
    "shifts-6": Pyramid((64, 128, 256), 1),
    "shifts-9": Pyramid((64, 128, 256), 2),
    "shifts-6, unit rows": Pyramid((64, 128, 256), 1, unit_rows=True),
    "circular-6": Pyramid((64, 128, 256), 1, circular=True),
    "wide-10": Pyramid((128, 256, 512), 2, widths=(512,)),
}


def _linear(fan_out: int, fan_in: int, solver: StiefelSolver) -> Linear:
    square = fan_out == fan_in
    manifold = Orthogonal(solver=solver) if square else Stiefel(solver=solver)
    return Linear(fan_out, fan_in, manifold)


def _layer(fan_out: int, fan_in: int, solver: StiefelSolver) -> Module:
    return GroupSort(2) @ Bias(fan_out) @ _linear(fan_out, fan_in, solver)


def _head(
    net: Module,
    widths: tuple[int, ...],
    classes: int,
    solver: StiefelSolver,
    unit_rows: bool = False,
) -> Module:
    for before, after in itertools.pairwise(widths):
        net = _layer(after, before, solver) @ net
    last = (classes, widths[-1])
    rows = Linear(*last, UNIT_ROWS) if unit_rows else _linear(*last, solver)
    return Bias(classes) @ rows @ net
