"""The command line: `python -m jdynoff COMMAND`, or `jdynoff COMMAND`.

Commands import what they need when they run, so that `--help` does not start JAX.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence


def _doctor(options: argparse.Namespace) -> int:
    from jdynoff import doctor

    findings = doctor.examine(options.size_mib << 20)
    if options.json:
        print(json.dumps(doctor.as_json(findings), indent=1))
    else:
        doctor.show(findings)
    return 0 if doctor.healthy(findings) else 1


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
    doctor.set_defaults(run=_doctor)
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
