"""Plans that were found before, on disk: the next process compiles one program instead of three.

What is kept is how a plan was decided, not the plan: it is decided and compiled again. Unless XLA's
figure is the one that the recipe names, nothing of it is believed, its smallest budget least of
all: a file that is wrong, or of a step with other donations or flags, costs time and nothing else.

The trap: a fingerprint must not depend on the process. It is made of names, shapes, structure and
costs, since parameters of operations (whole jaxprs among them) take long to print.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from jdynoff.planning.cost import flops
from jdynoff.program.graph import Program, Value

FOLDER_VARIABLE = "JDYNOFF_PLAN_CACHE"
"""A folder for plans; "off" for none. Default: `jdynoff/plans` in the user's cache."""

_FORMAT = 4  # one more whenever decisions change their meaning


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a plan was decided.

    Attributes:
      unchanged: the step runs as it is.
      price: of a byte, in FLOPs.
      allowance: for the temporaries, in bytes; None for the least.
      keeping: whether what fits stays in XLA.
      program_bytes: XLA's figure for the program.
      least_bytes: the smallest feasible budget.
      note: of the plan.
    """

    unchanged: bool
    price: float
    allowance: int | None
    keeping: bool
    program_bytes: int
    least_bytes: int
    note: str


def fingerprint(program: Program, *conditions: Any) -> str:
    """A hash of a program and of all else that a plan depends on."""
    digest = hashlib.sha256()
    numbers: dict[int, int] = {}
    for region in program.regions:
        digest.update(f"|{region.role}".encode())
        for value in region.inputs:
            numbers[id(value)] = len(numbers)
            digest.update(str(value.aval).encode())
        for operation in region.operations:
            digest.update(operation.name.encode())
            if operation.kind == "scan":
                digest.update(str(operation.spec.length).encode())
            elif not operation.bodies:
                digest.update(str(flops(operation)).encode())
            for operand in operation.operands:
                known = numbers.get(id(operand), -1) if isinstance(operand, Value) else -2
                digest.update(known.to_bytes(4, "little", signed=True))
            for value in operation.results:
                numbers[id(value)] = len(numbers)
                digest.update(str(value.aval).encode())
        for output in region.outputs:
            digest.update(str(numbers.get(id(output), -1)).encode())
    digest.update(repr((_FORMAT, conditions)).encode())
    return digest.hexdigest()[:32]


class Remembered:
    """The folder of recipes. It never fails: what cannot be read or written is not there."""

    def __init__(self) -> None:
        """Finds the folder."""
        given = os.environ.get(FOLDER_VARIABLE)
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder: Path | None = Path(given) if given else Path(cache) / "jdynoff" / "plans"
        if given == "off":
            self.folder = None

    def read(self, key: str) -> Recipe | None:
        """The recipe of a fingerprint, if there is one."""
        if self.folder is None:
            return None
        try:
            return Recipe(**json.loads((self.folder / f"{key}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, key: str, recipe: Recipe) -> None:
        """Keeps a recipe; other processes see all of it or nothing."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.folder)
            with os.fdopen(descriptor, "w") as file:
                json.dump(dataclasses.asdict(recipe), file)
            os.replace(name, self.folder / f"{key}.json")
