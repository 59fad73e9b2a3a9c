"""Covering arrays: few rows in which every two values of different factors that can meet do meet."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

Row: TypeAlias = dict[str, str]
Factors: TypeAlias = Mapping[str, Sequence[str]]
Pair: TypeAlias = frozenset[tuple[str, str]]


def pairwise_rows(factors: Factors, is_possible: Callable[[Row], bool]) -> list[Row]:
    """Return rows with a value for each factor, so that each pair of values that can meet is in one.

    `is_possible` is asked about rows that are not complete, too; what it refuses must stay impossible
    whatever is added. The number of rows is about the product of the two largest factors. The same
    arguments give the same rows.
    """
    ordered = dict(sorted(factors.items(), key=lambda factor: -len(factor[1])))
    waiting = set(_pairs(ordered))
    used: Counter[Pair] = Counter()
    rows: list[Row] = []
    for pair in _pairs(ordered):
        if pair not in waiting:
            continue
        row = _completed(dict(pair), ordered, is_possible, waiting, used)
        if row is not None:
            rows.append({factor: row[factor] for factor in factors})
            waiting -= pairs_in(row)
            used.update(pairs_in(row))
    return rows


def pairs_in(row: Row) -> set[Pair]:
    """Return the pairs that meet in `row`."""
    return {frozenset(two) for two in itertools.combinations(row.items(), 2)}


def _pairs(factors: Factors) -> Iterator[Pair]:
    for (one, ones), (other, others) in itertools.combinations(factors.items(), 2):
        for value, beside in itertools.product(ones, others):
            yield frozenset({(one, value), (other, beside)})


def _completed(
    row: Row, factors: Factors, is_possible: Callable[[Row], bool], waiting: set[Pair], used: Counter[Pair]
) -> Row | None:
    """Return `row` with a value for every factor, greedily those that meet most of what waits."""
    if not is_possible(row):
        return None
    missing = [factor for factor in factors if factor not in row]
    if not missing:
        return row

    def preference(value: str) -> tuple[int, int]:
        met = [frozenset({(missing[0], value), beside}) for beside in row.items()]
        # Of equals, what met least so far: rows that need not be alike should not be.
        return -sum(pair in waiting for pair in met), sum(used[pair] for pair in met)

    for value in sorted(factors[missing[0]], key=preference):
        found = _completed({**row, missing[0]: value}, factors, is_possible, waiting, used)
        if found is not None:
            return found
    return None
