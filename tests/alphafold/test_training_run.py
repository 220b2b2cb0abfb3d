"""A whole run on a tiny model: resuming, accumulation, bad labels, validation, files."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("gemmi")
pytest.importorskip("grain")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tensorboardX")

from examples.protein_sources import synthetic_proteins
from models.alphafold.compiling import RUN_ONCE
from models.alphafold.data.datasets import InMemory
from models.alphafold.data.errors import DataError, SkipCounter
from models.alphafold.training import run, train_step, validation
from models.alphafold.training.checkpoints import CheckpointError
from models.alphafold.training.settings import training_config
from models.alphafold.training.train_step import make_training, update_average
from tests.alphafold.small_model import random_params, small_config

PROTEINS = InMemory(synthetic_proteins())


def tiny_config(**train):
    config = training_config("demo")
    small = small_config(deterministic=False)
    for section in ("model", "data"):
        config[section].update(small[section])
    config.model.num_recycle = 1
    config.model.embeddings_and_evoformer.evoformer_num_block = 1
    config.model.heads.structure_module.num_layer = 1
    config.data.update({"crop_size": 12, "length_buckets": (80,)})
    config.train.update({"checkpoint_every_n_steps": 2, "warmup_steps": 2, **train})
    return config


@dataclasses.dataclass
class CompiledOnce:
    """Runs every run's step with one program; the runs have one configuration."""

    program: object = None

    def __call__(self, step):
        def call(state, batch):
            if self.program is None:
                lowered = jax.jit(step).lower(state, batch)
                self.program = lowered.compile(compiler_options=RUN_ONCE)
            return self.program(state, batch)

        return call


@pytest.fixture(scope="module")
def two_samples():
    """A step that averages two samples, and its program."""
    return tiny_config(accumulate_grad_batches=2), CompiledOnce()


@functools.cache
def made_params():
    """Parameters of every tiny model, without compiling an initialiser."""
    return random_params(make_training(tiny_config()).state_shapes().params)


def train(config, *args, **options):
    return run.train(config, *args, initial_params=made_params(), **options)


def equal(first, second) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_an_interrupted_run_equals_one_that_was_not(two_samples, tmp_path) -> None:
    config, compiled = two_samples
    data = run.Data(PROTEINS)
    whole = train(config, data, tmp_path / "a", steps=4, wrap_step=compiled)
    first = train(config, data, tmp_path / "b", steps=2, wrap_step=compiled)
    second = run.train(
        config, data, tmp_path / "b", steps=4, resume_from=tmp_path / "b", wrap_step=compiled
    )
    assert whole.losses == first.losses + second.losses
    equal(whole.state, second.state)
    lines = (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert (tmp_path / "b" / "curves.png").is_file()


def batch_of(config, labels=None):
    """Two samples of the run's examples; `labels` replaces true positions of the first."""
    spec = make_training(config).spec
    loader = run.ExampleLoader(
        PROTEINS,
        run.FeatureConfig.from_config(config, recycling_axis=True),
        run.LoaderConfig(seed=0),
    )
    stacked = run.stack_examples([next(loader), next(loader)])
    loader.close()
    batch = {name: np.array(stacked[name]) for name in spec}
    if labels is not None:
        batch["backbone_affine_tensor"][0] = labels
    return batch


def test_a_term_that_is_not_finite_is_counted_and_spares_the_parameters(two_samples) -> None:
    config, compiled = two_samples
    training = make_training(config)
    step = compiled(training.step)
    state, metrics = step(training.state_of(made_params()), batch_of(config, labels=np.nan))
    assert float(metrics["zeroed/fape"]) == 1.0
    assert float(metrics["zeroed/masked_msa"]) == 0.0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state))


def test_one_step_moves_the_average_by_the_rest_of_its_decay(two_samples) -> None:
    config, compiled = two_samples
    training = make_training(config)
    before = training.state_of(made_params())
    after, metrics = compiled(training.step)(before, batch_of(config))
    decay = config.train.ema_decay
    expected = update_average(before.ema_params, after.params, decay)
    moved = jax.tree.map(
        lambda new, old: float(jnp.abs(new - old).max()), after.params, before.params
    )
    assert max(jax.tree.leaves(moved)) > 0
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7),
        after.ema_params,
        expected,
    )
    assert float(metrics["lr"]) > 0


