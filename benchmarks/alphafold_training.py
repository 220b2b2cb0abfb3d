"""Does the AlphaFold of `models/` learn, and does a run keep its memory?

Two runs of the whole model with the demo preset on real proteins (the developers' set, see
`models.alphafold.data.shared_proteins`; without it nothing is run). One protein of 59 residues is
learnt by heart, within half an hour on two cores. Then two epochs go through the whole set: chains
of 45 to 244 residues, zero to three recycling iterations, templates and none.

The trap: a process's peak contains the compiler's. The memory of the second run is therefore what
the peak grows by after its first steps.

    python -m benchmarks.alphafold_training [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import jdynoff
from benchmarks.harness import Claim, parse, report
from models.alphafold.data.shared_proteins import NAMES, default_root, shared_proteins
from models.alphafold.training import run
from models.alphafold.training.settings import apply_overrides, training_config

_PROTEIN = "1dtx_A"
_LDDT_CA = 75.0
_MINUTES = 30.0
_EPOCHS = 2
_CROP = 128
_WARM_UP_STEPS = 5
_MOST_GROWTH = 0.05
_RESULTS = Path("results/alphafold_training")


def _metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def overfit(folder: Path, steps: int | None) -> list[Claim]:
    """Learns one protein by heart, in plain JAX, and scores the averaged weights."""
    config = training_config("demo")
    data = run.Data(shared_proteins(names=(_PROTEIN,)), shared_proteins(names=(_PROTEIN,)))
    started = time.perf_counter()
    result = run.train(config, data, folder, steps=steps, console=Console())
    minutes = (time.perf_counter() - started) / 60
    scored = [line["val/lddt_ca"] for line in _metrics(folder) if "val/lddt_ca" in line]
    assert result.validation is not None
    return [
        Claim(
            f"{_PROTEIN} learnt by heart: lDDT-CA of the averaged weights",
            "",
            100 * scored[-1],
            "",
            _LDDT_CA,
            at_least=True,
            note=f"{len(result.losses)} steps; "
            f"GDT-TS {100 * result.validation.scores['gdt_ts']:.0f}; by validation "
            + ", ".join(f"{100 * score:.0f}" for score in scored)
            + f"; curves and structure in {folder}",
        ),
        Claim(f"{_PROTEIN}: time, compilation included", "", minutes, "minutes", _MINUTES),
    ]


def two_epochs(folder: Path, budget: str) -> list[Claim]:
    """Goes through all proteins twice with a managed step."""
    config = training_config("demo")
    apply_overrides(
        config,
        {
            "data.crop_size": _CROP,
            "model.num_recycle": 3,
            "train.max_epochs": _EPOCHS,
            "train.train_epoch_len": len(NAMES),
        },
    )
    seen: list[tuple[int, int, bool]] = []

    def wrap(step: Any) -> Any:
        managed = jdynoff.managed(run.jitted(step), budget=budget)

        def call(state: Any, batch: Any) -> Any:
            templates = bool(batch["template_mask"].any()) if "template_mask" in batch else False
            length, recycling = batch["seq_mask"][0, 0].sum(), batch["num_iter_recycling"].max()
            seen.append((int(length), int(recycling), templates))
            return managed(state, batch)

        return call

    # Not every template of a hit is in the set; what was left out is in the note.
    data = run.Data(shared_proteins())
    result = run.train(config, data, folder, wrap_step=wrap, console=Console())
    peaks = [line["system/peak_memory_bytes"] for line in _metrics(folder)]
    lengths = sorted(length for length, _, _ in seen)
    with_templates = sum(templates for _, _, templates in seen)
    recycled = {count for _, count, _ in seen}
    return [
        Claim(
            "two epochs over all proteins: steps that ended",
            "",
            float(len(result.losses)),
            "",
            float(_EPOCHS * len(NAMES)),
            at_least=True,
            note=f"{lengths[0]} to {lengths[-1]} residues; recycling {sorted(recycled)}; "
            f"templates in {with_templates} of {len(seen)} samples; loss terms zeroed: "
            f"{dict(result.zeroed) or 'none'}; left out: "
            + ", ".join(f"{kind}: {words}" for kind, words in result.skipped.items()),
        ),
        Claim(
            "two epochs: growth of the process's peak after the first steps",
            "",
            peaks[-1] / peaks[_WARM_UP_STEPS] - 1,
            "",
            _MOST_GROWTH,
            note=f"{peaks[_WARM_UP_STEPS] / 2**20:.0f} MiB after step {_WARM_UP_STEPS + 1}, "
            f"{peaks[-1] / 2**20:.0f} MiB at the end",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(__doc__, argv, budget="min")
    if default_root() is None:
        print("skipped: the shared proteins are not beside the repository")
        return 0
    folder = _RESULTS / time.strftime("%Y%m%d-%H%M%S")
    claims = two_epochs(folder / "all", options.budget)
    if not options.quick:
        claims.extend(overfit(folder / "one", None))
    return report("AlphaFold, demo preset, real proteins", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
