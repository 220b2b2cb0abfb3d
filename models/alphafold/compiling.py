"""Compiler options for programs that run once, such as initialisation and checks.

XLA's code generator takes most of the time that a program of many small operations needs on a CPU.
The trap: code made with these options is slow; never use them for a train step.
"""

from __future__ import annotations

RUN_ONCE: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