def test_the_weight_of_fape_scales_fape_alone(monkeypatch) -> None:
    def loss(params, rng, features):
        structure = {
            "backbone_fape": params["a"]["w"],
            "sidechain_fape": jnp.asarray(7.0),
            "chi_loss": jnp.asarray(11.0),
            "angle_norm_loss": jnp.asarray(13.0),
            "violation_loss": jnp.asarray(17.0),
            "final_atom_positions": features["all_atom_positions"][0],
        }
        return None, {"structure_module": structure, "distogram": {"loss": jnp.asarray(2.0)}}

    model = train_step.Model(None, None, loss)
    monkeypatch.setattr(train_step, "make_model", lambda config: model)

    def unscaled(weight: float) -> float:
        training = make_training(tiny_config(fape_weight=weight))
        batch = {name: jnp.ones(leaf.shape, leaf.dtype) for name, leaf in training.spec.items()}
        state = training.state_of({"a": {"w": jnp.asarray(5.0)}})
        return float(training.step(state, batch)[1]["unscaled_loss"])

    fape = 0.5 * (5.0 + 7.0)
    assert unscaled(3.0) - unscaled(1.0) == pytest.approx(2.0 * fape)
    assert unscaled(0.0) == pytest.approx(unscaled(1.0) - fape)


def test_averages_follow_the_formula() -> None:
    average = update_average({"a": {"w": jnp.ones(2)}}, {"a": {"w": jnp.zeros(2)}}, 0.999)
    np.testing.assert_allclose(average["a"]["w"], 0.999, rtol=1e-6)


def counting(step):
    """A step that learns nothing, at once."""

    def call(state, batch):
        return state._replace(step=state.step + 1), {"loss": jnp.asarray(1.0)}

    return call


