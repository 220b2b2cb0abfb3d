"""Alignment parsers: what they read, and that bad files are named with their line."""

from __future__ import annotations

import gzip
import pickle

import numpy as np
import pytest

from models.alphafold.data.a3m import parse_a3m, read_a3m
from models.alphafold.data.alignment import (
    Alignment,
    deduplicate,
    onto_sequence,
    single_sequence,
    take_residues,
)
from models.alphafold.data.errors import DataError
from models.alphafold.data.hhr import parse_hhr
from models.alphafold.data.pairwise import match_sequences
from models.alphafold.data.residues import GAP, UNKNOWN, decode_sequence, encode_sequence
from models.alphafold.data.stockholm import (
    most_similar_row,
    parse_aligned_fasta,
    parse_stockholm,
)


def letters(alignment: Alignment) -> list[str]:
    return [decode_sequence(row) for row in alignment.msa]


def test_a3m_aligns_upper_case_and_counts_lower_case_as_deletions() -> None:
    text = b"#4 1\n>query\nAC\nDE\n>one two\nA-gggDeE\n\x00>lower\nkkACDEvv\n"
    alignment = parse_a3m(text, source="x.a3m")
    assert letters(alignment) == ["ACDE", "A-DE", "ACDE"]
    assert alignment.deletion_matrix.tolist() == [[0, 0, 0, 0], [0, 0, 3, 1], [2, 0, 0, 0]]
    assert alignment.names == ("query", "one two", "lower")


def test_a3m_maps_special_letters_as_the_field_does() -> None:
    alignment = parse_a3m(b">q\nBZJOUX-A\n", source="x.a3m")
    assert letters(alignment) == ["DEXXCX-A"]


def test_a3m_stops_after_max_rows() -> None:
    text = b">q\nAC\n>a\nAD\n>b\nAE\n"
    assert parse_a3m(text, source="x.a3m", max_rows=2).names == ("q", "a")


def test_gzip_is_recognised_by_content(tmp_path) -> None:
    path = tmp_path / "x.a3m"
    path.write_bytes(gzip.compress(b">q\nACDE\n"))
    assert letters(read_a3m(path)) == ["ACDE"]
    path.write_bytes(gzip.compress(b">q\nACDE\n")[:-5])
    with pytest.raises(DataError, match="truncated or corrupt") as caught:
        read_a3m(path)
    assert caught.value.source == str(path)


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        (b"", "empty", None),
        (b"#12 1\n", "empty", None),
        (b">q\n", "malformed", 1),
        (b">q\nACDE\n>hollow\n>r\nACDE\n", "malformed", 3),
        (b"ACDE\n", "malformed", 1),
        (b">q\nACDE\n>r\nACDE\n>short\nAC\n", "row-length", 6),
        (b">q\nACDE\n>r\nAC1E\n", "bad-letter", 4),
        (b">q\n----\n>r\nACDE\n", "all-gap", 2),
        (b">q\nACDE\n>r\n----\n>s\n--gg--\n", "all-gap", None),
    ],
)
def test_bad_a3m_names_file_line_and_kind(text: bytes, kind: str, line: int | None) -> None:
    with pytest.raises(DataError) as caught:
        parse_a3m(text, source="folder/x.a3m")
    assert (caught.value.kind, caught.value.line) == (kind, line)
    place = "folder/x.a3m" if line is None else f"folder/x.a3m:{line}"
    assert str(caught.value).startswith(f"{place}: ")


def test_data_error_survives_pickling() -> None:
    error = DataError("why", source="x.a3m", line=3, kind="row-length")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.kind, copy.line) == (str(error), "row-length", 3)


STOCKHOLM = b"""# STOCKHOLM 1.0
#=GF ID query

query       AC.D
hit/1-4     ACkD
#=GR hit/1-4 PP 9999

query       -E--
hit/1-4     aEvw
//
"""


