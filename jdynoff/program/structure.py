"""Where a value is made and where it is used, followed into control flow on both sides at once.

A residual of a scanned layer is a result of the forward scan and an operand of the backward scan.
Seen from outside it is one huge stack; seen from inside, each iteration makes one small array and
the matching iteration of the other scan reads it. `match` descends both sides together, through
scans and branches, as far as they agree, and returns the tree of that descent. What is offloaded
is the leaf: the stack itself is never built.

The trap: branches. A forward `cond` that took branch 1 may be undone only by a backward `cond` that
takes branch 1 as well, so both predicates must be *provably* the same value (`corresponds`).
Without proof the descent stops there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jdynoff.program.graph import Constant, Operand, Operation, Value

Use = tuple[Operation, int]
# (producing operation, consuming operation, branch number), outermost first
Pairs = tuple[tuple[Operation, Operation, int], ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Leaf:
    """The array that is moved: made as `produced`, read as each of `consumed`."""

    produced: Operand
    consumed: tuple[Value, ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScanNode:
    """Both sides are scans of one length: one leaf, or deeper structure, per iteration."""

    producer: Operation
    # Result number of `producer`; -1 for a value that it does not return by itself, of which an
    # operand of it may still be what `consumers` read.
    result: int
    consumers: tuple[Use, ...]
    inner: Node


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CondNode:
    """Both sides are conditionals on the same predicate; None where a branch needs nothing."""

    producer: Operation
    result: int
    consumers: tuple[Use, ...]
    branches: tuple[Node | None, ...]


Node = Leaf | ScanNode | CondNode


def leaves(node: Node | None) -> list[Leaf]:
    """All leaves of a tree, left to right."""
    if node is None:
        return []
    if isinstance(node, Leaf):
        return [node]
    if isinstance(node, ScanNode):
        return leaves(node.inner)
    return [leaf for branch in node.branches for leaf in leaves(branch)]


def is_scanned(operation: Operation, operand: int) -> bool:
    """Whether operand number `operand` of a scan is sliced by it (neither constant nor carry)."""
    if operation.kind != "scan":
        return False
    return bool(operand >= operation.spec.num_consts + operation.spec.num_carry)


def is_stacked(value: Value) -> bool:
    """Whether a value is a stack that a scan builds, one slice an iteration."""
    producer = value.producer
    return (
        producer is not None and producer.kind == "scan" and value.index >= producer.spec.num_carry
    )


def match(value: Value, uses: tuple[Use, ...], pairs: tuple[Pairs, ...] = ()) -> Node | None:
    """Descends from `value` and all `uses` of it into matching control flow.

    Args:
      value: what is produced.
      uses: the operations that read it, with operand numbers; all in the region of one side.
      pairs: for each use, the operations already descended into.

    Returns:
      The tree, or None where the two sides do not agree (then `value` itself is the leaf).
    """
    producer = value.producer
    if producer is None or not uses:
        return None
    pairs = pairs or ((),) * len(uses)
    if any(use[0] is producer for use in uses):
        return None
    if is_stacked(value):
        length = producer.spec.length
        if not all(is_scanned(*use) and use[0].spec.length == length for use in uses):
            return None
        inner = _descend(
            producer.bodies[0].outputs[value.index],
            tuple(operation.bodies[0].inputs[number] for operation, number in uses),
            tuple(
                (*path, (producer, operation, 0))
                for path, (operation, _) in zip(pairs, uses, strict=True)
            ),
        )
        return ScanNode(producer, value.index, uses, inner) if inner is not None else None
    if producer.kind == "cond":
        for path, (operation, number) in zip(pairs, uses, strict=True):
            if operation.kind != "cond" or number == 0:
                return None
            if not corresponds(operation.operands[0], producer.operands[0], path):
                return None
        branches = _descend_branches(
            producer, [body.outputs[value.index] for body in producer.bodies], uses, pairs
        )
        shapes = {token_shape(branch) for branch in branches if branch is not None}
        if len(shapes) != 1:
            return None
        return CondNode(producer, value.index, uses, branches)
    return None


def _descend(
    produced: Operand, consumed: tuple[Value, ...], pairs: tuple[Pairs, ...]
) -> Node | None:
    reading = [
        (value, path)
        for value, path in zip(consumed, pairs, strict=True)
        if value.uses or value.output_positions
    ]
    if not reading:
        return None
    values = tuple(value for value, _ in reading)
    if isinstance(produced, Value) and all(
        len(value.uses) == 1 and not value.output_positions for value in values
    ):
        deeper = match(
            produced,
            tuple(value.uses[0] for value in values),
            tuple(path for _, path in reading),
        )
        if deeper is None:
            deeper = _into_branches(
                produced,
                tuple(value.uses[0] for value in values),
                tuple(path for _, path in reading),
            )
        if deeper is not None:
            return deeper
    return Leaf(produced, values)


def _descend_branches(
    producer: Operation,
    produced: Sequence[Operand],
    uses: tuple[Use, ...],
    pairs: tuple[Pairs, ...],
) -> tuple[Node | None, ...]:
    """Descends into each branch of two sides' conditionals, from what each branch has."""
    return tuple(
        _descend(
            operand,
            tuple(operation.bodies[branch].inputs[number - 1] for operation, number in uses),
            tuple(
                (*path, (producer, operation, branch))
                for path, (operation, _) in zip(pairs, uses, strict=True)
            ),
        )
        for branch, operand in enumerate(produced)
    )


