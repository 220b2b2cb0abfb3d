"""Structure files: full sequences, unseen residues, alternates, modified residues, polymers."""

from __future__ import annotations

import numpy as np
import pytest

from models.alphafold.data.chains import (
    onto_full_sequence,
    parse_chain,
    parse_protein_file,
    read_chain,
    read_protein_file,
    take_residues,
)
from models.alphafold.data.errors import DataError
from models.alphafold.data.shared_proteins import default_root
from models.alphafold.structure.residue_constants import ATOM_ORDER

ROOT = default_root()
needs_proteins = pytest.mark.skipif(ROOT is None, reason="the shared proteins are not here")
CA = ATOM_ORDER["CA"]


def atom_line(
    serial: int,
    name: str,
    residue: str,
    number: int,
    position: tuple[float, float, float],
    *,
    chain: str = "A",
    alternate: str = " ",
    insertion: str = " ",
    occupancy: float = 1.0,
    b_factor: float = 20.0,
    record: str = "ATOM",
) -> str:
    x, y, z = position
    element = "SE" if name == "SE" else name[0]
    shown = name.ljust(4) if element == "SE" else f" {name:<3}"
    return (
        f"{record:<6}{serial:>5} {shown}{alternate}{residue:>3} {chain}{number:>4}{insertion}   "
        f"{x:8.3f}{y:8.3f}{z:8.3f}{occupancy:6.2f}{b_factor:6.2f}          {element:>2}\n"
    )


def backbone(residue: str, number: int, **options: object) -> str:
    at = 3.8 * (number + (0.5 if options.get("insertion", " ") != " " else 0.0))
    names = (("N", -1.2), ("CA", 0.0), ("C", 1.3))
    return "".join(
        atom_line(10 * number + slot, name, residue, number, (at + shift, slot, 0.0), **options)
        for slot, (name, shift) in enumerate(names)
    )


def pdb(*parts: str) -> bytes:
    return ("".join(parts) + "END\n").encode()


SEQRES = "SEQRES   1 A    5  ALA GLY MSE ARG LYS\n"


def test_unseen_residues_keep_their_letters_and_have_no_atoms() -> None:
    data = pdb(SEQRES, backbone("GLY", 2), backbone("ARG", 4), backbone("LYS", 5), "TER\n")
    chain = parse_chain(data, "A", source="x.pdb")
    assert chain.sequence == "AGMRK"
    assert chain.has_full_sequence
    assert chain.all_atom_mask[:, CA].tolist() == [0, 1, 0, 1, 1]
    assert chain.author_numbers == ("", "2", "", "4", "5")
    assert chain.num_resolved == 3


def test_selenomethionine_becomes_methionine_with_its_selenium_as_sulphur() -> None:
    data = pdb(
        SEQRES,
        backbone("GLY", 2),
        backbone("MSE", 3, record="HETATM"),
        atom_line(99, "SE", "MSE", 3, (11.0, 5.0, 1.0), record="HETATM"),
        backbone("ARG", 4),
        "TER\n",
    )
    chain = parse_chain(data, "A", source="x.pdb")
    assert chain.sequence[2] == "M"
    assert chain.all_atom_mask[2, ATOM_ORDER["SD"]] == 1.0
    np.testing.assert_allclose(chain.all_atom_positions[2, ATOM_ORDER["SD"]], [11.0, 5.0, 1.0])


def test_one_conformer_of_highest_occupancy_is_taken_for_the_whole_residue() -> None:
    side = [
        atom_line(50, "CB", "SER", 1, (0.0, 1.0, 1.0), alternate="A", occupancy=0.4),
        atom_line(51, "CB", "SER", 1, (0.0, 2.0, 2.0), alternate="B", occupancy=0.6),
        # Alone, this oxygen would favour conformer A.
        atom_line(52, "OG", "SER", 1, (1.0, 1.0, 1.0), alternate="A", occupancy=0.5),
        atom_line(53, "OG", "SER", 1, (1.0, 2.0, 2.0), alternate="B", occupancy=0.45),
    ]
    chain = parse_chain(
        pdb(backbone("SER", 1), *side, backbone("ALA", 2), backbone("ALA", 3)), "A", source="x.pdb"
    )
    assert chain.all_atom_positions[0, ATOM_ORDER["CB"]].tolist() == [0.0, 2.0, 2.0]
    assert chain.all_atom_positions[0, ATOM_ORDER["OG"]].tolist() == [1.0, 2.0, 2.0]


