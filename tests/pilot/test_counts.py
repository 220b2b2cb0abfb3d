"""Classes of counts: exact where it matters, bounded everywhere."""

from __future__ import annotations

import numpy as np

from jdynoff.pilot.counts import LARGEST, classes


def test_small_counts_are_exact() -> None:
    found = classes([127])
    counts = np.arange(128)[:, None]
    assert found.number == 128
    np.testing.assert_array_equal(found.to_count(found.to_class(counts)), counts)


def test_large_counts_are_close() -> None:
    found = classes([None])
    counts = np.unique(np.geomspace(128, LARGEST, 500).astype(np.int32))[:, None]
    again = np.asarray(found.to_count(found.to_class(counts)))
    assert (np.abs(again - counts) <= 0.11 * counts).all()


def test_has_only_the_classes_that_are_needed() -> None:
    assert classes([1, 4]).number == 5
    assert classes([1, 4]).possible.sum(axis=1).tolist() == [2, 5]


def test_no_count_exceeds_what_is_possible() -> None:
    found = classes([200, 3])
    impossible = np.array([[10**9, 10**9], [-1, -1]])
    assert np.asarray(found.to_count(found.to_class(impossible)))[1].tolist() == [0, 0]
    every = np.repeat(np.arange(found.number)[:, None], 2, axis=1)
    assert (np.asarray(found.to_count(every)) <= [200, 3]).all()