def _into_branches(produced: Value, uses: tuple[Use, ...], pairs: tuple[Pairs, ...]) -> Node | None:
    """A value that some branches of the consuming side need, and the others do not.

    It is made before the producing side's conditional, which is given it as well; moved by its
    branches, nothing is moved where nobody needs it. Newer versions of JAX save an operand of a
    conditional once, instead of once for each branch.
    """
    if any(operation.kind != "cond" or number == 0 for operation, number in uses):
        return None
    for producer, given in produced.uses:
        if producer.kind != "cond" or given == 0:
            continue
        if not all(
            operation is not producer
            and len(operation.bodies) == len(producer.bodies)
            and corresponds(operation.operands[0], producer.operands[0], path)
            for path, (operation, _) in zip(pairs, uses, strict=True)
        ):
            continue
        branches = _descend_branches(
            producer, [body.inputs[given - 1] for body in producer.bodies], uses, pairs
        )
        shapes = {token_shape(branch) for branch in branches if branch is not None}
        if len(shapes) == 1 and None in branches:
            return CondNode(producer, -1, uses, branches)
    return None


def token_shape(node: Node) -> tuple[int, ...]:
    """Shape of the u32 array of tokens that stands for the value outside of the node."""
    if isinstance(node, Leaf):
        return ()
    if isinstance(node, ScanNode):
        return (node.producer.spec.length, *token_shape(node.inner))
    return next(token_shape(branch) for branch in node.branches if branch is not None)


def outer_operand(operation: Operation, branch: int, number: int) -> Operand | None:
    """What `operation` passes to input `number` of a body; None for a loop's carry."""
    if operation.kind == "cond":
        return operation.operands[number + 1]
    if operation.kind == "scan":
        spec = operation.spec
        carried = spec.num_consts <= number < spec.num_consts + spec.num_carry
        return None if carried else operation.operands[number]
    if operation.kind == "while":
        spec = operation.spec
        consts = spec.cond_num_consts if branch == 0 else spec.body_num_consts
        offset = 0 if branch == 0 else spec.cond_num_consts
        return operation.operands[offset + number] if number < consts else None
    return None


def corresponds(consumed: Operand, produced: Operand, pairs: Pairs) -> bool:
    """Whether two values, one on each side of `pairs`, are provably the same array."""
    if isinstance(consumed, Constant) or isinstance(produced, Constant):
        return consumed is produced
    if not pairs:
        return consumed is produced
    *outer, (producer, consumer, branch) = pairs
    if consumed.producer is not None or consumed.region is not consumer.bodies[branch]:
        return False
    outside = outer_operand(consumer, branch, consumed.index)
    if outside is None:
        return False
    above = tuple(outer)
    scanned = consumer.kind == "scan" and is_scanned(consumer, consumed.index)
    if produced.producer is None and produced.region is producer.bodies[branch]:
        source = outer_operand(producer, branch, produced.index)
        same_role = (producer.kind == "scan" and is_scanned(producer, produced.index)) == scanned
        if source is not None and same_role and corresponds(outside, source, above):
            return True
    for position in produced.output_positions:
        if produced.region is not producer.bodies[branch]:
            continue
        stacked = producer.kind == "scan" and position >= producer.spec.num_carry
        if (producer.kind == "cond" or (stacked and scanned)) and corresponds(
            outside, producer.results[position], above
        ):
            return True
    return False


def root(value: Operand) -> Operand:
    """Follows a loop constant or a branch operand outwards to where it is made.

    Scanned operands stay: outside they are a stack of which only a slice is meant.
    """
    while isinstance(value, Value) and value.producer is None:
        owner = value.region.owner
        if owner is None:
            return value
        branch = next(number for number, body in enumerate(owner.bodies) if body is value.region)
        if owner.kind == "scan" and is_scanned(owner, value.index):
            return value
        outside = outer_operand(owner, branch, value.index)
        if outside is None:
            return value
        value = outside
    return value


def cone(targets: Iterable[Value], known: Callable[[Value], bool]) -> list[Operation]:
    """The operations that make values of one region from known ones, in program order.

    Not recursive: a chain of elementwise operations can be longer than Python's stack is deep.
    """
    found: dict[Operation, None] = {}
    waiting = list(targets)
    while waiting:
        value = waiting.pop()
        if known(value):
            continue
        assert value.producer is not None, "a value is rebuilt from values that are known"
        if value.producer not in found:
            found[value.producer] = None
            waiting.extend(
                operand for operand in value.producer.operands if isinstance(operand, Value)
            )
    return sorted(found, key=lambda operation: operation.position)
