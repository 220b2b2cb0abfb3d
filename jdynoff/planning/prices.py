"""The price of a byte: tried at a few values, then between the best ones.

At a given price what is stored and what is computed again is a minimum cut; a budget of memory
makes the right price an unknown, the multiplier of a Lagrangian (Everett 1963). Cost as a function
of it has steps where one kind of operation becomes worth computing again, so it is searched, not
solved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

PRICES = (-1.0, 0.0, 32.0, 72.0, 144.0, math.inf)
"""Of a byte in FLOPs, where the user names none: nothing but layout again; elementwise; attention
logits and outer products; projections from 128 channels, from 256; everything."""

_REFINEMENTS = 3
_LEAST, _MOST = 4.0, 4096.0  # where the geometric mean of neighbours is taken

Plan = TypeVar("Plan")


def cheapest(
    evaluate: Callable[[float], tuple[float, Plan]], prices: Sequence[float]
) -> tuple[float, Plan]:
    """The plan of least cost, over the given prices and some between the best of them.

    Args:
      evaluate: cost and plan at a price.
      prices: to begin with, in order; with a single one nothing is refined.

    Returns:
      Its cost and itself.
    """
    tried = {price: evaluate(price) for price in prices}
    if len(prices) > 1:
        for _ in range(_REFINEMENTS):
            ordered = sorted(tried)
            place = min(range(len(ordered)), key=lambda n: tried[ordered[n]][0])
            gaps = [
                (low, high)
                for low, high in itertools.pairwise(ordered)
                if ordered[place] in (low, high) and low >= 0 and _width(low, high) > 1.1
            ]
            if not gaps:
                break
            low, high = max(gaps, key=lambda gap: _width(*gap))
            between = math.sqrt(max(low, _LEAST) * min(high, _MOST))
            tried[between] = evaluate(between)
    return min(tried.values(), key=lambda found: found[0])


def _width(low: float, high: float) -> float:
    return min(high, _MOST) / max(low, _LEAST)
