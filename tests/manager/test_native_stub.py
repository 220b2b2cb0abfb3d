"""The stub describes the module that was built: same names, same parameters, same defaults."""

from __future__ import annotations

import ast
from pathlib import Path

import jdynoff
from jdynoff import _native

STUB = Path(jdynoff.__file__).parent / "_native.pyi"


def parameters_of(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {name.arg for name in names} - {"self", "cls"}


def test_the_stub_names_what_the_module_has() -> None:
    tree = ast.parse(STUB.read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    constants = {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    built = {name for name in dir(_native) if not name.startswith("_")}
    assert functions | set(classes) | constants == built

    methods = {
        node.name: node for node in classes["Manager"].body if isinstance(node, ast.FunctionDef)
    }
    built_methods = {name for name in dir(_native.Manager) if not name.startswith("_")}
    assert set(methods) - {"__new__"} == built_methods
    for name, method in methods.items():
        # What makes a manager is documented as __init__, whichever of the two is overridden.
        documented = "__init__" if name == "__new__" else name
        attribute = getattr(_native.Manager, documented)
        if isinstance(attribute, property):
            continue
        signature = attribute.__doc__.splitlines()[0]
        for parameter in parameters_of(method):
            assert f"{parameter}:" in signature, f"{name} has no parameter {parameter}: {signature}"


def test_every_handler_of_the_contract_is_there() -> None:
    assert set(_native.handlers()) == {
        "jdynoff_begin",
        "jdynoff_offload",
        "jdynoff_reload",
        "jdynoff_discard",
        "jdynoff_end",
        "jdynoff_after",
        "jdynoff_stack_open",
        "jdynoff_stack_push",
        "jdynoff_stack_seal",
        "jdynoff_stack_claim",
        "jdynoff_stack_pop",
    }
