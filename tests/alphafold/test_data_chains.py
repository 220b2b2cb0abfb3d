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


ATOM_SITE = [
    "group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id",
    "label_asym_id", "label_entity_id", "label_seq_id", "pdbx_PDB_ins_code", "Cartn_x", "Cartn_y",
    "Cartn_z", "occupancy", "B_iso_or_equiv", "auth_seq_id", "auth_asym_id", "pdbx_PDB_model_num",
]  # fmt: skip
BACKBONE = (("N", -1.2), ("CA", 0.0), ("C", 1.3))


def loop(category: str, columns: list[str], rows: list[str]) -> str:
    names = "".join(f"_{category}.{column}\n" for column in columns)
    return f"loop_\n{names}" + "".join(f"{row}\n" for row in rows) + "#\n"


def mmcif_rows(number: int, *, label: str = "A", author: str = "A") -> list[str]:
    return [
        f"ATOM {10 * number + slot} {name[0]} {name} . ALA {label} 1 {number} ? "
        f"{3.8 * number + shift:.3f} {float(slot)} 0.0 1.0 20.0 {number} {author} 1"
        for slot, (name, shift) in enumerate(BACKBONE)
    ]


def test_author_names_win_over_mmcif_label_names() -> None:
    rows = [
        row
        for label, author in (("A", "B"), ("B", "A"))
        for number in range(1, 4 if author == "A" else 5)
        for row in mmcif_rows(number, label=label, author=author)
    ]
    data = f"data_X\n{loop('atom_site', ATOM_SITE, rows)}".encode()
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


def mmcif(rows: list[str], *, seen: range = range(1, 6), length: int = 5) -> bytes:
    """A chain of alanines with its sequence and the scheme of which residues were seen."""
    numbers = range(1, length + 1)
    scheme = [f"A {n} ALA {'ALA' if n in seen else '?'}" for n in numbers]
    return (
        "data_1ABC\n#\n_entry.id 1ABC\n#\n_entity.id 1\n_entity.type polymer\n#\n"
        "_entity_poly.entity_id 1\n_entity_poly.type 'polypeptide(L)'\n#\n"
        + loop("entity_poly_seq", ["entity_id", "num", "mon_id"], [f"1 {n} ALA" for n in numbers])
        + loop("struct_asym", ["id", "entity_id"], ["A 1"])
        + loop("pdbx_poly_seq_scheme", ["asym_id", "seq_id", "mon_id", "auth_mon_id"], scheme)
        + loop("atom_site", ATOM_SITE, rows)
    ).encode()


def residues(*numbers: int) -> list[str]:
    return [row for number in numbers for row in mmcif_rows(number)]


def test_a_file_that_tells_seen_from_unseen_residues_is_read() -> None:
    chain = parse_chain(mmcif(residues(1, 2, 4), seen=(1, 2, 4)), "A", source="x.cif")
    assert chain.all_atom_mask[:, CA].tolist() == [1, 1, 0, 1, 0]
    assert chain.pdb_id == "1abc"


def test_residues_that_were_seen_must_have_atoms() -> None:
    data = mmcif(residues(1, 2, 3))
    with pytest.raises(DataError, match=r"no atoms of 2 residues .* number 4") as caught:
        parse_chain(data, "A", source="x.cif")
    assert (caught.value.kind, caught.value.line) == ("truncated", data.count(b"\n"))


@pytest.mark.parametrize("number", [0, -3, 6, 999_999, 1])
def test_a_residue_outside_its_sequence_or_twice_in_it_is_an_error(number: int) -> None:
    rows = residues(1, 2, 3, 4, 5)
    rows[12:] = [row.replace(" 1 5 ?", f" 1 {number} ?") for row in rows[12:]]
    data = mmcif(rows, seen=range(1, 5))
    with pytest.raises(DataError, match=f"its number {number} in the sequence") as caught:
        parse_chain(data, "A", source="x.cif")
    assert data.split(b"\n")[caught.value.line - 1].startswith(b"ATOM 50 ")


