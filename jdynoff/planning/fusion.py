"""Which values are never built, because XLA computes them inside the loops of their readers.

XLA fuses an elementwise or layout operation into what reads its result, once for each reader, if
those run through elements too and it is cheap or has a single reader. Such a value takes no memory;
what it is computed from stays alive until its last reader instead. An activation function leaves
half a dozen arrays for the backward pass, of which XLA builds one or two.

The trap: whatever needs such a value as an array builds it: an output, a transfer, a product, a
loop or branch that reads it.
"""

from __future__ import annotations

from collections.abc import Collection

from jdynoff.planning.recompute import TRANSCENDENTAL, is_elementwise, is_reduction
from jdynoff.planning.residency import Residency
from jdynoff.program.graph import Operation, Region, Value

_LAYOUT = frozenset(["broadcast_in_dim", "iota", "pad", "rev", "slice", "transpose"])
# These only give their operand another shape.
_SAME_BYTES = frozenset(["expand_dims", "reshape", "squeeze"])
# What needs more arrays, or arrays of more bytes than so many times its own, is taken to be built:
# a sum over all layers would keep all of its terms.
_MOST_ROOTS = 8
MOST_ROOT_BYTES = 2


class Fusion:
    """The fused values of a program under one set of decisions."""

    def __init__(
        self, residency: Residency, built: Collection[Value], *, fuses: bool = True
    ) -> None:
        """Prepares; regions are analysed when they are first asked about.

        Args:
          residency: what exists at all.
          built: values that something beside their readers needs as arrays.
          fuses: whether any value is fused; else all are built.
        """
        self.fuses = fuses
        self.residency = residency
        self._built = built
        self._analysed: set[Region] = set()
        self._roots: dict[Value, dict[Value, None]] = {}  # of fused values; ordered
        self._made: dict[Value, list[Value]] = {}
        self._positions: dict[Value, list[int]] = {}

    def is_fused(self, value: Value) -> bool:
        """Whether a value is never built."""
        if value.region not in self._analysed:
            self._analyse(value.region)
        return value in self._roots

    def roots(self, fused: Value) -> list[Value]:
        """The arrays that a fused value is computed from."""
        return list(self._roots[fused])

    def made_from(self, value: Value) -> list[Value]:
        """The fused values that are computed from a value."""
        if value.region not in self._analysed:
            self._analyse(value.region)
        return self._made.get(value, [])

    def operands(self, operation: Operation) -> list[Value]:
        """The arrays that an operation needs, in the place of fused operands those behind them."""
        if operation.region not in self._analysed:
            self._analyse(operation.region)
        served = self.residency.served
        found: dict[Value, None] = {}
        for number, operand in enumerate(operation.operands):
            if isinstance(operand, Value) and (operation, number) not in served:
                found.update(self._roots.get(operand, {operand: None}))
        found.update(dict.fromkeys(self.residency.again.get(operation, ())))
        return list(found)

    def positions(self, value: Value) -> list[int]:
        """Positions that need a value, its fused readers looked through, in order.

        The end of the region counts where the value is an output.
        """
        if value not in self._positions:
            found = {
                reader.position
                for one in (value, *self.made_from(value))
                for reader in self.residency.reads(one)
            }
            ordered = sorted(found)
            if self.residency.is_output(value):
                ordered.append(len(value.region.operations))
            self._positions[value] = ordered
        return self._positions[value]

    def _analyse(self, region: Region) -> None:
        self._analysed.add(region)
        if not self.fuses:
            return
        for operation in region.operations:
            for value in operation.results:
                if not self._may_fuse(value):
                    continue
                roots = dict.fromkeys(self.operands(operation))
                needed = sum(root.nbytes for root in roots)
                if len(roots) <= _MOST_ROOTS and needed <= MOST_ROOT_BYTES * value.nbytes:
                    self._roots[value] = roots
                    for root in roots:
                        self._made.setdefault(root, []).append(value)

    def _may_fuse(self, value: Value) -> bool:
        producer, readers = value.producer, self.residency.reads(value)
        if producer is None or not readers or value in self._built:
            return False
        if not value.nbytes or self.residency.is_output(value):
            return False
        if producer.name in _SAME_BYTES:
            return not any(reader.bodies for reader in readers)
        if not (is_elementwise(producer) or producer.name in _LAYOUT):
            return False
        if producer.name in TRANSCENDENTAL and len(readers) > 1:
            return False
        return all(
            is_elementwise(reader)
            or is_reduction(reader)
            or reader.name in _LAYOUT
            or reader.name in _SAME_BYTES
            for reader in readers
        )