def test_interleaved_stockholm_drops_the_querys_gap_columns() -> None:
    alignment = parse_stockholm(STOCKHOLM, source="x.sto")
    assert letters(alignment) == ["ACDE", "ACDE"]
    assert alignment.deletion_matrix.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"", "empty"),
        (b">q\nACDE\n", "malformed"),
        (STOCKHOLM[:-4], "truncated"),
        (b"# STOCKHOLM 1.0\n//\n", "empty"),
        (b"# STOCKHOLM 1.0\nq ACDE\nr ACD\n//\n", "row-length"),
        (b"# STOCKHOLM 1.0\nq AC DE\n//\n", "malformed"),
    ],
)
def test_bad_stockholm_is_refused(text: bytes, kind: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_stockholm(text, source="x.sto")
    assert caught.value.kind == kind


def test_aligned_fasta_takes_any_row_as_query() -> None:
    fasta = parse_aligned_fasta(b">a\nAC-D\nEF\n>b\n-CGD\n-F\n", source="x.fasta")
    assert letters(fasta.alignment(0)) == ["ACDEF", "-CD-F"]
    second = fasta.alignment(1)
    assert letters(second) == ["CGDF", "C-DF"]
    assert second.deletion_matrix[1].tolist() == [1, 0, 0, 1]
    assert second.names == ("b", "a")


def test_most_similar_row_finds_a_mutated_trimmed_copy() -> None:
    fasta = parse_aligned_fasta(
        b">far\nMKTAYIAKQRQISFV\n>near\nWWNDCEHIKL--VFY\n", source="x.fasta"
    )
    assert most_similar_row(fasta, "AAWWNDCEHIKLMVFY") == 1


def test_match_sequences_spans_a_missing_loop() -> None:
    match = match_sequences("ACDEFGHIKLMN", "ACDEKLMN")
    assert match.first.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert match.second.tolist() == list(range(8))
    assert match.identity == 1.0


def test_onto_sequence_keeps_rows_under_their_residues_and_counts_dropped_columns() -> None:
    # The old query has a loop GGG that the structure's sequence lacks, and lacks its tag WW.
    old = parse_a3m(b">q\nMNDEFGGGHIKLY\n>r\nMNDEFGaG-HIKLY\n>s\nMN-EF--gGHIKLY\n", source="q.a3m")
    sequence = "WWMNDEFHIKLY"
    moved, covered = onto_sequence(old, sequence)
    assert letters(moved) == [sequence, "--MNDEFHIKLY", "--MN-EFHIKLY"]
    assert covered.tolist() == [False, False] + [True] * 10
    # Residues G a G of row r and g G of row s lie before H.
    assert moved.deletion_matrix[:, 7].tolist() == [0, 3, 2]
    assert moved.deletion_matrix.sum() == 5


def test_onto_the_same_sequence_changes_nothing() -> None:
    old = parse_a3m(b">q\nACDE\n>r\nAC-E\n", source="q.a3m")
    moved, covered = onto_sequence(old, "ACDE")
    assert moved is old
    assert covered.all()


def test_onto_another_protein_is_refused() -> None:
    old = single_sequence("MKTAYIAKQRQISFVKSHFSRQ", source="q.a3m")
    with pytest.raises(DataError, match="different proteins") as caught:
        onto_sequence(old, "GWWPLNDCEEVVTHGPLNWWDC")
    assert caught.value.kind == "wrong-query"


def test_deduplicate_keeps_the_first_of_equal_rows_in_order() -> None:
    one = parse_a3m(b">q\nACDE\n>a\nACDD\n>b\nAkCDD\n", source="1.a3m")
    two = parse_a3m(b">q\nACDE\n>c\nACCC\n>d\nACDD\n", source="2.a3m")
    merged = deduplicate([one, two])
    assert merged.names == ("q", "a", "c")
    assert letters(merged) == ["ACDE", "ACDD", "ACCC"]


def test_deduplicate_refuses_alignments_of_different_queries() -> None:
    with pytest.raises(DataError, match="share its query"):
        deduplicate([single_sequence("ACDE", source="1"), single_sequence("ACD", source="2")])


def test_cutting_residues_drops_rows_left_empty_but_never_the_query() -> None:
    alignment = parse_a3m(b">q\nACDE\n>a\nAC--\n>b\n--DE\n", source="x.a3m")
    assert take_residues(alignment, 0, 2).names == ("q", "a")
    assert take_residues(alignment, 2, 4).names == ("q", "b")


def test_encoding_and_decoding_are_inverse() -> None:
    sequence = "ARNDCQEGHILKMFPSTWYVX"
    assert encode_sequence(sequence).tolist() == list(range(21))
    assert decode_sequence(np.array([*range(21), GAP])) == sequence + "-"
    assert encode_sequence("x*".replace("*", "B")).tolist() == [UNKNOWN, 3]


HHR = b"""Query         target
Match_columns 12

 No Hit                             Prob E-value P-value  Score    SS Cols Query HMM  Template HMM
  1 1ABC_B Something               98.5 1.2E-10 3.4E-15   80.1   0.0    7    2-9       11-19 (40)

No 1
>1ABC_B Something; HET: MSE; 2.1A {Homo sapiens}
Probab=98.50  E-value=1.2e-10  Score=80.10  Aligned_cols=7  Identities=50%  Similarity=0.8  Sum_probs=6.5  Template_Neff=5.0

Q ss_pred             HHHH
Q target            2 CDE-F    5 (12)
Q Consensus         2 cde-f    5 (12)
                      ..|
T Consensus        11 cdkgf   15 (40)
T 1ABC_B           11 CDKGF   15 (40)
T ss_dssp             HHHHH

Q target            6 GHIK    9 (12)
T 1ABC_B           16 GH-K   18 (40)

"""  # noqa: E501


def test_hhr_gives_zero_based_pairs_across_blocks_and_gaps() -> None:
    (hit,) = parse_hhr(HHR, source="x.hhr")
    assert (hit.name, hit.pdb_id, hit.chain_id) == ("1ABC_B", "1abc", "B")
    assert hit.query_positions.tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert hit.hit_positions.tolist() == [10, 11, 12, 14, 15, 16, 17]
    assert (hit.hit_sequence, hit.hit_start) == ("CDKGFGHK", 10)
    assert (hit.sum_probs, hit.aligned_columns, hit.probability) == (6.5, 7, 98.5)
    assert hit.e_value == pytest.approx(1.2e-10)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"", "empty"),
        (b"nothing of the sort\n", "malformed"),
        (HHR[: HHR.index(b"Probab")], "truncated"),
        (HHR[: HHR.index(b"T 1ABC_B           16")], "truncated"),
        (HHR.replace(b"16 GH-K   18", b"17 GH-K   19"), "malformed"),
    ],
)
def test_bad_hhr_is_refused(text: bytes, kind: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_hhr(text, source="x.hhr")
    assert caught.value.kind == kind