def test_inserted_residues_stand_in_file_order() -> None:
    data = pdb(
        backbone("ALA", 1),
        backbone("GLY", 2),
        backbone("SER", 2, insertion="A"),
        backbone("LYS", 3),
    )
    chain = parse_chain(data, "A", source="x.pdb")
    assert chain.sequence == "AGSK"
    assert chain.author_numbers == ("1", "2", "2A", "3")
    assert not chain.has_full_sequence


def test_of_two_residue_types_at_one_place_the_more_occupied_stays() -> None:
    data = pdb(
        "SEQRES   1 A    3  ALA SER LYS\n",
        backbone("ALA", 1),
        backbone("SER", 2, alternate="A", occupancy=0.3),
        backbone("THR", 2, alternate="B", occupancy=0.7),
        backbone("LYS", 3),
        "TER\n",
    )
    chain = parse_chain(data, "A", source="x.pdb")
    assert chain.sequence == "ATK"
    assert chain.all_atom_mask[:, CA].tolist() == [1, 1, 1]


def test_author_names_win_over_mmcif_label_names() -> None:
    rows = "".join(
        f"ATOM {10 * number + slot} {name[0]} {name} . ALA {label} 1 {number} ? "
        f"{3.8 * number + shift:.3f} {float(slot)} 0.0 1.0 20.0 {number} {author} 1\n"
        for label, author in (("A", "B"), ("B", "A"))
        for number in range(1, 4 if author == "A" else 5)
        for slot, (name, shift) in enumerate((("N", -1.2), ("CA", 0.0), ("C", 1.3)))
    )
    columns = (
        "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id "
        "label_entity_id label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy "
        "B_iso_or_equiv auth_seq_id auth_asym_id pdbx_PDB_model_num"
    )
    header = "".join(f"_atom_site.{column}\n" for column in columns.split())
    data = f"data_X\nloop_\n{header}{rows}#\n".encode()
    assert len(parse_chain(data, "A", source="x.cif").sequence) == 3
    assert len(parse_chain(data, "B", source="x.cif").sequence) == 4


def test_arginine_nitrogens_named_the_wrong_way_are_exchanged() -> None:
    side = [
        atom_line(50, "CD", "ARG", 1, (0.0, 0.0, 3.0)),
        atom_line(51, "NH1", "ARG", 1, (0.0, 0.0, 9.0)),
        atom_line(52, "NH2", "ARG", 1, (0.0, 0.0, 5.0)),
    ]
    chain = parse_chain(
        pdb(backbone("ARG", 1), *side, backbone("ALA", 2), backbone("ALA", 3)), "A", source="x.pdb"
    )
    assert chain.all_atom_positions[0, ATOM_ORDER["NH1"], 2] == 5.0
    assert chain.all_atom_positions[0, ATOM_ORDER["NH2"], 2] == 9.0


def test_copies_of_a_chain_are_ranked_by_completeness() -> None:
    seqres = "".join(f"SEQRES   1 {chain}    4  ALA GLY LYS ARG\n" for chain in "AB")
    data = pdb(
        seqres,
        *(backbone(name, number) for name, number in (("GLY", 2), ("LYS", 3), ("ARG", 4))),
        "TER\n",
        *(
            backbone(name, number, chain="B")
            for name, number in (("ALA", 1), ("GLY", 2), ("LYS", 3), ("ARG", 4))
        ),
        "TER\n",
    )
    chains = parse_protein_file(data, source="x.pdb").chains
    assert [(chain.chain_id, chain.rank) for chain in chains] == [("A", 1), ("B", 0)]
    assert parse_chain(data, "A", source="x.pdb").rank == 1


def test_a_chain_is_placed_in_a_longer_sequence_and_keeps_its_own_mutation() -> None:
    names = ["ALA", "GLY", "LYS", "TRP", "HIS", "GLU", "ASP", "CYS"]
    data = pdb(*(backbone(name, number) for number, name in enumerate(names, start=1)))
    chain = parse_chain(data, "A", source="x.pdb")
    placed = onto_full_sequence(chain, "MMAGKWPEDCVV")
    assert placed.sequence == "MMAGKWHEDCVV"
    assert placed.all_atom_mask[:, CA].tolist() == [0, 0, *[1] * 8, 0, 0]
    assert placed.author_numbers[2] == "1"
    cut = take_residues(placed, 2, 10)
    np.testing.assert_array_equal(cut.all_atom_positions, chain.all_atom_positions)


