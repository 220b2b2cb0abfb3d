"""Pairs of bodies: a producing one and the consuming one that can compute its values again.

A backward scan's body has, for each of its iterations, the arguments of the step, what its own scan
is given, and what the pair of bodies around it can get at. `Pairs` says for each input of a
producing body how the consuming body comes by it.

The trap: a consumer may have residuals of two producers. It can compute again those of one.
"""

from __future__ import annotations

import dataclasses

from jdynoff.planning.decisions import Origin, Outer, Own, Replay
from jdynoff.program.graph import Constant, Region, Value
from jdynoff.program.structure import (
    CondNode,
    Leaf,
    Node,
    ScanNode,
    is_scanned,
    outer_operand,
    root,
)

Chain = tuple[tuple[Region, Region], ...]  # producing and consuming body, outermost first
Path = tuple[tuple["ScanNode | CondNode", int], ...]  # node and branch, outermost first


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Pair:
    """A producing and a consuming body, and the pair around both."""

    chain: Chain
    path: Path
    around: Pair | None  # None: both are in one region
    replay: Replay
    held: dict[tuple[int, bool], Value]  # what the consuming operation is given
    twins: dict[Value, Value] = dataclasses.field(default_factory=dict)

    @property
    def producer(self) -> Region:
        """The body that makes the values."""
        return self.replay.producer

    @property
    def consumer(self) -> Region:
        """The body that needs them."""
        return self.replay.consumer

    def along(self, leaf: Leaf) -> Node:
        """The descent into this pair, and no other, ending at a leaf."""
        node: Node = leaf
        for (step, branch), (_, body) in zip(
            reversed(self.path), reversed(self.chain), strict=True
        ):
            assert body.owner is not None
            consumers = ((body.owner, -1),)
            if isinstance(step, ScanNode):
                node = ScanNode(step.producer, -1, consumers, node)
            else:
                count = len(step.producer.bodies)
                branches = tuple(node if number == branch else None for number in range(count))
                node = CondNode(step.producer, -1, consumers, branches)
        return node


class Pairs:
    """The pairs of one region's residuals, each after the pair around it."""

    def __init__(
        self, top: Region, small_bytes: int, taken: dict[Region, Replay], hidden: set[Value]
    ) -> None:
        """Starts without pairs.

        Args:
          top: the step's own region.
          small_bytes: a value beside both bodies may live on to the consumer if it is no larger.
          taken: consumers that compute again values of other producers.
          hidden: inputs of bodies that arrive as tokens and are passed on as such.
        """
        self.top = top
        self.small_bytes = small_bytes
        self.taken = taken
        self.hidden = hidden
        self.by_consumer: dict[Region, Pair] = {}

    def find(self, chain: Chain, path: Path) -> Pair | None:
        """The innermost pair of a chain; None if its consumer belongs to another producer."""
        producer, consumer = chain[-1]
        if consumer in self.taken:
            return None
        if consumer not in self.by_consumer:
            around = self.find(chain[:-1], path[:-1]) if len(chain) > 1 else None
            if len(chain) > 1 and around is None:
                return None
            held: dict[tuple[int, bool], Value] = {}
            assert consumer.owner is not None
            for value in consumer.inputs:
                operand = outer_operand(consumer.owner, 0, value.index)
                if isinstance(operand, Value) and value not in self.hidden:
                    held.setdefault((id(operand), is_scanned(consumer.owner, value.index)), value)
            self.by_consumer[consumer] = Pair(chain, path, around, Replay(producer, consumer), held)
        pair = self.by_consumer[consumer]
        return pair if pair.producer is producer else None

    def free_origin(self, pair: Pair, value: Value) -> Origin | None:
        """How the consumer gets an input of the producer that costs nothing; None if it does."""
        assert pair.producer.owner is not None
        operand = outer_operand(pair.producer.owner, 0, value.index)
        if operand is None:
            return None
        scanned = is_scanned(pair.producer.owner, value.index)
        if isinstance(operand, Constant):
            return Outer(operand, scanned)
        if pair.around is None and (id(operand), scanned) in pair.held:
            return Own(pair.held[id(operand), scanned])
        source = root(operand)
        if isinstance(source, Constant) or (source.region is self.top and source.producer is None):
            return Outer(source, scanned)
        if pair.around is None and _stays(operand) and operand.nbytes <= self.small_bytes:
            return Outer(operand, scanned)
        return None

    def around_operand(self, pair: Pair, value: Value) -> Value | None:
        """The value of the pair around that is, or holds, an input of the producer."""
        assert pair.producer.owner is not None
        operand = outer_operand(pair.producer.owner, 0, value.index)
        return operand if pair.around is not None and isinstance(operand, Value) else None

    def outer_origin(self, pair: Pair, value: Value) -> Origin:
        """How the consumer gets an input that the pair around, decided by now, gets at."""
        operand = self.around_operand(pair, value)
        assert operand is not None
        assert pair.around is not None
        assert pair.producer.owner is not None
        scanned = is_scanned(pair.producer.owner, value.index)
        twin = pair.around.twins.get(operand)
        if (id(twin), scanned) in pair.held:
            return Own(pair.held[id(twin), scanned])
        return Outer(operand, scanned)


def _stays(value: Value) -> bool:
    """Whether a value is an array in its region whatever is decided: no stack, no residual."""
    return value.producer is not None and value.producer.kind == "plain"
