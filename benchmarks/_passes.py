"""Products of an accelerator on a CPU: in passes of bfloat16, and how many there are.

A TPU multiplies bfloat16 numbers and sums in float32. A product of float32 factors is one pass with
both factors rounded, three passes with each split in two, or six with each split in three, as its
`precision` says. `on_tpu` makes any JAX function compute that: it evaluates the function's program
and rounds the factors of each product as the product itself says. Only the order of sums differs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.interpreters import partial_eval

# By JAX's own names: https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision
PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}
PASSES |= {"BF16_BF16_F32": 1, "BF16_BF16_F32_X3": 3, "BF16_BF16_F32_X6": 6}
"""Passes of bfloat16 in one float32 product; the TPU compiler's estimate of cycles: 1, 3.1, 6.1."""


def passes_of(precision: Any) -> int:
    """The number of passes of a float32 product of this (canonical) precision."""
    if isinstance(precision, tuple):
        return max(map(passes_of, precision))
    return 1 if precision is None else PASSES[precision.name]


def on_tpu(function: Callable, passes: int | None = None) -> Callable:
    """The function, with its float32 products rounded as on a TPU. Works under `jax.jit`.

    Args:
      function: of trees of arrays.
      passes: of every product, 1, 3 or 6; None: what the products say.
    """

    @functools.wraps(function)
    def rounded(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        found = _evaluate(closed, jax.tree.leaves(args), passes)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return rounded


def multiplications(
    function: Callable,
    *args,
    passes: int | None = None,
    taken: Callable[..., int] = max,
) -> int:
    """Multiplications of bfloat16 numbers in the products of a function, on a TPU.

    Loops whose end depends on the data are left out: the retraction has one for large steps.

    Args:
      function: what its results do not need is not counted, as it is not compiled.
      *args: arrays or `jax.ShapeDtypeStruct`.
      passes: see `on_tpu`.
      taken: where the data choose a branch, `max` counts the costliest, `min` the cheapest.
    """
    closed = jax.make_jaxpr(function)(*args)
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return _count(needed, passes, taken)


def _split(x: jax.Array, parts: int) -> list[jax.Array]:
    """bfloat16 numbers, as float32, whose sum is x to 8 bits for each part."""
    found = []
    for _ in range(parts):
        # Not a cast there and back, which the compiler may take out.
        found.append(jax.lax.reduce_precision(x, 8, 7))
        x = x - found[-1]
    return found


def _product(left: jax.Array, right: jax.Array, passes: int, params: dict) -> jax.Array:
    """A product in passes: of p parts the products of orders 0 to p - 1, the smallest first."""
    dot = functools.partial(jax.lax.dot_general, **params | {"precision": "highest"})
    if {left.dtype, right.dtype} != {jnp.dtype("float32")}:
        return dot(left, right)
    parts = {1: 1, 3: 2, 6: 3}[passes]
    lefts, rights = _split(left, parts), _split(right, parts)
    orders = [(i, k - i) for k in reversed(range(parts)) for i in range(k + 1)]
    return functools.reduce(jnp.add, [dot(lefts[i], rights[j]) for i, j in orders])


def _evaluate(program: Any, args: Sequence, passes: int | None) -> list:
    """A program's results, with `_product` for its products."""
    jaxpr = getattr(program, "jaxpr", program)
    values: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    values |= dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        found = _step(eqn, [read(atom) for atom in eqn.invars], passes)
        values |= dict(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _step(eqn, args: list, passes: int | None) -> list:
    """One equation; those that hold programs are taken apart."""
    name, params = eqn.primitive.name, eqn.params

    def run(program, *given):
        return _evaluate(program, given, passes)

    if name == "dot_general":
        taken = passes or passes_of(params["precision"])
        return [_product(args[0], args[1], taken, params)]
    if name == "scan":
        fixed, carried = _constants_and_carry(params)
        rest = fixed + carried

        def body(carry, items):
            found = run(params["jaxpr"], *args[:fixed], *carry, *items)
            return found[:carried], found[carried:]

        carry, stacked = jax.lax.scan(
            body, args[fixed:rest], args[rest:], params["length"], params["reverse"]
        )
        return [*carry, *stacked]
    if name == "while":
        tests, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        return jax.lax.while_loop(
            lambda carry: run(params["cond_jaxpr"], *args[:tests], *carry)[0],
            lambda carry: run(params["body_jaxpr"], *args[tests:start], *carry),
            args[start:],
        )
    if name == "cond":
        if (chosen := _branch(params)) is not None:
            return run(chosen, *args[1:])
        branches = [functools.partial(run, branch) for branch in params["branches"]]
        return jax.lax.switch(args[0], branches, *args[1:])
    if (inner := _inner(params)) is not None:
        return run(inner, *args)
    found = eqn.primitive.bind(*args, **params)
    return list(found) if eqn.primitive.multiple_results else [found]


def _constants_and_carry(params: dict) -> tuple[int, int]:
    """The numbers of each kind of argument of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # from JAX 0.12 on
    return len(constants), len(carry)


def _inner(params: dict) -> Any:
    """The program of a call, or None."""
    return next((params[key] for key in ("jaxpr", "call_jaxpr") if key in params), None)


def _branch(params: dict) -> Any:
    """The branch of `jax.lax.platform_dependent` on a TPU; None if the choice depends on data."""
    platforms = params.get("branches_platforms")
    if platforms is None:
        return None
    named = [names is None or "tpu" in names for names in platforms]
    return params["branches"][named.index(True)]


def _count(program: Any, passes: int | None, taken: Callable[..., int]) -> int:
    total = 0
    for eqn in getattr(program, "jaxpr", program).eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            left, right = (atom.aval for atom in eqn.invars)
            summed = [left.shape[axis] for axis in params["dimension_numbers"][0][0]]
            wide = {left.dtype, right.dtype} == {jnp.dtype("float32")}
            times = (passes or passes_of(params["precision"])) if wide else 1
            total += times * math.prod(eqn.outvars[0].aval.shape) * math.prod(summed)
        elif name == "scan":
            total += params["length"] * _count(params["jaxpr"], passes, taken)
        elif name == "cond":
            chosen = _branch(params)
            branches = params["branches"] if chosen is None else [chosen]
            total += taken(_count(branch, passes, taken) for branch in branches)
        elif name != "while" and (inner := _inner(params)) is not None:
            total += _count(inner, passes, taken)
    return total
