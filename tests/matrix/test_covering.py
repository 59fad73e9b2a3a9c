"""The covering array really covers, and says no more than is possible."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from .covering import Factors, Row, pairs_in, pairwise_rows

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=5)


def factors_of(sizes: list[int]) -> Factors:
    return {f"factor{place}": [f"value{item}" for item in range(size)] for place, size in enumerate(sizes)}


def product_of(factors: Factors) -> list[Row]:
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


@settings(max_examples=60, deadline=None)
@given(SIZES, st.data())
def test_all_pairs_that_can_meet_do_and_no_row_is_impossible(sizes: list[int], data: st.DataObject) -> None:
    factors = factors_of(sizes)
    choices = [(factor, value) for factor, values in factors.items() for value in values]
    forbidden = data.draw(st.lists(st.sets(st.sampled_from(choices), min_size=2, max_size=3), max_size=6))

    def is_possible(row: Row) -> bool:
        return not any(choice <= row.items() for choice in forbidden)

    rows = pairwise_rows(factors, is_possible)
    assert all(is_possible(row) and list(row) == list(factors) for row in rows)
    reachable = set().union(*(pairs_in(row) for row in product_of(factors) if is_possible(row)), set())
    assert set().union(*(pairs_in(row) for row in rows), set()) == reachable


def test_the_rows_are_about_as_many_as_the_two_largest_factors_have_pairs() -> None:
    rows = pairwise_rows(factors_of([14, 17, 3, 3, 4, 3]), lambda row: True)
    assert 14 * 17 <= len(rows) <= 1.05 * 14 * 17


def test_the_same_factors_give_the_same_rows() -> None:
    factors = factors_of([4, 3, 3, 2])
    assert pairwise_rows(factors, lambda row: True) == pairwise_rows(factors, lambda row: True)
