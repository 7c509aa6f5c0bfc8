"""Spectral and nuclear norms: to full accuracy, or cheap enough for every training step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from manifoldmuon._internal.matrices import arrays, powers_of_two
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Vectors
from manifoldmuon._internal.matrices.lapack import map_matrices
from manifoldmuon._internal.matrices.spectral import start_vector
from manifoldmuon._internal.meshes.mesh import match_varying_axes


def power_iteration(
    x: Matrices, vector: Vectors, steps: int = 2, cold_steps: int | None = None
) -> tuple[Numbers, Vectors]:
    """Estimate `||x||_2` from below, with a vector kept between calls.

    Two steps per call suffice if x changes slowly, like an update under momentum (modular norm,
    arXiv:2405.14813, appendix A.3). Two measures keep the estimate useful if x jumps, for example
    between diagonal blocks:

    * The estimate is never below the largest norm of a row or column, so that
      `sigma <= ||x||_2 <= sqrt(min(m, n)) * sigma`, up to rounding.
    * Each call iterates the kept vector and a fixed random vector, and returns the best vector in
      their span (Rayleigh-Ritz). The iteration therefore leaves an invariant subspace of `x^T x` at
      once, and keeps a converged vector.

    Args:
      x: matrices in the trailing two axes; leading axes are independent. Any scale at which
        the largest entries are normal numbers (denormal numbers count as zero); norms of rows and
        columns count only if their squares are finite.
      vector: the right singular vector from the last call. Zeros give a cold start: a vector that x
        maps to zero is replaced by a fixed random vector. (The largest row of x would make results
        depend on the order of sums: Adam's first rows are equal.)
      steps: number of applications of `x^T x`; static. 0 only measures the vector.
      cold_steps: the same for a cold start; static. None: `steps`. A single cold start in a batch
        makes all its matrices take this number.

    Returns:
      `(sigma, vector)`: the estimate in float32 or wider, and the unit vector v in the dtype of
      `vector`. A zero matrix gives 0, a matrix that is not finite NaN; both leave the vector
      unchanged.

    Examples:
      >>> sigma, vector = power_iteration(jnp.diag(jnp.array([3.0, 1.0])), jnp.zeros(2), 8)
      >>> print(f"{sigma:.3f}")
      3.000
    """
    cold_steps = steps if cold_steps is None else cold_steps
    if min(steps, cold_steps) < 0:
        raise ValueError(f"steps must not be negative; got {steps} and {cold_steps}")
    if vector.shape != (*x.shape[:-2], x.shape[-1]):
        raise ValueError(
            f"a matrix of shape {x.shape} takes a vector of shape "
            f"{(*x.shape[:-2], x.shape[-1])}; got {vector.shape}"
        )
    if x.size == 0:
        return jnp.zeros(x.shape[:-2], jnp.promote_types(x.dtype, jnp.float32)), vector
    x = arrays.upcast(x)

    # Fast forms for XLA on CPUs: row vectors, and a single row at a time where x is transposed.
    def measure(rows):
        apart = jnp.split(rows, rows.shape[-2], axis=-2)
        return rows, jnp.concatenate([arrays.product(row, x.mT) for row in apart], axis=-2)

    def step(_, pair):
        return measure(_unit(arrays.product(_unit(pair[1]), x)))

    def restart(pair):
        lost = jnp.all(pair[1] == 0, axis=-1, keepdims=True)
        v = jnp.where(lost, start_vector(x)[..., None, :], pair[0])
        first = max(cold_steps - steps, 0)
        cold = jnp.any(lost & jnp.any(x != 0, axis=(-2, -1))[..., None, None])
        run = functools.partial(jax.lax.fori_loop, 0, first, step)
        return jax.lax.cond(cold, run, lambda pair: pair, measure(v))

    # A branch, so that only cold starts pay for it.
    v = powers_of_two.to_unit_norm(vector.astype(x.dtype), 1)[..., None, :]
    v, x = match_varying_axes((v, x))
    pair = measure(v)
    lost = jnp.any(jnp.all(pair[1] == 0, axis=-1))
    v, image = jax.lax.cond(lost, restart, lambda pair: pair, pair)
    if steps:
        images = jnp.concatenate([_unit(image), start_vector(x.mT)[..., None, :]], axis=-2)
        pair = jnp.concatenate([v, v], axis=-2), images
        v, image = _best_combination(*jax.lax.fori_loop(0, steps, step, pair, unroll=min(steps, 2)))
    v, image = v[..., 0, :], image[..., 0, :]
    scaled, exponent = powers_of_two.scale_to_unit_exponent(image, 1)
    sigma = jnp.linalg.norm(scaled, axis=-1)
    valid = jnp.isfinite(sigma) & (sigma != 0)
    kept = jnp.where(valid[..., None], v.astype(vector.dtype), vector)
    squares = x * x
    longest = jnp.maximum(*(jnp.max(jnp.sum(squares, axis), axis=-1) for axis in (-1, -2)))
    least = arrays.safe_sqrt(jnp.where(jnp.isfinite(longest), longest, 0))
    return jnp.maximum(powers_of_two.times_power_of_two(sigma, exponent), least), kept


def _best_combination(rows, images):
    """Return the unit vector v in the span of two vectors with the longest image `x v`, and `x v`.

    If the two unit vectors are nearly parallel, it is the first.
    """
    (v, w), (image, image_w) = jnp.split(rows, 2, axis=-2), jnp.split(images, 2, axis=-2)
    along = jnp.sum(v * w, axis=-1, keepdims=True)
    rest = w - along * v
    length = arrays.expand_trailing(arrays.frobenius_norm(rest, 1), 1)
    # A shorter rest consists mostly of rounding errors, and so does its image.
    enough = length > jnp.finfo(v.dtype).eps ** (1 / 3)
    share = jnp.where(enough, 1 / arrays.nonzero_or_one(length), 0)
    rest, image_rest = share * rest, share * (image_w - along * image)
    size = arrays.nonzero_or_one(jnp.max(jnp.abs(images), axis=(-2, -1), keepdims=True))
    top, bottom = image / size, image_rest / size
    twice = 2 * jnp.sum(top * bottom, axis=-1, keepdims=True)
    excess = jnp.sum(top * top - bottom * bottom, axis=-1, keepdims=True)
    # At (0, 0) the angle has no derivative.
    angle = jnp.arctan2(twice, jnp.where((twice == 0) & (excess == 0), 1, excess)) / 2
    c, s = jnp.cos(angle), jnp.sin(angle)
    return c * v + s * rest, c * image + s * image_rest


def spectral_norm(x: Matrices) -> Numbers:
    """Return the largest singular value, from the eigenvalues of the smaller Gram matrix.

    Squaring costs accuracy only in small singular values, not in the largest. For measuring: the
    decomposition is cubic in the smaller side. In training use `power_iteration`.

    Args:
      x: matrices in the trailing two axes; leading axes are independent. Any scale
        at which the norm is a normal number.

    Returns:
      Float32 or wider, the leading axes' shape; 0 for a zero or empty matrix.

    Examples:
      >>> round(float(spectral_norm(jnp.diag(jnp.array([2.0, -3.0])))), 4)
      3.0
    """
    if x.size == 0:
        return jnp.zeros(x.shape[:-2], jnp.promote_types(x.dtype, jnp.float32))
    scaled, exponent = powers_of_two.scale_to_unit_exponent(x, 2)
    high = arrays.tall(scaled)
    squares = map_matrices(jnp.linalg.eigvalsh, arrays.product(high.mT, high))
    size = arrays.safe_sqrt(jnp.maximum(squares[..., -1], 0))
    return powers_of_two.times_power_of_two(size, exponent)


def nuclear_norm(x: Matrices) -> Numbers:
    """Return the sum of the singular values, by an SVD without vectors: for measuring.

    Args:
      x: see `spectral_norm`, also for the result.

    Examples:
      >>> round(float(nuclear_norm(jnp.diag(jnp.array([2.0, -3.0])))), 4)
      5.0
    """
    scaled, exponent = powers_of_two.scale_to_unit_exponent(x, 2)
    if 0 in scaled.shape:
        return jnp.zeros(scaled.shape[:-2], scaled.dtype)
    values = map_matrices(lambda x: jnp.linalg.svd(x, compute_uv=False), scaled)
    return powers_of_two.times_power_of_two(jnp.sum(values, axis=-1), exponent)


def _unit(vector):
    """Normalise vectors of normal numbers, with a third of the program of `to_unit_norm`."""
    scaled = vector / arrays.nonzero_or_one(jnp.max(jnp.abs(vector), axis=-1, keepdims=True))
    return scaled / arrays.nonzero_or_one(jnp.linalg.norm(scaled, axis=-1, keepdims=True))