@pytest.mark.parametrize("column", ["Cartn_x", "Cartn_z", "occupancy", "B_iso_or_equiv"])
@pytest.mark.parametrize("value", ["abc", "nan", "1e999"])
def test_an_atom_without_numbers_is_an_error_with_its_line(column: str, value: str) -> None:
    rows = residues(1, 2, 3, 4, 5)
    fields = rows[7].split()
    fields[ATOM_SITE.index(column)] = value
    rows[7] = " ".join(fields)
    data = mmcif(rows)
    with pytest.raises(DataError, match="atom CA of residue ALA 3 has a coord") as caught:
        parse_chain(data, "A", source="x.cif")
    assert data.split(b"\n")[caught.value.line - 1].startswith(b"ATOM 31 ")


@pytest.mark.parametrize("value", ["?", "."])
def test_an_atom_of_unknown_place_is_an_error(value: str) -> None:
    rows = residues(1, 2, 3, 4, 5)
    fields = rows[7].split()
    fields[ATOM_SITE.index("Cartn_y")] = value
    rows[7] = " ".join(fields)
    with pytest.raises(DataError, match="atom CA of residue ALA 3 has a coordinate"):
        parse_chain(mmcif(rows), "A", source="x.cif")


@pytest.mark.parametrize("value", ["     abc", "        ", " 1.0x000", "     nan", "********"])
def test_a_pdb_coordinate_that_is_no_number_is_an_error_with_its_line(value: str) -> None:
    data = pdb(*(backbone("ALA", number) for number in range(1, 5))).decode().splitlines()
    data[7] = data[7][:38] + value + data[7][46:]
    with pytest.raises(DataError, match="coordinates that are no numbers") as caught:
        parse_chain("\n".join(data).encode(), "A", source="x.pdb")
    assert caught.value.line == 8


@needs_proteins
@pytest.mark.parametrize(
    ("path", "chain_id"),
    [
        ("bytedance__Protenix/scripts/msa/data/mmcif/1k1a.cif", "A"),
        ("aqlaboratory__openfold/tests/test_data/mmcifs/2q2k.cif", "B"),
        ("Zarckranos__docking_modularization/1a2y.pdb", "B"),
    ],
)
def test_a_file_of_the_archive_cut_between_two_atoms_is_an_error(path: str, chain_id: str) -> None:
    lines = (ROOT / path).read_text().splitlines(keepends=True)
    atoms = [number for number, line in enumerate(lines) if line.startswith("ATOM")]
    assert read_chain(ROOT / path, chain_id).num_resolved
    for kept in (atoms[len(atoms) // 3], atoms[-1]):
        with pytest.raises(DataError, match="truncated") as caught:
            parse_chain("".join(lines[:kept]).encode(), chain_id, source=path)
        assert caught.value.kind == "truncated"
        assert caught.value.line == kept


@needs_proteins
@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_file_is_read_or_is_a_data_error(seed: int, tmp_path) -> None:
    """Whatever a byte or a field becomes, no other exception comes out and no NaN goes in."""
    rng = np.random.default_rng(seed)
    whole = (ROOT / "aqlaboratory__openfold/tests/test_data/mmcifs/1psm.cif").read_bytes()
    lines = whole.split(b"\n")
    # Most of a file is of no interest to a reader.
    places = [n for n, line in enumerate(lines) if line.startswith((b"ATOM", b"_entity", b"A 1"))]
    for number in rng.choice(places, size=3):
        fields = lines[number].split(b" ")
        odd = [b"?", b"", b"-1", b"x", b"1e9", b"'", b"99999999999", b"\xff", b"loop_"]
        fields[rng.integers(len(fields))] = odd[rng.integers(len(odd))]
        lines[number] = b" ".join(fields)
    path = tmp_path / "odd.cif"
    path.write_bytes(b"\n".join(lines))
    try:
        positions = read_chain(path, "A").all_atom_positions
    except DataError:
        return
    assert np.isfinite(positions).all()


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