def saved_steps(folder) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_a_new_run_into_a_used_folder_is_refused_before_it_harms_anything(tmp_path) -> None:
    config, data = tiny_config(), run.Data(PROTEINS)
    train(config, data, tmp_path, steps=2, wrap_step=counting)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    changed = tiny_config(learning_rate=0.5)
    with pytest.raises(CheckpointError, match="newest of step 2, and a new run would mix"):
        train(changed, data, tmp_path, steps=1, wrap_step=counting)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_a_run_goes_on_from_another_runs_folder_with_everything(tmp_path) -> None:
    config, data = tiny_config(), run.Data(PROTEINS)
    train(config, data, tmp_path / "a", steps=4, wrap_step=counting)
    options = {"steps": 5, "wrap_step": counting}
    at_two = tmp_path / "a" / "checkpoints" / "2"
    second = run.train(config, data, tmp_path / "b", resume_from=at_two, **options)
    assert len(second.losses) == 3
    assert saved_steps(tmp_path / "b") == [4, 5]
    lines = (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    # The other run's later checkpoints would hide those of this one.
    with pytest.raises(CheckpointError, match="has a checkpoint of step 4, and the run that goes"):
        run.train(config, data, tmp_path / "a", resume_from=at_two, **options)
    with pytest.raises(CheckpointError, match="has a checkpoint of step 5"):
        run.train(config, data, tmp_path / "b", resume_from=tmp_path / "a", **options)


def test_resuming_says_what_is_not_as_it_was(tmp_path) -> None:
    train(tiny_config(), run.Data(PROTEINS), tmp_path, steps=2, wrap_step=counting)
    changed = tiny_config(learning_rate=0.5, validate_every_n_steps=3)
    fewer = run.Data(InMemory(PROTEINS.proteins[:2]))
    with pytest.warns(run.ResumedDifferentlyWarning) as found:
        run.train(changed, fewer, tmp_path, steps=3, resume_from=tmp_path, wrap_step=counting)
    (text,) = [str(warning.message) for warning in found]
    before = tiny_config().train.learning_rate
    assert f"train.learning_rate: {before} -> 0.5" in text
    assert "'proteins': 3" in text
    assert "'proteins': 2" in text
    assert "validate_every" not in text


def test_the_end_of_every_epoch_is_kept_on_request(tmp_path) -> None:
    config = tiny_config(
        train_epoch_len=2,
        max_epochs=3,
        checkpoint_every_epoch=True,
        checkpoints_kept=1,
        checkpoint_every_n_steps=3,
    )
    train(config, run.Data(PROTEINS), tmp_path, wrap_step=counting)
    assert saved_steps(tmp_path) == [2, 4, 6]


def test_zeroed_terms_are_a_counted_warning(tmp_path) -> None:
    config = tiny_config()

    def broken(step):
        def call(state, batch):
            metrics = {"loss": jnp.asarray(1.0), "zeroed/fape": jnp.asarray(1.0)}
            return state._replace(step=state.step + 1), metrics

        return call

    with pytest.warns(run.ZeroedTermWarning) as found:
        result = train(config, run.Data(PROTEINS), tmp_path, steps=2, wrap_step=broken)
    texts = [str(warning.message) for warning in found]
    assert "fape was not finite in step 1" in texts[0]
    assert "2 times so far" in texts[1]
    assert result.zeroed == {"fape": 2}


@dataclasses.dataclass
class Watched:
    """Three proteins, the first of which cannot be read and the others have a bad template."""

    read: list[int] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(PROTEINS)

    def __getitem__(self, index: int):
        self.read.append(index)
        if index == 0:
            raise DataError("cut short", source="0.cif", kind="truncated")
        fault = DataError("cut short", source="template.cif", kind="truncated")
        return dataclasses.replace(PROTEINS[index], template_faults=(fault,))

    def name(self, index: int) -> str:
        return PROTEINS.name(index)


@pytest.mark.filterwarnings("ignore::models.alphafold.data.errors.SkippedDataWarning")
def test_validation_reads_chains_when_it_needs_them_and_counts_faults_once(monkeypatch) -> None:
    def predict(params, rng, batch):
        length = batch["aatype"].shape[1]
        return {
            "structure_module": {
                "final_atom_positions": batch["all_atom_positions"][0] + params,
                "final_atom_mask": batch["atom37_atom_exists"][0],
            },
            "predicted_lddt": {"logits": jnp.zeros((length, 50))},
            # The chain's 80 residues are sure of the worst fit; padding does not count.
            "predicted_aligned_error": {
                "logits": jnp.zeros((length, length, 64)).at[:80, :80, -1].set(90.0),
                "breaks": jnp.linspace(0.0, 31.0, 63),
            },
        }

    names = (*validation.batch_spec(tiny_config(), training=False), "all_atom_positions")
    monkeypatch.setattr(validation, "batch_spec", lambda *_, **__: dict.fromkeys(names))
    monkeypatch.setattr(validation, "make_model", lambda _: train_step.Model(None, predict, None))
    dataset = Watched()
    chains, templates = SkipCounter(policy="skip"), SkipCounter(policy="skip")
    validate = validation.make_validator(
        tiny_config(max_validation_chains=1), dataset, counter=chains, template_counter=templates
    )
    assert dataset.read == []
    for _ in range(2):
        scored = validate(0.0)
        assert scored.scores["lddt_ca"] == pytest.approx(1.0)
        assert scored.scores["ptm"] < 0.05
        (chain,) = scored.predictions
        np.testing.assert_allclose(chain.aligned_error, np.full((80, 80), 31.75))
    assert dataset.read == [0, 1, 0, 1]
    assert chains.counts == {"truncated": 1}
    assert templates.counts == {"truncated": 1}


def test_validation_scores_whole_chains_and_leaves_files(tmp_path) -> None:
    config = tiny_config(max_validation_chains=1)

    data = run.Data(PROTEINS, PROTEINS)
    result = train(
        config,
        data,
        tmp_path,
        steps=1,
        wrap_step=counting,
        validation_compiler_options=RUN_ONCE,
    )
    (prediction,) = result.validation.predictions
    assert prediction.atom_positions.shape == (80, 37, 3)
    assert set(result.validation.scores) == {"lddt_ca", "drmsd_ca", "gdt_ts", "gdt_ha", "plddt"}
    assert 0.0 <= result.validation.scores["lddt_ca"] <= 1.0
    for suffix in ("pdb", "cif", "png"):
        assert (tmp_path / "predictions" / f"{prediction.name}.{suffix}").stat().st_size > 0
