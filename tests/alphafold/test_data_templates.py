"""Templates: hits land on the right residues, the target's own structure is never one of them."""

from __future__ import annotations

import dataclasses
import shutil
import warnings

import numpy as np
import pytest

from models.alphafold.data.chains import read_chain
from models.alphafold.data.errors import DataError, SkipCounter, SkippedDataWarning
from models.alphafold.data.hhr import TemplateHit, read_hhr
from models.alphafold.data.residues import CA, GAP, decode_sequence
from models.alphafold.data.shared_proteins import default_root
from models.alphafold.data.templates import (
    choose_templates,
    load_templates,
    read_obsolete_entries,
    template_features,
    template_from_chain,
    template_from_hit,
    usable_hits,
)

ROOT = default_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="the shared proteins are not here")
TESTS = "aqlaboratory__openfold/tests/test_data"
MYOGLOBIN = "bytedance__Protenix/scripts/msa/data/mmcif"


@pytest.fixture(scope="module")
def hits() -> tuple[TemplateHit, ...]:
    return read_hhr(ROOT / TESTS / "alignments/pdb70_hits.hhr")


@pytest.fixture(scope="module")
def query() -> str:
    return (ROOT / TESTS / "short.fasta").read_text().split("\n", 1)[1].replace("\n", "")


def test_hits_of_real_files_become_templates_with_the_hits_letters(
    hits: tuple[TemplateHit, ...], query: str
) -> None:
    counter = SkipCounter(policy="skip")
    with pytest.warns(SkippedDataWarning, match="usable template hits have no mmCIF"):
        templates = load_templates(
            hits, ROOT / TESTS / "mmcifs", query, max_hits=20, counter=counter
        )
    by_name = {template.name: template for template in templates}
    assert {"3u8v_A", "4zey_A", "1psm_A", "3zee_A", "4i6p_A", "2q2k_A"} <= by_name.keys()
    for hit in hits:
        template = by_name.get(hit.name.replace(hit.name[:4], hit.pdb_id))
        if template is not None:
            shown = decode_sequence(template.aatype[hit.query_positions])
            wanted = "".join(hit.hit_sequence[at - hit.hit_start] for at in hit.hit_positions)
            assert shown == wanted
            assert np.sum(template.aatype != GAP) == hit.aligned_columns
    scores = [template.sum_probs for template in templates]
    assert scores == sorted(scores, reverse=True)
    assert counter.counts == {"template-missing": 1}


def test_hit_positions_count_unseen_residues(hits: tuple[TemplateHit, ...], query: str) -> None:
    hit = next(hit for hit in hits if hit.name == "2Q2K_A")
    chain = read_chain(ROOT / TESTS / "mmcifs/2q2k.cif", "A")
    template = template_from_hit(hit, chain, len(query))
    for at, there in zip(hit.query_positions, hit.hit_positions, strict=True):
        np.testing.assert_array_equal(
            template.all_atom_positions[at], chain.all_atom_positions[there]
        )


def test_a_shifted_database_sequence_is_found_again_in_the_file(
    hits: tuple[TemplateHit, ...], query: str
) -> None:
    hit = next(hit for hit in hits if hit.name == "3U8V_A")
    chain = read_chain(ROOT / TESTS / "mmcifs/3u8v.cif", "A")
    straight = template_from_hit(hit, chain, len(query))
    shifted = dataclasses.replace(
        hit, hit_positions=hit.hit_positions + 5, hit_start=hit.hit_start + 5
    )
    again = template_from_hit(shifted, chain, len(query))
    np.testing.assert_array_equal(straight.all_atom_positions, again.all_atom_positions)
    # One changed letter makes an exact search fail; the alignment still finds the place.
    letters = ("W" if hit.hit_sequence[5] != "W" else "A").join(
        (hit.hit_sequence[:5], hit.hit_sequence[6:])
    )
    mutated = template_from_hit(dataclasses.replace(hit, hit_sequence=letters), chain, len(query))
    np.testing.assert_array_equal(straight.aatype, mutated.aatype)
    wrong = dataclasses.replace(hit, hit_sequence="W" * len(hit.hit_sequence))
    with pytest.raises(DataError, match="different versions"):
        template_from_hit(wrong, chain, len(query))


def test_hits_of_the_target_copies_and_scraps_are_left_out(hits: tuple[TemplateHit, ...]) -> None:
    query = "A" * 5 + hits[0].hit_sequence + "A" * 5
    names = {hit.name for hit in hits}
    assert {hit.name for hit in usable_hits(hits, "W" * 60)} == names
    assert "2CRB_A" not in {
        hit.name for hit in usable_hits(hits, "W" * 60, exclude_pdb_ids=("2crb",))
    }
    # A stretch of the query is a copy only where it covers nearly all of it.
    assert hits[0] in usable_hits(hits[:1], query)
    assert usable_hits(hits[:1], hits[0].hit_sequence + "A") == []
    # The hit of 15 columns is under a tenth of a long query.
    long = {hit.name for hit in usable_hits(hits, "W" * 151)}
    assert names - long == {"3ZEE_A"}


