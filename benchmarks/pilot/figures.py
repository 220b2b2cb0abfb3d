"""One figure for each part: bars of what each of its rows compares."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from benchmarks.harness import Claim

_COLUMNS = 3


def draw(parts: Mapping[str, Sequence[Claim]], directory: pathlib.Path) -> list[pathlib.Path]:
    """Draws the rows that have a series.

    Args:
      parts: rows by part.
      directory: where `PART.png` goes; made if need be.

    Returns:
      The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for part, claims in parts.items():
        shown = [claim for claim in claims if claim.series]
        if not shown:
            continue
        columns = min(_COLUMNS, len(shown))
        rows = -(-len(shown) // columns)
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(5 * columns, 2.6 * rows), squeeze=False, layout="constrained"
        )
        for place, claim in zip(axes.flat, shown, strict=False):
            names = list(claim.series)
            values = list(claim.series.values())
            bars = place.barh(names, values, color="tab:blue")
            place.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
            place.invert_yaxis()
            place.margins(x=0.15)
            place.set_title(claim.name, fontsize=8)
            place.tick_params(labelsize=7)
        for place in axes.flat[len(shown) :]:
            place.set_visible(False)
        file = directory / f"{part}.png"
        figure.savefig(file, dpi=120)
        pyplot.close(figure)
        files.append(file)
    return files
