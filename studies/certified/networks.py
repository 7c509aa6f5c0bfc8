"""1-Lipschitz networks, built from the layers of the package."""

import dataclasses
import itertools

from manifoldmuon.contrib import LocallyConnected, Shift, SpaceToDepth, orthogonal_conv2d
from manifoldmuon.manifolds import Orthogonal, Stiefel
from manifoldmuon.manifolds.solvers import StiefelSolver
from manifoldmuon.modules import Bias, Flatten, GroupSort, Linear, Module


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
class Convolutional:
    """Norm-preserving orthogonal convolutions of patches, then a perceptron.

    Attributes:
      patch: pixels along each side of a patch; the pixels of a patch are channels.
      kernel: patches along each side of a convolution's receptive field.
      depth: the number of convolutions, each with a bias and MaxMin.
      widths: the widths of the perceptron's hidden layers.
    """

    patch: int = 2
    kernel: int = 3
    depth: int = 1
    widths: tuple[int, ...] = (256, 256)

    def network(self, image: tuple[int, ...], classes: int, solver: StiefelSolver) -> Module:
        """Return the network; `solver` is used in the perceptron, convolutions use defaults."""
        height, width, colours = image
        channels = self.patch**2 * colours
        net: Module = SpaceToDepth(self.patch)
        for _ in range(self.depth):
            convolution = orthogonal_conv2d(channels, self.kernel)
            net = GroupSort(2) @ Bias(channels) @ convolution @ net
        return _head(Flatten(3) @ net, (height * width * colours, *self.widths), classes, solver)


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
class Shifting:
    """Patches, then orthogonal layers on channels between spatial shifts (LipNeXt-like).

    Attributes:
      patch: pixels along each side of a patch.
      channels: channels per patch, at least its number of pixels.
      depth: the number of layers: shift, orthogonal matrix, bias and MaxMin.
      widths: the widths of the hidden layers after the channels of all patches.
    """

    patch: int = 4
    channels: int = 64
    depth: int = 3
    widths: tuple[int, ...] = (256,)

    def network(self, image: tuple[int, ...], classes: int, solver: StiefelSolver) -> Module:
        """Return the network for images of this shape; `solver` computes the steps."""
        height, width, colours = image
        net = _layer(self.channels, self.patch**2 * colours, solver) @ SpaceToDepth(self.patch)
        for _ in range(self.depth):
            net = _layer(self.channels, self.channels, solver) @ Shift() @ net
        patches = (height // self.patch) * (width // self.patch)
        return _head(Flatten(3) @ net, (patches * self.channels, *self.widths), classes, solver)


Architecture = Perceptron | Convolutional | Local | Shifting

NETWORKS: dict[str, Architecture] = {
    "fc-256": Perceptron((256, 256)),
    "fc-256-deep": Perceptron((256, 256, 256)),
    "fc-1024": Perceptron((1024, 1024)),
    "convolution": Convolutional(),
    "convolution-deep": Convolutional(widths=(256, 256, 256)),
    "convolution-14-deep": Convolutional(14, kernel=1, widths=(256, 256, 256)),
    "local-4-deep": Local(4, (256, 256, 256)),
    "local-14-deep": Local(14, (256, 256, 256)),
    "shifts": Shifting(),
}


def _linear(fan_out: int, fan_in: int, solver: StiefelSolver) -> Linear:
    square = fan_out == fan_in
    manifold = Orthogonal(solver=solver) if square else Stiefel(solver=solver)
    return Linear(fan_out, fan_in, manifold)


def _layer(fan_out: int, fan_in: int, solver: StiefelSolver) -> Module:
    return GroupSort(2) @ Bias(fan_out) @ _linear(fan_out, fan_in, solver)


def _head(net: Module, widths: tuple[int, ...], classes: int, solver: StiefelSolver) -> Module:
    for before, after in itertools.pairwise(widths):
        net = _layer(after, before, solver) @ net
    return Bias(classes) @ _linear(classes, widths[-1], solver) @ net
