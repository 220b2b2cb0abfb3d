"""Devices that need not be there: compile and plan a step for one, on any machine.

XLA:GPU compiles without a GPU if it is told what the GPU is. The described device's sharding on
`jax.ShapeDtypeStruct`s makes `step.plan(...)` and `step.lower(...)` compile for it. It takes the
CUDA plugin, without CUDA itself, in an environment of its own (beside CPU runs it slows start-up):

    pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION   # jax's version

The trap: nothing can run there, so only shapes go in and only memory figures come out.
"""

from __future__ import annotations

import os
import re
from importlib import resources
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jdynoff.errors import ConfigurationError


def names() -> list[str]:
    """The devices that are described in this package."""
    files = resources.files(__package__).iterdir()
    return sorted(
        file.name.removesuffix(".txtpb") for file in files if file.name.endswith(".txtpb")
    )


def memory_bytes(target: str) -> int:
    """The device memory of a described GPU.

    Raises:
        ConfigurationError: if the target is not known.
    """
    found = re.search(r"device_memory_size: (\d+)", _description(target))
    assert found is not None
    return int(found.group(1))


def _description(target: str) -> str:
    if target not in names():
        raise ConfigurationError(
            f"there is no description of {target!r}; there are: {', '.join(names())}."
        )
    return resources.files(__package__).joinpath(f"{target}.txtpb").read_text()


def described_sharding(target: str) -> Any:
    """A sharding on one described, absent GPU.

    Args:
        target: one of `names()`.

    Returns:
        A sharding for `jax.ShapeDtypeStruct(..., sharding=...)`.

    Raises:
        ConfigurationError: if the target is not known or JAX's CUDA plugin is not installed.
    """
    text = _description(target)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        topology = topologies.get_topology_desc(
            target, "cuda", target_config=text, topology="1x1x1"
        )
    except Exception as failure:
        raise ConfigurationError(
            f"JAX cannot compile for {target} here: {failure}. Install its CUDA plugin in an "
            "environment of its own: pip install --no-deps "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
        ) from failure
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    return NamedSharding(mesh, PartitionSpec())
