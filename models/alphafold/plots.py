"""Draws PNG figures of a run: predicted against true structure, and training curves.

Figures are made without pyplot, so nothing global is touched and no display is needed. The trap:
a prediction and the truth lie anywhere in space; the traces are superposed before they are drawn,
and the distance maps need no superposition at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from models.alphafold.metrics import superpose

_PIXELS_PER_INCH = 110
_TRUE_COLOUR = "#3a6ea5"
_PREDICTED_COLOUR = "#d9822b"


def plot_prediction(
    path: str | Path,
    predicted_ca: ArrayLike,
    true_ca: ArrayLike,
    mask: ArrayLike,
    *,
    title: str = "",
) -> Path:
    """Draw C-alpha traces, superposed, and the two distance maps with their difference.

    Args:
        path: PNG file to write.
        predicted_ca: Angstrom. # shape=(residues, 3)
        true_ca: Angstrom. # shape=(residues, 3)
        mask: 1 where the true position is known. # shape=(residues,)
        title: of the figure.

    Returns:
        The path written.

    Raises:
        ValueError: fewer than three residues are known, or a prediction is not finite.
    """
    predicted = np.asarray(predicted_ca, dtype=np.float64)
    true = np.asarray(true_ca, dtype=np.float64)
    known = np.asarray(mask) > 0
    if known.sum() < 3:
        raise ValueError(f"only {known.sum()} residues are known; a trace needs at least three")
    if not np.isfinite(predicted).all():
        raise ValueError("the predicted positions are not all finite; the run has diverged")
    moved = superpose(predicted, true, known)
    shown_true = np.where(known[:, None], true, np.nan)
    figure = Figure(figsize=(14, 4.4), dpi=_PIXELS_PER_INCH, layout="constrained")
    figure.suptitle(title)
    trace = figure.add_subplot(1, 3, 1, projection="3d")
    trace.plot(*shown_true.T, color=_TRUE_COLOUR, linewidth=2, label="true")
    trace.plot(*moved.T, color=_PREDICTED_COLOUR, linewidth=2, label="predicted")
    trace.set_title("C-alpha trace (Å)")
    trace.legend(loc="upper left")

    true_map, predicted_map = _distance_map(shown_true), _distance_map(moved)
    limit = float(np.nanmax(true_map))
    both = np.where(np.triu(np.ones_like(true_map, dtype=bool)), true_map, predicted_map)
    axes = figure.add_subplot(1, 3, 2)
    image = axes.imshow(both, vmin=0.0, vmax=limit, cmap="viridis_r")
    axes.set_title("distances (Å): true above, predicted below")
    figure.colorbar(image, ax=axes, shrink=0.8)
    axes = figure.add_subplot(1, 3, 3)
    image = axes.imshow(predicted_map - true_map, vmin=-8.0, vmax=8.0, cmap="RdBu")
    axes.set_title("predicted minus true (Å)")
    figure.colorbar(image, ax=axes, shrink=0.8)
    return _save(figure, path)


def plot_curves(
    path: str | Path,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str = "",
    log_scale: Sequence[str] = (),
) -> Path:
    """Draw training curves, one panel a name, against the step.

    Args:
        path: PNG file to write.
        curves: name to (steps, values); values that are not finite leave gaps.
        title: of the figure.
        log_scale: names drawn with a logarithmic value axis.

    Raises:
        ValueError: there is no curve, or one whose steps and values differ in number.
    """
    if not curves:
        raise ValueError("there are no curves to draw")
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(4.8 * columns, 3.2 * rows), dpi=_PIXELS_PER_INCH, layout="constrained")
    figure.suptitle(title)
    for place, (name, (steps, values)) in enumerate(curves.items(), start=1):
        if len(steps) != len(values):
            raise ValueError(f"curve {name!r} has {len(steps)} steps and {len(values)} values")
        axes = figure.add_subplot(rows, columns, place)
        finite = np.where(np.isfinite(values), values, np.nan)
        axes.plot(steps, finite, color=_TRUE_COLOUR, marker="." if len(steps) < 30 else "")
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if name in log_scale:
            axes.set_yscale("log")
    return _save(figure, path)


def _distance_map(points: np.ndarray) -> np.ndarray:
    return np.linalg.norm(points[:, None] - points[None, :], axis=-1)


def _save(figure: Figure, path: str | Path) -> Path:
    target = Path(path)
    figure.savefig(target, format="png")
    return target
