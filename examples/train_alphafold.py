"""Trains an AlphaFold-2-style model on real proteins, within a budget of memory.

    train_alphafold.py DATA ALIGNMENTS TEMPLATES OUT --config_preset initial_training
    train_alphafold.py --demo                     the trunk, in 1/8 of the memory, in minutes
    train_alphafold.py --out OUT --proteins 1dtx_A --config_preset demo

Flags are named as users of OpenFold know them. Any option of the configuration is set by its dotted
name: `--set train.learning_rate=5e-4 data.crop_size=128`. The trap: this script alone knows both
the model and `jdynoff`; with `--budget none` the same step runs as plain JAX, with the same losses.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# A checkout's own packages, after the installed ones: `models` and `examples` are not installed.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import jax
import ml_collections
from rich.console import Console
from rich.table import Table

import jdynoff
from examples import protein_sources, trunk_demo
from jdynoff.planning.budget import format_bytes
from models.alphafold.config import MODELS, PRESETS
from models.alphafold.data import DataError, SkipCounter
from models.alphafold.data.chain_data_cache import read_chain_data_cache, training_weights
from models.alphafold.data.datasets import (
    Concatenated,
    ProteinDataset,
    TableOfFiles,
    only_listed,
    openfold_folder,
)
from models.alphafold.data.registry import cache_dir
from models.alphafold.data.templates import read_obsolete_entries, read_release_dates
from models.alphafold.training import run
from models.alphafold.training.checkpoints import CheckpointError, restore_from
from models.alphafold.training.process_memory import peak_bytes
from models.alphafold.training.settings import (
    PRECISIONS,
    SettingsError,
    apply_overrides,
    parse_overrides,
    read_overrides,
    require_usable,
    training_config,
)
from models.alphafold.training.train_step import make_training
from models.alphafold.weights import WeightsError, load_params

_NO_BUDGET = "none"
_DEVICE_BUDGET = "device"
_LATEST = "latest"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = parser.add_argument_group("data, as OpenFold lays it out")
    data.add_argument("train_data_dir", type=Path, nargs="?", help="structures, .cif or .pdb")
    data.add_argument("train_alignment_dir", type=Path, nargs="?", help="<file>_<chain>/ folders")
    data.add_argument("template_mmcif_dir", type=Path, nargs="?", help="mmCIF files of templates")
    data.add_argument("output_dir", type=Path, nargs="?", help="where everything goes")
    data.add_argument(
        "max_template_date",
        nargs="?",
        type=_date,
        help="YYYY-MM-DD; later templates are left out, of all sets. Those of an experimental "
        "structure are in any case 60 days older than itself",
    )
    data.add_argument(
        "--val_data_dir",
        type=Path,
        help="structures of the validation chains; without them the first training chains are "
        "scored, and are called so",
    )
    data.add_argument("--val_alignment_dir", type=Path)
    data.add_argument("--distillation_data_dir", type=Path, help="predicted structures")
    data.add_argument("--distillation_alignment_dir", type=Path)
    data.add_argument("--distillation_prob", type=float, default=0.75)
    data.add_argument("--train_chain_data_cache_path", type=Path, help="filters and weights")
    data.add_argument("--distillation_chain_data_cache_path", type=Path)
    data.add_argument("--train_filter_path", type=Path, help="chains to use, one name a line")
    data.add_argument("--distillation_filter_path", type=Path)
    data.add_argument(
        "--template_release_dates_cache_path",
        type=Path,
        help="JSON of entry to YYYY-MM-DD, or to records with a release_date: files of later "
        "templates are not opened",
    )
    data.add_argument(
        "--obsolete_pdbs_file_path",
        type=Path,
        help="the PDB's obsolete.dat: template hits of replaced entries are read from the "
        "entries that replace them",
    )
    data.add_argument(
        "--bad_files", choices=("skip", "raise"), default="skip", help="skip counts and warns"
    )
    other = parser.add_argument_group("data without such folders")
    other.add_argument("--data", type=Path, help="one folder with mmcif_files/ and alignments/")
    other.add_argument("--proteins", help="ids, comma-separated, of the set in use")
    other.add_argument("--synthetic", action="store_true", help="invented helices")
    other.add_argument("--out", type=Path, help="output_dir where no folders are given")

    settings = parser.add_argument_group("configuration")
    settings.add_argument("--config_preset", choices=PRESETS, default="initial_training")
    settings.add_argument("--model", choices=MODELS, default="model_1")
    settings.add_argument("--experiment_config_json", type=Path, help="overrides in a file")
    settings.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", dest="overrides")
    settings.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="32",
        help="bf16 and bf16-mixed are the same: bfloat16 activations of the trunk over float32 "
        "parameters and optimiser",
    )
    settings.add_argument("--seed", type=int)
    settings.add_argument("--batch_size", type=int)
    settings.add_argument("--accumulate_grad_batches", type=int)
    settings.add_argument("--num_workers", type=int)
    settings.add_argument("--max_epochs", type=int)
    settings.add_argument("--train_epoch_len", type=int, help="samples of one epoch")
    settings.add_argument("--max_steps", type=int, help="stop when so many are done in all")
    settings.add_argument("--checkpoint_every_n_steps", type=int)
    settings.add_argument(
        "--checkpoint_every_epoch",
        action="store_true",
        default=None,
        help="besides; these checkpoints are all kept",
    )
    settings.add_argument("--validate_every_n_steps", type=int)
    settings.add_argument("--log_every_n_steps", type=int)
    settings.add_argument(
        "--log_lr", action="store_true", help="changes nothing: train/lr is always recorded"
    )

    start = parser.add_argument_group("starting point")
    start.add_argument(
        "--resume_from_ckpt",
        nargs="?",
        const=_LATEST,
        metavar="FOLDER",
        help="go on from the newest checkpoint of OUT, or of another run's folder, or from one "
        "step's folder there: state, averages, optimiser, step and position in the data",
    )
    start.add_argument(
        "--resume_model_weights_only",
        action="store_true",
        help="take only the parameters of that checkpoint, and begin at step 0",
    )
    start.add_argument("--resume_from_jax_params", type=Path, help="published .npz weights")

    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--budget",
        help='device memory of a step: "8GiB", "min" (default), "device", "none" for plain JAX; '
        f'with --demo "{trunk_demo.SHARE_BUDGET}" (default), 1/{trunk_demo.SHARE} of plain JAX',
    )
    memory.add_argument("--spill_dir", type=Path, action="append", help="where bytes may go")

    demo = parser.add_argument_group("demonstration")
    demo.add_argument("--demo", action="store_true", help="the trunk within 1/8 of plain JAX")
    demo.add_argument("--demo_steps", type=int, default=trunk_demo.Sizes.steps)
    options = parser.parse_args(argv)
    _check(parser, options)
    return options


def _date(text: str) -> str:
    """A date as it is compared with those of files."""
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no date YYYY-MM-DD") from error


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    folders = (options.train_data_dir, options.train_alignment_dir, options.template_mmcif_dir)
    if options.demo:
        return
    if options.output_dir is None and any(folders):
        parser.error("give all four of DATA ALIGNMENTS TEMPLATES OUT, or --data DIR --out OUT")
    options.output_dir = options.output_dir or options.out
    if options.output_dir is None:
        parser.error("where should the run go? give DATA ALIGNMENTS TEMPLATES OUT, or --out OUT")
    for dependent, needed in (
        ("distillation_filter_path", "distillation_data_dir"),
        ("distillation_chain_data_cache_path", "distillation_data_dir"),
        ("val_data_dir", "train_data_dir"),
        ("distillation_data_dir", "train_data_dir"),
    ):
        if getattr(options, dependent) is not None and getattr(options, needed) is None:
            parser.error(f"--{dependent} needs {needed}")
    for one, other in (
        ("val_data_dir", "val_alignment_dir"),
        ("distillation_data_dir", "distillation_alignment_dir"),
    ):
        if (getattr(options, one) is None) != (getattr(options, other) is None):
            parser.error(f"--{one} and --{other} go together")
    if options.resume_from_ckpt is not None and options.resume_from_jax_params is not None:
        parser.error("--resume_from_ckpt and --resume_from_jax_params exclude each other")
    if options.resume_model_weights_only and options.resume_from_ckpt is None:
        parser.error("--resume_model_weights_only says how to use --resume_from_ckpt; give both")


def configure(options: argparse.Namespace) -> ml_collections.ConfigDict:
    """Make the configuration that the options describe.

    Raises:
        SettingsError: an override does not fit.
    """
    config = training_config(options.config_preset, options.model, precision=options.precision)
    if options.experiment_config_json:
        apply_overrides(config, read_overrides(options.experiment_config_json))
    for name in (
        "seed",
        "batch_size",
        "accumulate_grad_batches",
        "num_workers",
        "max_epochs",
        "train_epoch_len",
        "checkpoint_every_n_steps",
        "checkpoint_every_epoch",
        "validate_every_n_steps",
        "log_every_n_steps",
    ):
        value = getattr(options, name)
        if value is not None:
            apply_overrides(config, {f"train.{name}": value})
    apply_overrides(config, parse_overrides(options.overrides))
    require_usable(config)
    return config


def gather(options: argparse.Namespace) -> tuple[run.Data, str]:
    """Find the proteins that the options name.

    Raises:
        DataError: they are not there.
    """
    counter = SkipCounter(policy=options.bad_files)
    whole, description = _training_set(options, counter)
    train = whole
    if options.train_filter_path is not None:
        train = only_listed(whole, options.train_filter_path)
        description = f"{len(train)} of {description}, listed in {options.train_filter_path}"
    if options.val_data_dir is None:
        validation, validation_name = train, "training chains (there is no validation set)"
    else:
        validation, validation_name = _folder(options, counter, "val"), "validation"
    weights = _weights(train, options.train_chain_data_cache_path)
    data: ProteinDataset = train
    if options.distillation_data_dir is not None:
        distillation: ProteinDataset = _folder(options, counter, "distillation")
        if options.distillation_filter_path is not None:
            distillation = only_listed(distillation, options.distillation_filter_path)
        distilled = _weights(distillation, options.distillation_chain_data_cache_path)
        data, weights = _mixed(
            (train, distillation), (weights, distilled), options.distillation_prob
        )
        description += f" and {len(distillation)} of {options.distillation_alignment_dir}"
    if counter.counts:
        description += f"; {counter.summary()}"
    return (
        run.Data(
            data,
            validation,
            weights,
            skip_bad_files=options.bad_files == "skip",
            validation_name=validation_name,
        ),
        description,
    )


def _training_set(options: argparse.Namespace, counter: SkipCounter) -> tuple[ProteinDataset, str]:
    """The set to learn from, without distillation, and what it is."""
    if options.train_data_dir is not None:
        folder = dataclasses.replace(_folder(options, counter, "train"), only_trainable=True)
        return folder, f"{len(folder)} chains of {options.train_alignment_dir}"
    names = tuple(options.proteins.split(",")) if options.proteins else ()
    source = protein_sources.choose(
        options.data, synthetic=options.synthetic, names=names, counter=counter
    )
    dataset = source.dataset
    if isinstance(dataset, TableOfFiles):
        dataset = dataclasses.replace(dataset, only_trainable=True, **_about_templates(options))
    return dataset, source.description


def _folder(options: argparse.Namespace, counter: SkipCounter, kind: str) -> TableOfFiles:
    """The set whose folders are the options `<kind>_data_dir` and `<kind>_alignment_dir`."""
    return openfold_folder(
        getattr(options, f"{kind}_data_dir"),
        getattr(options, f"{kind}_alignment_dir"),
        options.template_mmcif_dir,
        counter=counter,
        is_distillation=kind == "distillation",
        **_about_templates(options),
    )


def _about_templates(options: argparse.Namespace) -> dict[str, Any]:
    """What holds for the templates of every set."""
    dates = options.template_release_dates_cache_path
    obsolete = options.obsolete_pdbs_file_path
    return {
        "template_policy": options.bad_files,
        "max_template_date": options.max_template_date,
        "release_dates": None if dates is None else read_release_dates(dates),
        "obsolete": None if obsolete is None else read_obsolete_entries(obsolete),
    }


def _weights(dataset: ProteinDataset, cache_path: Path | None) -> list[float] | None:
    return (
        None if cache_path is None else training_weights(dataset, read_chain_data_cache(cache_path))
    )


def _mixed(
    parts: tuple[ProteinDataset, ProteinDataset],
    weights: tuple[Sequence[float] | None, Sequence[float] | None],
    probability: float,
) -> tuple[ProteinDataset, list[float]]:
    """Both sets as one, drawn from the second with the given probability."""
    drawn: list[float] = []
    for part, chosen, share in zip(parts, weights, (1.0 - probability, probability), strict=True):
        inside = [1.0] * len(part) if chosen is None else chosen
        drawn.extend(share * weight / sum(inside) for weight in inside)
    return Concatenated(parts), drawn


def manage(
    options: argparse.Namespace, console: Console, compiler_options: run.CompilerOptions = None
) -> Callable[[run.Step], run.Step]:
    """Make what turns the train step into the callable that runs it."""
    budget = "min" if options.budget is None else options.budget
    if budget == _NO_BUDGET:
        return lambda step: run.jitted(step, compiler_options)
    tiers = [jdynoff.Disk(str(path)) for path in options.spill_dir] if options.spill_dir else None

    def wrap(step: run.Step) -> run.Step:
        managed = jdynoff.managed(
            run.jitted(step, compiler_options),
            budget=None if budget == _DEVICE_BUDGET else budget,
            tiers=tiers,
        )
        reported: list[Any] = []

        def call(state: Any, batch: Any) -> Any:
            if not reported:
                with console.status("planning and compiling the managed step"):
                    reported.append(managed.plan(state, batch))
                plan = reported[0]
                plain = f"plain JAX: {format_bytes(plan.plain_peak_bytes)}"
                simulated = " (simulated)" if plan.plain_is_simulated else ""
                console.print(
                    f"One step needs [bold]{format_bytes(plan.device_peak_bytes)}[/] "
                    f"({plain}{simulated}) and moves {format_bytes(plan.traffic_bytes)}."
                )
            return managed(state, batch)

        return call

    return wrap


def start_from(
    options: argparse.Namespace, config: ml_collections.ConfigDict
) -> tuple[Path | None, Any]:
    """The checkpoint to go on from, and the parameters to begin with; None for neither.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not fit.
        WeightsError: the file of parameters is missing or does not fit.
    """
    if options.resume_from_jax_params is not None:
        return None, load_params(options.resume_from_jax_params, config)
    if options.resume_from_ckpt is None:
        return None, None
    newest = options.resume_from_ckpt == _LATEST
    source = options.output_dir if newest else Path(options.resume_from_ckpt)
    if not options.resume_model_weights_only:
        return source, None
    return None, restore_from(source, make_training(config).state_shapes()).state.params


def summary(result: run.Result, folder: Path, validation_name: str) -> Table:
    """What the run ended with."""
    table = Table(title="run", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if result.losses:
        first, last = trunk_demo.ends(list(result.losses))
        table.add_row("loss", f"{first:.3f} at first, {last:.3f} at last")
    if result.validation is not None:
        table.add_row("val/ is of", validation_name)
        for name, value in result.validation.scores.items():
            table.add_row(f"val/{name}", f"{value:.3f}")
    zeroed = ", ".join(f"{name}: {count}" for name, count in sorted(result.zeroed.items()))
    table.add_row("loss terms zeroed", zeroed or "none")
    for name, words in result.skipped.items():
        table.add_row(name, words)
    table.add_row("process peak", format_bytes(peak_bytes()))
    table.add_row("written to", str(folder))
    return table


def train(
    options: argparse.Namespace, console: Console, compiler_options: run.CompilerOptions = None
) -> None:
    """Train the whole model."""
    config = configure(options)
    data, description = gather(options)
    console.print(
        f"Training {config.name} ({config.preset}) on [bold]{description}[/] into "
        f"{options.output_dir}."
    )
    if options.log_lr:
        console.print("--log_lr changes nothing: the learning rate is always recorded as train/lr.")
    source, params = start_from(options, config)
    result = run.train(
        config,
        data,
        options.output_dir,
        steps=options.max_steps,
        resume_from=source,
        initial_params=params,
        wrap_step=manage(options, console, compiler_options),
        validation_compiler_options=compiler_options,
        console=console,
    )
    console.print(summary(result, options.output_dir, data.validation_name))


def demonstrate(options: argparse.Namespace, console: Console) -> None:
    """Train the trunk for a few minutes."""
    source = protein_sources.choose_for_demo(options.data, synthetic=options.synthetic)
    sizes = dataclasses.replace(trunk_demo.Sizes(), steps=options.demo_steps)
    trunk_demo.run(
        source,
        sizes=sizes,
        budget=options.budget or trunk_demo.SHARE_BUDGET,
        seed=options.seed or 0,
        console=console,
    )


def main(argv: Sequence[str] | None = None, *, compiler_options: run.CompilerOptions = None) -> int:
    """Run the example.

    Args:
        argv: the command line; None for that of the process.
        compiler_options: of XLA for training; None for the usual ones, tests compile in a hurry.

    Returns:
        The exit status: 1 after a failure that the user can mend, whose text has been printed.
    """
    options = parse(argv)
    # Compiled programs are kept, so that a second run starts at once.
    jax.config.update("jax_compilation_cache_dir", str(cache_dir().parent / "xla"))
    console = Console()
    try:
        if options.demo:
            demonstrate(options, console)
        else:
            train(options, console, compiler_options)
    except (
        DataError,
        CheckpointError,
        jdynoff.JdynoffError,
        SettingsError,
        WeightsError,
        trunk_demo.ShareExceededError,
    ) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
