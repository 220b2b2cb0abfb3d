"""The command line: `python -m jdynoff COMMAND`, or `jdynoff COMMAND`.

Commands import what they need when they run, so that `--help` does not start JAX.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any


def _doctor(options: argparse.Namespace) -> int:
    from jdynoff import doctor

    if options.measure:
        return _measure(options)
    findings = doctor.examine(options.size_mib << 20)
    if options.json:
        print(json.dumps(doctor.as_json(findings), indent=1))
    else:
        doctor.show(findings)
    return 0 if doctor.healthy(findings) else 1


def _measure(options: argparse.Namespace) -> int:
    from jdynoff.errors import JdynoffError
    from jdynoff.planning.machine import machine_file
    from jdynoff.runtime.measure import measure_and_keep

    try:
        machine = measure_and_keep(options.size_mib << 20)
    except (JdynoffError, OSError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print(machine.to_json() if options.json else f"{machine.to_json()}\nkept in {machine_file()}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    from rich.console import Console

    from jdynoff.errors import BudgetError, JdynoffError
    from jdynoff.plan_command import Question, load
    from jdynoff.planning.budget import format_bytes

    console = Console(stderr=bool(options.json))

    def report(size: int, plan: Any) -> None:
        needs = "does not fit" if plan is None else f"needs {format_bytes(plan.device_peak_bytes)}"
        console.print(f"{options.search}={size}: {needs}")

    try:
        question = Question(load(options.function), options.budget, options.target, options.search)
        if options.search is None:
            plan = question.plan()
        else:
            found = question.largest(report)
            if found is None:
                console.print(f"not even {options.search}=1 fits.")
                return 1
            size, plan = found
            console.print(f"largest {options.search} that fits: [bold]{size}[/]")
    except BudgetError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    except JdynoffError as error:
        console.print(f"{type(error).__name__}: {error}", markup=False, highlight=False)
        return 2
    if options.json:
        print(plan.to_json())
    else:
        console.print(plan)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="jdynoff", description="Makes an unmodified JAX train step fit a memory budget."
    )
    commands = top.add_subparsers(required=True, dest="command")
    doctor = commands.add_parser(
        "doctor",
        help="check versions, handlers, spill directory and bandwidth, and say what to fix",
        description="Checks this machine; exits with 1 if managed steps cannot work on it.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.add_argument(
        "--size-mib",
        type=_positive,
        default=128,
        metavar="N",
        help="how much to write and read when the disk is measured (default: %(default)s)",
    )
    doctor.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine's rates for the cost model, and keep them for later plans",
    )
    doctor.set_defaults(run=_doctor)
    plan = commands.add_parser(
        "plan",
        help="say whether a step fits, with which budget, and what it moves; nothing is run",
        description="Plans the step that FUNCTION makes. FUNCTION returns (step, arguments) or "
        "(step, arguments, keyword arguments); the arguments may be jax.ShapeDtypeStructs. Exits "
        "with 1 if the step does not fit.",
    )
    plan.add_argument("function", metavar="FUNCTION", help="module:function")
    plan.add_argument(
        "--budget",
        help='"8GiB", a number of bytes, or "min"; default: what the device has',
    )
    plan.add_argument("--target", help="a described GPU that need not be there, e.g. h200")
    plan.add_argument(
        "--search",
        metavar="NAME",
        help="find the largest integer NAME for which the step of FUNCTION(NAME=...) fits, to "
        "about 6 per cent",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.set_defaults(run=_plan)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments without the program's name; the process's if None.

    Returns:
        The exit status.
    """
    options = parser().parse_args(argv)
    status: int = options.run(options)
    return status