def test_templates_released_too_late_are_left_out(
    hits: tuple[TemplateHit, ...], query: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedDataWarning)
        early = load_templates(
            hits,
            ROOT / TESTS / "mmcifs",
            query,
            max_hits=20,
            counter=SkipCounter(policy="skip"),
            max_date="2000-01-01",
        )
    assert [template.name for template in early] == ["1psm_A"]


def test_hits_of_replaced_entries_are_read_from_those_that_replace_them(
    hits: tuple[TemplateHit, ...], query: str, tmp_path
) -> None:
    (tmp_path / "obsolete.dat").write_text(
        " LIST OF OBSOLETE COORDINATE ENTRIES AND SUCCESSORS\n"
        "OBSLTE    31-JUL-94 9OLD     9MID     9NEW\n"
        "OBSLTE    01-AUG-95 9MID     1PSM\n"
        "OBSLTE    02-AUG-96 9LST\n"
        "OBSLTE    02-AUG-97 9BAD     9BAC\n"
        "OBSLTE    02-AUG-98 9BAC     9BAD\n"
    )
    obsolete = read_obsolete_entries(tmp_path / "obsolete.dat")
    assert obsolete["9old"] == obsolete["9mid"] == "1psm"
    assert "9lst" not in obsolete
    hit = next(hit for hit in hits if hit.pdb_id == "1psm")
    old = [dataclasses.replace(hit, name="9OLD_A")]
    counter = SkipCounter()

    def names(*excluded: str) -> list[str]:
        found = load_templates(
            old, ROOT / TESTS / "mmcifs", query, max_hits=1, counter=counter,
            exclude_pdb_ids=excluded, obsolete=obsolete,
        )  # fmt: skip
        return [template.name for template in found]

    assert names() == ["1psm_A"]
    # The target's own structure is none, whatever it was called.
    assert names("1psm") == []
    (tmp_path / "obsolete.dat").write_text("nothing of the kind")
    with pytest.raises(DataError, match=r"obsolete\.dat: has no line 'OBSLTE"):
        read_obsolete_entries(tmp_path / "obsolete.dat")


def test_a_missing_template_file_can_be_an_error(
    hits: tuple[TemplateHit, ...], query: str, tmp_path
) -> None:
    shutil.copy(ROOT / TESTS / "mmcifs/1psm.cif", tmp_path)
    with pytest.raises(DataError, match="9 of 10 usable template hits have no mmCIF"):
        load_templates(hits, tmp_path, query, max_hits=20, counter=SkipCounter())


def test_a_truncated_template_file_is_skipped_and_counted(
    hits: tuple[TemplateHit, ...], query: str, tmp_path
) -> None:
    whole = (ROOT / TESTS / "mmcifs/1psm.cif").read_bytes()
    (tmp_path / "1psm.cif").write_bytes(whole[:200_000].rsplit(b" ", 1)[0])
    counter = SkipCounter(policy="skip")
    with pytest.warns(SkippedDataWarning):
        load_templates(hits, tmp_path, query, max_hits=20, counter=counter)
    assert counter.counts == {"truncated": 1, "template-missing": 1}
    assert counter.summary() == "2 skipped (template-missing: 1, truncated: 1)"


def test_a_chain_of_the_same_protein_is_a_template() -> None:
    target = read_chain(ROOT / MYOGLOBIN / "102m.cif", "A")
    other = read_chain(ROOT / MYOGLOBIN / "8f9h.cif", "A")
    template = template_from_chain(other, target.sequence)
    assert (template.all_atom_mask[:, CA] > 0).sum() == 151
    features = template_features([template], len(target.sequence), 4)
    assert features["template_mask"].tolist() == [1, 0, 0, 0]
    assert features["template_pseudo_beta"].shape == (4, 154, 3)
    assert not features["template_all_atom_positions"][1:].any()
    glycine = target.sequence.index("G")
    np.testing.assert_array_equal(
        features["template_pseudo_beta"][0, glycine], template.all_atom_positions[glycine, CA]
    )


def test_training_draws_any_number_of_templates_and_inference_the_best() -> None:
    counts = set()
    for seed in range(100):
        chosen = choose_templates(30, 4, top_k=20, subsample=True, rng=np.random.default_rng(seed))
        assert len(set(chosen.tolist())) == len(chosen)
        assert all(slot < 20 for slot in chosen)
        counts.add(len(chosen))
    assert counts == {0, 1, 2, 3, 4}
    rng = np.random.default_rng(0)
    assert choose_templates(30, 4, top_k=20, subsample=False, rng=rng).tolist() == [0, 1, 2, 3]
    assert choose_templates(0, 4, top_k=20, subsample=True, rng=rng).size == 0
