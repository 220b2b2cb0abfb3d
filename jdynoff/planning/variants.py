"""Several programs for one step, for short paths and for long ones.

What is worth computing again depends on how much there is to store: on a short path all of it may
fit the pool. So the decisions at each price are compared on paths between the lightest and the
heaviest, and those that save most somewhere are compiled, if they keep the budget as well.

The trap: only what calls the manager is counted, and what is not counted is not learned from. Where
the program of the heaviest path moves nothing, another one stands in for it, if it takes about as
long and there is something to save.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from jdynoff.planning.by_path import Outlook, typical_paths
from jdynoff.planning.choice import Candidate, Choice
from jdynoff.planning.search import WORTHWHILE_EXTRA, Search


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """One of several programs for a step, all within its budget.

    Attributes:
      choice: what it does.
      outlook: its predicted time by path.
    """

    choice: Choice
    outlook: Outlook


def find_variants(search: Search, chosen: Choice, most: int) -> list[Variant]:
    """The programs that are the fastest on some paths, the one for the heaviest path first.

    Args:
      search: that has just chosen.
      chosen: by `search.run`.
      most: programs in all.
    """
    memory = chosen.plan.memory
    race = _Race(search, chosen)
    first = Variant(chosen, race.outlook(search.chosen, memory.total_bytes))
    if most < 2 or not search.blocks.learned or search.chosen is search.unchanged:
        return [first]
    race.enter_candidates(memory.total_bytes - memory.temporary_bytes)
    found = [first]
    if not chosen.moves and race.most_saved(found) is not None:
        stand_in = race.stand_in()
        if stand_in is None:
            return [first]
        found = [stand_in]
    while len(found) < most and (candidate := race.most_saved(found)) is not None:
        variant = race.compiled(candidate)
        if variant is not None:
            found.append(variant)
    if first not in found and not race.is_worthwhile(found, first):
        return [first]
    # Only those that are the fastest somewhere; the one for the heaviest path comes first.
    return list(dict.fromkeys(_fastest(found, path) for path in reversed(race.paths)))


class _Race:
    """Candidates on paths between the lightest and the heaviest.

    Attributes:
      paths: counters, the heaviest last.
      candidates: that keep the budget by simulation and are not compiled yet.

    The trap: what is compiled is what the search has chosen last, so candidates are entered first.
    """

    def __init__(self, search: Search, chosen: Choice) -> None:
        """Takes over the budget that was searched for."""
        self._search = search
        self._limit = chosen.plan.device_peak_bytes if search.limit is None else search.limit
        self._least = chosen.plan.min_feasible_bytes
        self.paths: list[np.ndarray] = []
        self.candidates: list[Candidate] = []
        self._outlooks: dict[int, Outlook] = {}

    def enter_candidates(self, fixed_bytes: int) -> None:
        """Decides at each price; `fixed_bytes` is what every program of the step needs."""
        search = self._search
        weight = search.model.weight
        self.paths = typical_paths(search.blocks, lambda block: weight(block.region))
        allowance = search.chosen.allowance  # as in the search: most is decided already
        for price, keeping in itertools.product(
            search.prices, (True,) if allowance is None else (True, False)
        ):
            candidate = search.decide(price, allowance, keeping)
            if candidate is None or not candidate.decisions.calls_manager():
                continue
            needed = fixed_bytes + candidate.simulated
            if needed + search.floor(candidate.decisions) <= self._limit:
                self.candidates.append(candidate)
                self._outlooks[id(candidate)] = self.outlook(candidate, needed)

    def outlook(self, candidate: Candidate, total_bytes: int) -> Outlook:
        """The predicted time of a candidate whose program needs so much."""
        search, decisions = self._search, candidate.decisions
        return Outlook(
            search.program,
            search.blocks,
            search.model,
            decisions,
            pool_bytes=max(self._limit - total_bytes, search.floor(decisions)),
            temporary_bytes=candidate.simulated,
        )

    def most_saved(self, found: list[Variant]) -> Candidate | None:
        """What saves most on some path beside those that were found; None if that is too little."""
        saved = []
        for path in self.paths:
            known = _seconds(_fastest(found, path), path)
            for candidate in self.candidates:
                new = self._outlooks[id(candidate)].predict(path).step_seconds
                saved.append((1 - new / known, candidate))
        share, best = max(saved, key=lambda pair: pair[0], default=(0.0, None))
        return best if share >= WORTHWHILE_EXTRA else None

    def stand_in(self) -> Variant | None:
        """The fastest on the heaviest path of those that move something, if it holds."""
        heaviest = self.paths[-1]
        return self.compiled(
            min(
                self.candidates,
                key=lambda one: self._outlooks[id(one)].predict(heaviest).step_seconds,
            )
        )

    def compiled(self, candidate: Candidate) -> Variant | None:
        """A candidate's program; None if that does not keep the budget."""
        search = self._search
        self.candidates.remove(candidate)
        needed = search.compile(candidate)
        if needed.total_bytes + search.floor(candidate.decisions) > self._limit:
            return None
        choice = search.choice(candidate, needed, "", self._least)
        return Variant(choice, self.outlook(candidate, needed.total_bytes))

    def is_worthwhile(self, found: list[Variant], instead_of: Variant) -> bool:
        """Whether programs take about as long on the heaviest path and save something elsewhere."""
        shares = [
            _seconds(_fastest(found, path), path) / _seconds(instead_of, path)
            for path in self.paths
        ]
        return shares[-1] <= 1 + WORTHWHILE_EXTRA and min(shares) <= 1 - WORTHWHILE_EXTRA


def _fastest(found: list[Variant], path: np.ndarray) -> Variant:
    return min(found, key=lambda variant: _seconds(variant, path))


def _seconds(variant: Variant, path: np.ndarray) -> float:
    return variant.outlook.predict(path).step_seconds
