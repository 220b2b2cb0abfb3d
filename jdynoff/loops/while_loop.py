"""`jdynoff.while_loop`: `jax.lax.while_loop` with a reverse-mode derivative.

The loop is traced by `jax.lax.while_loop` itself, which checks the types, promotes weak ones,
finds the traced values that the two functions capture and makes them operands. Its one equation
is then bound as jdynoff's primitive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

from jdynoff import jax_compat
from jdynoff.loops.primitive import while_p

Carry = TypeVar("Carry")


def while_loop(
    cond_fun: Callable[[Carry], Any], body_fun: Callable[[Carry], Carry], init_val: Carry
) -> Carry:
    """Runs `body_fun` while `cond_fun` holds; reverse-mode differentiable.

    Equivalent to `jax.lax.while_loop`, and to

        val = init_val
        while cond_fun(val):
            val = body_fun(val)
        return val

    The number of trips depends on data and has no bound. In the backward pass `jax.grad` needs
    what each trip has computed: that goes onto a stack of jdynoff's buffer manager, in memory and
    then on disk, not into arrays of a fixed size. Nothing is kept where no gradient is taken.
    What does not change from trip to trip, such as captured weights, is not kept either.

    Args:
      cond_fun: the predicate: a value as `init_val` to bool[]. It must not depend on an axis that
        `jax.vmap` maps. Like `body_fun`, it may capture traced values.
      body_fun: one trip: a value as `init_val` to another of the same structure and types. Wrap it
        in `jax.checkpoint` to keep only the carried values and compute the rest again.
      init_val: arrays in any pytree; integers, booleans and PRNG keys have no gradient.

    Returns:
      The value for which `cond_fun` is false.

    Raises:
      TransformError: if the loop is differentiated in forward mode or twice, or mapped with a
        predicate that differs between lanes.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return lax.while_loop(cond_fun, body_fun, init_val)
    leaves, structure = jax.tree.flatten(init_val)
    out_structure: list[Any] = []

    def flat(*values: Any) -> list[Any]:
        result = lax.while_loop(cond_fun, body_fun, jax.tree.unflatten(structure, values))
        results, found = jax.tree.flatten(result)
        out_structure[:] = [found]
        return results

    closed = jax.make_jaxpr(flat)(*leaves)
    results = jax_compat.evaluate_with(closed, leaves, _bind)
    return jax.tree.unflatten(out_structure[0], results)


def _bind(eqn: Any, inputs: list[Any]) -> list[Any]:
    spec = jax_compat.while_spec(eqn)
    if spec is None:
        return jax_compat.bind_equation(eqn, inputs)
    # Not in the equation's context: the line that it knows is the one above.
    return while_p.bind(
        *inputs,
        cond_nconsts=spec.cond_num_consts,
        body_nconsts=spec.body_num_consts,
        cond_jaxpr=spec.cond,
        body_jaxpr=spec.body,
    )
