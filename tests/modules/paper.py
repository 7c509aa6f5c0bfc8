"""The paper's recursive definitions (modular norm, arXiv:2405.14813), in float64 by NumPy.

An independent route to the package's results, without budgets: norm and steepest step of a module
combine the weighted norms and steps of its parts, down to the atoms, with duality maps by an SVD.
Masses and sensitivities are also combined here; only the declarations of atoms and bonds come from
the package.

`Tied` and `Param` are not covered: the paper's modules share no weights and have a forward map.
"""

import math
from typing import Any

import jax
import numpy as np

from manifoldmuon import modules
from manifoldmuon.manifolds import Euclidean


def unrolled(stack: modules.Stack) -> modules.Compose:
    """Return the copies of a stack as a composition."""
    return modules.Compose((stack.module,) * stack.copies)


def unstacked(stack: modules.Stack, tree: Any) -> tuple[Any, ...]:
    """Return the tuple of the copies' parameters."""
    return tuple(jax.tree.map(lambda x, i=i: x[i], tree) for i in range(stack.copies))


def mass(module: modules.Module) -> float:
    """Sum the masses of the parts; every copy of a stack counts."""
    match module:
        case modules.Compose() | modules.Concatenate():
            return sum(map(mass, module.modules))
        case modules.Stack():
            return module.copies * mass(module.module)
    return module.mass


def sensitivity(module: modules.Module) -> float:
    """Multiply sensitivities in a composition, add them in a tuple."""
    match module:
        case modules.Compose():
            return math.prod(map(sensitivity, module.modules))
        case modules.Concatenate():
            return sum(map(sensitivity, module.modules))
        case modules.Stack():
            return sensitivity(module.module) ** module.copies
    return module.sensitivity


def norm(module: modules.Module, weights: Any) -> float:
    """Return the modular norm; parts of mass zero do not count.

    * M2 after M1: `max(mu2 (m / m1) norm1, (m / m2) norm2)`;
    * a tuple: `max((m / m1) norm1, (m / m2) norm2)`.
    """
    if mass(module) == 0:
        return 0.0
    match module:
        case modules.Compose() if len(module.modules) == 1:
            return norm(module.modules[0], weights[0])
        case modules.Compose():
            *before, second = module.modules
            first = sensitivity(second), modules.Compose(tuple(before)), weights[:-1]
            return _heaviest(module, [first, (1.0, second, weights[-1])])
        case modules.Concatenate():
            pairs = zip(module.modules, weights, strict=True)
            return _heaviest(module, [(1.0, *pair) for pair in pairs])
        case modules.Stack():
            return norm(unrolled(module), unstacked(module, weights))
        case modules.Atom():
            return _atom_norm(module, np.asarray(weights, np.float64))
    raise NotImplementedError(type(module))


def _heaviest(module: modules.Module, parts: list[tuple[float, modules.Module, Any]]) -> float:
    return max(
        factor * mass(module) / mass(part) * norm(part, weights)
        for factor, part, weights in parts
        if mass(part)
    )


def dualize(module: modules.Module, grads: Any) -> Any:
    """Return the steepest ascent step of modular norm 1; parts of mass zero do not move.

    * M2 after M1: `(1/mu2 (m1/m) dualize1, (m2/m) dualize2)`; if M2 ignores its input (mu2 = 0),
      M1 does not move;
    * a tuple: `((m1/m) dualize1, (m2/m) dualize2)`.
    """
    if mass(module) == 0:
        return jax.tree.map(lambda grad: np.zeros(np.shape(grad)), grads)
    match module:
        case modules.Compose() if len(module.modules) == 1:
            return (dualize(module.modules[0], grads[0]),)
        case modules.Compose():
            *before, second = module.modules
            first, mu = modules.Compose(tuple(before)), sensitivity(second)
            share = mass(first) / mass(module) / mu if mu else 0.0
            moved = _times(share, dualize(first, grads[:-1]))
            last = dualize(second, grads[-1])
            return (*moved, _times(mass(second) / mass(module), last))
        case modules.Concatenate():
            return tuple(
                _times(mass(part) / mass(module), dualize(part, grads[i]))
                for i, part in enumerate(module.modules)
            )
        case modules.Stack():
            pieces = unstacked(module, grads)
            found = dualize(unrolled(module), pieces)
            return jax.tree.map(lambda *copies: np.stack(copies), *found)
        case modules.Atom():
            return _atom_step(module, np.asarray(grads, np.float64))
    raise NotImplementedError(type(module))


def _times(factor: float, tree: Any) -> Any:
    return jax.tree.map(lambda step: factor * step, tree)


def _atom_norm(atom: modules.Atom, weight: np.ndarray) -> float:
    if isinstance(atom, modules.Embed | modules.Unembed):  # the largest RMS norm of a row
        return float(np.sqrt(np.mean(weight**2, axis=-1)).max())
    return float((np.linalg.norm(weight, 2, axis=(-2, -1)) / _scale(atom)).max())


def _atom_step(atom: modules.Atom, grad: np.ndarray) -> np.ndarray:
    assert isinstance(atom.manifold, Euclidean)
    if isinstance(atom, modules.Embed | modules.Unembed):
        size = np.sqrt(np.mean(grad**2, axis=-1, keepdims=True))
        return grad / np.where(size == 0, 1, size)
    return _scale(atom) * _polar(grad)


def _scale(atom: modules.Atom) -> float:
    """Return the largest singular value at norm 1, of a matrix or of each tap of a kernel."""
    if isinstance(atom, modules.Conv2D):
        return math.sqrt(atom.out_channels / atom.in_channels) / atom.kernel**2
    assert isinstance(atom, modules.Linear)
    return math.sqrt(atom.fan_out / atom.fan_in)


def _polar(matrix: np.ndarray) -> np.ndarray:
    """Return `U V^T`; singular values of zero up to float32 rounding stay zero."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u * (s > 1e-6 * s[..., :1])[..., None, :]) @ vt
