"""The training script's command line, on a tiny model and folders of invented proteins.

The step of the tiny model is compiled once as plain JAX and once managed; whatever runs it again
takes it from JAX's cache of compiled programs. All else here compiles nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("gemmi")
pytest.importorskip("grain")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tensorboardX")

from examples import train_alphafold
from models.alphafold.compiling import RUN_ONCE
from models.alphafold.config import MODELS, PRESETS
from models.alphafold.data.residues import encode_sequence
from models.alphafold.model import expected_shapes
from models.alphafold.protein_io import prediction_structure, write_prediction
from models.alphafold.structure.residue_constants import ATOM_ORDER
from models.alphafold.training.checkpoints import FOLDER, Checkpoints

EVOFORMER = "model.embeddings_and_evoformer"
STRUCTURE = "model.heads.structure_module"
TINY = (
    f"{EVOFORMER}.evoformer_num_block=1",
    f"{EVOFORMER}.msa_channel=8",
    f"{EVOFORMER}.pair_channel=8",
    f"{EVOFORMER}.extra_msa_channel=8",
    f"{EVOFORMER}.seq_channel=8",
    f"{STRUCTURE}.num_layer=1",
    f"{STRUCTURE}.num_channel=8",
    f"{STRUCTURE}.num_head=2",
    f"{STRUCTURE}.compute_in_graph_metrics=false",
    "globals.chunk_size=none",
    "model.num_recycle=0",
    "data.crop_size=12",
    "data.max_msa_clusters=3",
    "data.max_extra_msa=4",
    "data.length_buckets=(16,)",
    "train.warmup_steps=2",
)
SEQUENCES = {
    "1aaa_A": "ACDEFGHIKLMNPQ",
    "2bbb_A": "RSTVWYACDEFGHIK",
    "3ccc_A": "LMNPQRSTVWYAC",
}
DATE = "2020-01-01"


def write_protein(path: Path, sequence: str) -> None:
    """A helix of N, CA, C, O and CB atoms."""
    length = len(sequence)
    positions = np.zeros((length, 37, 3))
    mask = np.zeros((length, 37))
    for slot, atom in enumerate(("N", "CA", "C", "O", "CB")):
        if atom == "CB":
            mask[:, ATOM_ORDER[atom]] = np.array(list(sequence)) != "G"
        else:
            mask[:, ATOM_ORDER[atom]] = 1.0
        turn = np.deg2rad(100.0) * np.arange(length) + 0.4 * slot
        radius = 2.3 if atom != "CB" else 3.3
        rise = 1.5 * np.arange(length) + 0.4 * slot
        positions[:, ATOM_ORDER[atom]] = np.stack(
            [radius * np.cos(turn), radius * np.sin(turn), rise], axis=-1
        )
    structure = prediction_structure(
        encode_sequence(sequence), positions, mask, np.full(length, 90.0)
    )
    write_prediction(path, structure)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DATA, ALIGNMENTS and TEMPLATES as OpenFold lays them out, and a place for runs."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("data", "templates"):
        (root / name).mkdir()
    for name, sequence in SEQUENCES.items():
        write_protein(root / "data" / f"{name[:4]}.pdb", sequence)
        (root / "alignments" / name).mkdir(parents=True)
        rows = [sequence, *(sequence[:n] + "A" + sequence[n + 1 :] for n in range(8))]
        (root / "alignments" / name / "hits.a3m").write_text(
            "".join(f">{number}\n{row}\n" for number, row in enumerate(rows))
        )
    return root


@pytest.fixture(autouse=True)
def compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Keeps compiled programs for this file, and what the script sets for the process to it."""
    monkeypatch.setenv("JDYNOFF_CACHE", str(folder / "cache"))
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def command(folder: Path, out: str, flags: str = "", overrides: tuple[str, ...] = ()) -> list[str]:
    folders = [str(folder / name) for name in ("data", "alignments", "templates", out)]
    model = ["--config_preset", "demo", "--model", "model_3"]
    return [*folders, DATE, *shlex.split(flags), *model, "--set", *TINY, *overrides]


