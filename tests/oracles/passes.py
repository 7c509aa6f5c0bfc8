"""TPU matrix products on a CPU: emulate their bfloat16 passes, and count multiplications.

A TPU multiplies bfloat16 numbers and sums in float32. The `precision` of a float32 product selects
one pass (factors rounded), three (each factor split in two) or six (split in three). `on_tpu`
emulates this for any JAX function: it evaluates the function's jaxpr and rounds the factors of each
product according to the product's precision. Only the order of sums differs.
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

# JAX's names: https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision
PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}
PASSES |= {"BF16_BF16_F32": 1, "BF16_BF16_F32_X3": 3, "BF16_BF16_F32_X6": 6}
"""bfloat16 passes per float32 product; the TPU compiler estimates 1, 3.1 and 6.1 in cycles."""


def passes_of(precision: Any) -> int:
    """Return the number of passes of a float32 product with this (canonical) precision."""
    if isinstance(precision, tuple):
        return max(map(passes_of, precision))
    return 1 if precision is None else PASSES[precision.name]


def on_tpu(function: Callable, passes: int | None = None) -> Callable:
    """Return the function with float32 products rounded as on a TPU. Works under `jax.jit`.

    Args:
      function: function of trees of arrays.
      passes: 1, 3 or 6 passes for every product; None to follow each product's precision.
    """

    @functools.wraps(function)
    def rounded(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        found = _evaluate(closed, jax.tree.leaves(args), passes)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return rounded


def multiplications(
    function: Callable, *args, passes: int | None = None, taken: Callable[..., int] = max
) -> int:
    """Count the bfloat16 multiplications in a function's matrix products on a TPU.

    Skips loops with data-dependent length: the retraction has such a loop for large steps.

    Args:
      function: function to count; unused intermediate results are not counted, nor compiled.
      *args: arrays or `jax.ShapeDtypeStruct`.
      passes: see `on_tpu`.
      taken: which data-dependent branch counts: the costliest for `max`, the cheapest for `min`.
    """
    closed = jax.make_jaxpr(function)(*args)
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return _count(needed, passes, taken)


def _split(x: jax.Array, parts: int) -> list[jax.Array]:
    """Split x into float32 terms with bfloat16 values; each adds 8 bits of precision."""
    found = []
    for _ in range(parts):
        # The compiler might remove a cast to bfloat16 and back.
        found.append(jax.lax.reduce_precision(x, 8, 7))
        x = x - found[-1]
    return found


def _product(left: jax.Array, right: jax.Array, passes: int, params: dict) -> jax.Array:
    """Multiply in passes: with p parts, sum products of orders 0 to p - 1, the smallest first."""
    dot = functools.partial(jax.lax.dot_general, **params | {"precision": "highest"})
    if {left.dtype, right.dtype} != {jnp.dtype("float32")}:
        return dot(left, right)
    parts = {1: 1, 3: 2, 6: 3}[passes]
    lefts, rights = _split(left, parts), _split(right, parts)
    orders = [(i, k - i) for k in reversed(range(parts)) for i in range(k + 1)]
    return functools.reduce(jnp.add, [dot(lefts[i], rights[j]) for i, j in orders])


def _evaluate(program: Any, args: Sequence, passes: int | None) -> list:
    """Evaluate a program with `_product` for its products."""
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
    """Evaluate an equation, and recursively the programs inside it."""
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
    """Return the numbers of constants and of carried values of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # from JAX 0.12 on
    return len(constants), len(carry)


def _inner(params: dict) -> Any:
    """Return the program of a call, or None."""
    return next((params[key] for key in ("jaxpr", "call_jaxpr") if key in params), None)


def _branch(params: dict) -> Any:
    """Return a `jax.lax.platform_dependent`'s TPU branch; None if the choice depends on data."""
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
