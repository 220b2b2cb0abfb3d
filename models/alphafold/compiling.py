"""Programs that run once, such as initialisation and checks: compile them quickly.

XLA's code generator takes most of the time that a program of many small operations needs on a CPU.
The trap: code made with these options is slow; never use them for a train step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

RUN_ONCE: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):
    # The emitters of fusions take half of the compiler's time; later XLA has no others.
    RUN_ONCE["xla_cpu_use_fusion_emitters"] = False


def run_once(fun: Callable[..., Any], *args: Any) -> Any:
    """Compile `fun` quickly and run it; inside another traced function just call it.

    Args:
        fun: function of arrays.
        *args: its arguments.

    Returns:
        `fun(*args)`.
    """
    # JAX takes compiler options only for a jit that is not inside another one.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
        return fun(*args)
    return jax.jit(fun, compiler_options=RUN_ONCE)(*args)