def test_a_chain_does_not_fit_another_protein() -> None:
    data = pdb(*(backbone("ALA", number) for number in range(1, 9)))
    with pytest.raises(DataError, match="different proteins"):
        onto_full_sequence(parse_chain(data, "A", source="x.pdb"), "WWWWKKKKWW")


def test_missing_chain_is_named_with_those_that_exist() -> None:
    data = pdb(*(backbone("ALA", number) for number in range(1, 4)))
    with pytest.raises(DataError, match="no polymer chain 'Z'; polymer chains: A") as caught:
        parse_chain(data, "Z", source="x.pdb")
    assert caught.value.kind == "no-chain"


def test_a_chain_without_ca_atoms_is_refused() -> None:
    only_n = "".join(atom_line(n, "N", "ALA", n, (3.8 * n, 0.0, 0.0)) for n in range(1, 5))
    with pytest.raises(DataError) as caught:
        parse_chain(pdb(only_n), "A", source="x.pdb")
    assert caught.value.kind == "no-ca"
    with pytest.raises(DataError, match="no CA atoms"):
        parse_protein_file(pdb(only_n), source="x.pdb")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"),
        (b"HEADER    NOTHING\nEND\n", "no-atoms"),
        (b"data_X\n_entry.id X\n", "no-atoms"),
    ],
)
def test_files_without_atoms_are_refused(data: bytes, kind: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_protein_file(data, source="x.cif")
    assert caught.value.kind == kind


@needs_proteins
def test_truncated_mmcif_is_an_error_with_its_line() -> None:
    whole = (ROOT / "bytedance__Protenix/scripts/msa/data/mmcif/102m.cif").read_bytes()
    cut = whole[: len(whole) // 2]
    cut = cut[: cut.rindex(b" ")]
    with pytest.raises(DataError, match="cannot be parsed as mmCIF") as caught:
        parse_protein_file(cut, source="102m.cif")
    assert caught.value.kind == "truncated"
    assert caught.value.line is not None
    assert abs(caught.value.line - cut.count(b"\n")) < 1200


@needs_proteins
def test_dna_chains_are_left_out_with_a_message() -> None:
    path = ROOT / "bytedance__Protenix/examples/7pzb.pdb"
    protein = read_protein_file(path)
    assert [chain.chain_id for chain in protein.chains] == ["A", "B"]
    assert len(protein.left_out) == 4
    assert "left out: it is DNA" in protein.left_out[0]
    assert protein.chains[0].resolution == pytest.approx(3.12)
    with pytest.raises(DataError, match="chain 'C' is DNA, not a protein") as caught:
        read_chain(path, "C")
    assert caught.value.kind == "non-protein"


@needs_proteins
@pytest.mark.parametrize(
    ("path", "chain_id", "length", "resolved", "date"),
    [
        ("bytedance__Protenix/scripts/msa/data/mmcif/1k1a.cif", "A", 241, 228, "2001-11-21"),
        ("bytedance__Protenix/scripts/msa/data/mmcif/8f9h.cif", "A", 154, 151, "2023-11-08"),
        ("aqlaboratory__openfold/tests/test_data/mmcifs/2q2k.cif", "A", 70, 45, "2008-02-05"),
        (
            "lucidrains__alphafold3-pytorch/data/test/pdb_data/mmcifs/21/721p-assembly1.cif",
            "A",
            166,
            166,
            "1994",
        ),
        ("aqlaboratory__openfold/tests/test_data/mmcifs/1psm.cif", "A", 38, 38, "1995-02-07"),
    ],
)
def test_real_files_give_full_sequences(
    path: str, chain_id: str, length: int, resolved: int, date: str
) -> None:
    chain = read_chain(ROOT / path, chain_id)
    assert (len(chain.sequence), chain.num_resolved) == (length, resolved)
    assert chain.release_date.startswith(date)
    bonds = np.linalg.norm(
        chain.all_atom_positions[:, CA] - chain.all_atom_positions[:, ATOM_ORDER["N"]], axis=-1
    )
    seen = (chain.all_atom_mask[:, CA] * chain.all_atom_mask[:, ATOM_ORDER["N"]]) > 0
    assert np.all(np.abs(bonds[seen] - 1.46) < 0.1)
