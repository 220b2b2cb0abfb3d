"""How fast a machine computes and moves bytes: the figures that the cost model reckons with.

Measured once by `python -m jdynoff doctor --measure` and kept in a file, described for a GPU that
is not there, or assumed. They rank choices and never decide whether a budget holds, so an error in
them costs time and nothing else.

The trap: on a CPU the pool is in the memory of the processor that computes, so each transfer takes
processor time twice even if the disk is idle; and XLA gets the memory of its temporaries anew in
every step, whose pages the kernel must clear.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

FILE_VARIABLE = "JDYNOFF_MACHINE_FILE"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Sustained rates of one device and its link to the far tier.

    Attributes:
      name: for people.
      flops_per_second: float32 matrix products of the sizes that models have.
      memory_bytes_per_second: of the device's memory, read and written together.
      fresh_bytes_per_second: of memory that a step uses for its temporaries; infinite where a
        device keeps it from step to step.
      copy_bytes_per_second: into or out of the pool, in the time of the processor that computes;
        infinite where an engine of its own copies.
      out_bytes_per_second: to the far tier.
      back_bytes_per_second: from it.
      call_seconds: one offload or one reload, beside its bytes.
      origin: "assumed", "described", "measured on ..." or "calibrated from ... steps".
    """

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    fresh_bytes_per_second: float
    copy_bytes_per_second: float
    out_bytes_per_second: float
    back_bytes_per_second: float
    call_seconds: float
    origin: str = "assumed"

    def to_json(self) -> str:
        """The figures as a JSON object, for `read_machine`."""
        return json.dumps(dataclasses.asdict(self), indent=1)


ASSUMED_CPU = Machine("a CPU", 4e10, 1e10, 2e9, 5e9, 1e9, 1e9, 5e-6)
"""Two cores and an NVMe disk; for a machine that was not measured."""


def _gpu(name: str, flops: float, memory: float, link: float) -> Machine:
    """From a data sheet: float32 FLOP/s, memory bandwidth, and the link's rate each way.

    Two thirds of the first two are what large products and copies reach, 85% of the last.
    """
    return Machine(
        name=name,
        flops_per_second=flops * 2 / 3,
        memory_bytes_per_second=memory * 2 / 3,
        fresh_bytes_per_second=math.inf,
        copy_bytes_per_second=math.inf,
        out_bytes_per_second=link * 0.85,
        back_bytes_per_second=link * 0.85,
        call_seconds=1e-5,
        origin="described",
    )


# By what the device's name has to contain; PCIe 4.0 and 5.0 with 16 lanes.
DESCRIBED = {
    ("H200",): _gpu("NVIDIA H200", 67e12, 4.8e12, 64e9),
    ("H100",): _gpu("NVIDIA H100 SXM", 67e12, 3.35e12, 64e9),
    ("A100", "80GB"): _gpu("NVIDIA A100 80 GB", 19.5e12, 2.039e12, 32e9),
    ("A100",): _gpu("NVIDIA A100 40 GB", 19.5e12, 1.555e12, 32e9),
}
ASSUMED_GPU = dataclasses.replace(DESCRIBED[("A100",)], name="a GPU", origin="assumed")


def machine_file() -> Path:
    """Where `doctor --measure` keeps its figures: $JDYNOFF_MACHINE_FILE, or the user's cache."""
    given = os.environ.get(FILE_VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jdynoff" / "machine.json"


def read_machine(path: Path | None = None) -> Machine:
    """The measured figures of this machine's CPU; the assumed ones where nothing was measured.

    A file that cannot be read, or is of another version, counts as none: the figures only rank
    choices.
    """
    try:
        return Machine(**json.loads((path or machine_file()).read_text()))
    except (OSError, ValueError, TypeError):
        return ASSUMED_CPU


def write_machine(machine: Machine, path: Path | None = None) -> Path:
    """Keeps the figures where plans look for them; other processes see all of them or none.

    Returns:
      The file.
    """
    path = path or machine_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(machine.to_json() + "\n")
    os.replace(name, path)
    return path


def machine_of(device: Any) -> Machine:
    """The figures of a device: described, assumed for another GPU, measured for this CPU."""
    kind = str(getattr(device, "device_kind", ""))
    for words, machine in DESCRIBED.items():
        if all(word in kind for word in words):
            return machine
    return read_machine() if device.platform == "cpu" else ASSUMED_GPU