def parsed(folder: Path, flags: str = "") -> argparse.Namespace:
    return train_alphafold.parse(command(folder, "out", flags))


def run(folder: Path, out: str, flags: str, overrides: tuple[str, ...] = ()) -> list[float]:
    """Run the script and return the losses recorded in its folder."""
    arguments = command(folder, out, flags, overrides)
    assert train_alphafold.main(arguments, compiler_options=RUN_ONCE) == 0
    record = (folder / out / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in record.splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def failure(folder: Path, out: str, flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the script, which fails, and return what it says in one line."""
    assert train_alphafold.main(command(folder, out, flags)) == 1
    return re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.fixture(scope="module")
def params(folder: Path) -> Path:
    """What a published file is to a published model, for the tiny one."""
    rng = np.random.default_rng(0)
    shapes = expected_shapes(train_alphafold.configure(parsed(folder)))
    drawn = {
        key: np.ones(shape) if key.endswith("//scale") else rng.normal(size=shape) / 10
        for key, shape in shapes.items()
    }
    np.savez(folder / "params.npz", **{key: np.float32(value) for key, value in drawn.items()})
    return folder / "params.npz"


NO_VALIDATION = ("train.max_validation_chains=0",)


def test_plain_managed_and_resumed_runs_have_the_same_losses(
    folder: Path, params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = f"--resume_from_jax_params {params}"
    plain = run(folder, "plain", f"{start} --max_steps 4 --budget none")
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert len(plain) == 4
    assert np.all(np.isfinite(plain))

    # Without folders for validation, training chains are scored, and are called so.
    assert "training chains (there is no validation set) after step 4" in said
    assert "nothing skipped" in said
    predictions = {path.name for path in (folder / "plain" / "predictions").iterdir()}
    assert predictions == {
        f"{name}{suffix}" for name in SEQUENCES for suffix in (".pdb", ".cif", ".png")
    }
    files = {path.name for path in (folder / "plain").iterdir()}
    assert files >= {"checkpoints", "config.json", "curves.png", "metrics.jsonl", "tensorboard"}

    managed = run(folder, "managed", f"{start} --max_steps 2 --budget min", NO_VALIDATION)
    np.testing.assert_allclose(managed, plain[:2], rtol=1e-5)
    assert re.search(r"One step needs [\d.]+ MiB", capsys.readouterr().out)
    # The record of losses is taken along into another folder.
    resumed = run(
        folder,
        "resumed",
        f"--resume_from_ckpt {folder / 'managed'} --max_steps 4 --budget none",
        NO_VALIDATION,
    )
    np.testing.assert_allclose(resumed, plain, rtol=1e-5)


def made_run(folder: Path, name: str) -> Path:
    """The folder of a run of the tiny model that has done step 1."""
    training = train_alphafold.make_training(train_alphafold.configure(parsed(folder)))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), training.state_shapes())
    with Checkpoints(folder / name / FOLDER) as checkpoints:
        checkpoints.save(state._replace(step=np.int32(1)), 1)
    return folder / name


def test_a_used_folder_is_refused_in_words(folder: Path, params: Path, capsys) -> None:
    made_run(folder, "used")
    said = failure(folder, "used", f"--resume_from_jax_params {params}", capsys)
    assert "CheckpointError: " in said
    assert "Go on from there with --resume_from_ckpt, choose another output folder" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--resume_from_jax_params NOWHERE", "WeightsError: NOWHERE cannot be read: No such file"),
        ("--resume_from_jax_params TEXT", "WeightsError: TEXT is no .npz archive of numbers"),
        ("--resume_from_jax_params ARRAY", "WeightsError: ARRAY is one array, not an .npz"),
        ("--resume_from_jax_params CUT", "WeightsError: CUT is no .npz archive of numbers"),
        ("--resume_from_jax_params OTHER", "WeightsError: OTHER does not fit model 'model_3'"),
        ("--resume_from_jax_params OBJECTS", "WeightsError: OBJECTS is no .npz archive"),
        ("--resume_from_jax_params LETTERS", "LETTERS: 'a//b' is of type <U1, not a number"),
        ("--resume_from_ckpt NOWHERE", "CheckpointError: NOWHERE is no folder"),
        ("--resume_from_ckpt", "CheckpointError: "),
        ("--resume_from_ckpt NOWHERE --resume_model_weights_only", "NOWHERE is no folder"),
        ("--experiment_config_json NOWHERE", "SettingsError: NOWHERE cannot be read"),
        ("--train_filter_path TEXT", "DataError: TEXT: names 2 chains, and none of the 3"),
        ("--template_release_dates_cache_path TEXT", "DataError: TEXT: cannot be parsed"),
        ("--log_every_n_steps 0", "SettingsError: Option train.log_every_n_steps is 0"),
    ],
)
def test_what_a_user_can_mend_is_said_in_words(
    flags: str, said: str, folder: Path, params: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "TEXT").write_text("not this")
    np.save(tmp_path / "ARRAY.npy", np.zeros(3))
    (tmp_path / "ARRAY.npy").rename(tmp_path / "ARRAY")
    (tmp_path / "CUT").write_bytes(params.read_bytes()[:-2000])
    for name, value in (("OTHER", 1.0), ("OBJECTS", [None, 3]), ("LETTERS", "x")):
        kind = object if name == "OBJECTS" else None
        np.savez(tmp_path / "made.npz", **{"a//b": np.asarray(value, dtype=kind)})
        (tmp_path / "made.npz").rename(tmp_path / name)
    for name in re.findall(r"\b[A-Z]{3,}\b", flags):
        flags = flags.replace(name, str(tmp_path / name))
    shown = failure(folder, f"failed/{tmp_path.name}", flags, capsys)
    # A long path is broken over lines, wherever the terminal ends.
    assert said.replace(" ", "") in shown.replace(" ", "").replace(f"{tmp_path}/", "")


def test_weights_alone_come_without_step_and_position(folder: Path) -> None:
    made_run(folder, "other")
    flags = f"--resume_from_ckpt {folder / 'other'}"
    options = parsed(folder, flags)
    config = train_alphafold.configure(options)
    assert train_alphafold.start_from(options, config) == (folder / "other", None)
    options = parsed(folder, f"{flags} --resume_model_weights_only")
    source, loaded = train_alphafold.start_from(options, config)
    assert source is None
    assert {leaf.shape for leaf in jax.tree.leaves(loaded)} == {
        tuple(shape) for shape in expected_shapes(config).values()
    }
    newest = parsed(folder, "--resume_from_ckpt")
    assert train_alphafold.start_from(newest, config) == (newest.output_dir, None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--resume_from_ckpt x --resume_from_jax_params y", "exclude each other"),
        ("--resume_model_weights_only", "give both"),
        ("--val_data_dir x", "go together"),
        ("--distillation_chain_data_cache_path x", "needs distillation_data_dir"),
        ("--precision 16-mixed", "invalid choice"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, said, folder: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        parsed(folder, flags)
    assert said in capsys.readouterr().err


def test_a_date_that_is_none_is_refused(folder: Path, capsys) -> None:
    arguments = ["soon" if word == DATE else word for word in command(folder, "out")]
    with pytest.raises(SystemExit):
        train_alphafold.parse(arguments)
    assert "'soon' is no date YYYY-MM-DD" in capsys.readouterr().err


def test_flags_of_openfold_reach_the_configuration(folder: Path) -> None:
    flags = (
        "--checkpoint_every_epoch --log_every_n_steps 7 --log_lr --precision bf16-mixed "
        "--train_epoch_len 12 --seed 3"
    )
    config = train_alphafold.configure(parsed(folder, flags))
    assert config.train.checkpoint_every_epoch
    assert (config.train.log_every_n_steps, config.train.seed) == (7, 3)
    assert config.model.global_config.bfloat16
    assert not train_alphafold.configure(parsed(folder)).train.checkpoint_every_epoch
    for preset in PRESETS:
        for model in MODELS:
            flags = ["--config_preset", preset, "--model", model, "--out", "x"]
            options = train_alphafold.parse(flags)
            assert train_alphafold.configure(options).name == model


def test_every_set_has_the_runs_rules_about_templates(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "dates.json").write_text('{"1ABC": "2019-05-05"}')
    others = " ".join(
        f"--{kind}_data_dir {folder / 'data'} --{kind}_alignment_dir {folder / 'alignments'}"
        for kind in ("val", "distillation")
    )
    (tmp_path / "obsolete.dat").write_text("OBSLTE    31-JUL-94 116L     216L\n")
    flags = (
        f"{others} --bad_files raise --template_release_dates_cache_path {tmp_path}/dates.json "
        f"--obsolete_pdbs_file_path {tmp_path}/obsolete.dat"
    )
    data, _ = train_alphafold.gather(parsed(folder, flags))
    assert not data.skip_bad_files
    assert data.validation_name == "validation"
    assert len(data.train.parts) == 2
    for dataset in (*data.train.parts, data.validation):
        assert dataset.max_template_date == DATE
        assert dataset.template_policy == "raise"
        assert dataset.release_dates == {"1abc": "2019-05-05"}
        assert dataset.obsolete == {"116l": "216l"}
    # The paper's filters are for experimental structures that are learnt from.
    assert [part.only_trainable for part in (*data.train.parts, data.validation)] == [
        True, False, False,
    ]  # fmt: skip


def test_filters_and_weights_are_of_the_set_they_are_given_for(
    folder: Path, tmp_path: Path
) -> None:
    def cache(name: str, **cluster_sizes: int) -> Path:
        records = {
            chain: {"seq": SEQUENCES[chain] * 40, "cluster_size": size}
            for chain, size in cluster_sizes.items()
        }
        (tmp_path / name).write_text(json.dumps(records))
        return tmp_path / name

    (tmp_path / "filter.txt").write_text("3ccc_A\n1aaa_A\n9zzz_Q\n")
    (tmp_path / "distilled.txt").write_text("1aaa_A\n2bbb_A\n")
    trained = cache("train.json", **{"1aaa_A": 1, "3ccc_A": 3})
    distilled = cache("distilled.json", **{"1aaa_A": 1, "2bbb_A": 2, "3ccc_A": 2})
    flags = (
        f"--distillation_data_dir {folder / 'data'} --distillation_prob 0.5 "
        f"--distillation_alignment_dir {folder / 'alignments'} "
        f"--train_filter_path {tmp_path}/filter.txt --train_chain_data_cache_path {trained} "
        f"--distillation_chain_data_cache_path {distilled} "
        f"--distillation_filter_path {tmp_path}/distilled.txt"
    )
    data, description = train_alphafold.gather(parsed(folder, flags))
    assert [data.train.name(index) for index in range(4)] == [
        "1aaa_A", "3ccc_A", "1aaa_A", "2bbb_A",
    ]  # fmt: skip
    np.testing.assert_allclose(data.weights, [0.375, 0.125, 1 / 3, 1 / 6])
    assert "2 of 3 chains" in description
    # Training chains are scored as training sees them.
    assert [data.validation.name(index) for index in range(2)] == ["1aaa_A", "3ccc_A"]


def test_bad_templates_are_in_the_summary(folder: Path) -> None:
    result = dataclasses.make_dataclass("Result", ["losses", "validation", "zeroed", "skipped"])
    made = result((), None, {}, {"proteins": "nothing skipped", "templates": "3 skipped (cut: 3)"})
    table = train_alphafold.summary(made, folder, "validation")
    cells = [list(column.cells) for column in table.columns]
    assert dict(zip(*cells, strict=True))["templates"] == "3 skipped (cut: 3)"
