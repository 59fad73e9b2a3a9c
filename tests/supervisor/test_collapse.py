"""What a viewer shows of output that draws over itself."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.cli.collapse import LONGEST_LINE, MOST_ROWS, Collapser


def collapsed(text: str | bytes, *, with_colours: bool = False) -> list[str]:
    collapser = Collapser(with_colours=with_colours)
    piece = text.encode() if isinstance(text, str) else text
    return [line.text for line in collapser.add(piece, 1.0) + collapser.finish()]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("no end", ["no end"]),
        ("\n\none\n\n", ["", "", "one", ""]),
        ("windows\r\nends\r\n", ["windows", "ends"]),
        ("\r 10%\r 50%\r100%\n", ["100%"]),
        ("loading...\rdone\n", ["doneing..."]),
        ("loading...\r\x1b[Kdone\n", ["done"]),
        ("loading...\x1b[2K\rdone\n", ["done"]),
        ("\rlong state      \rshort          \nnext\n", ["short", "next"]),
        ("spin|\b/\b-\n", ["spin-"]),
        ("\x1b[31mred\x1b[0m\n", ["red"]),
        ("\x1b]8;;https://example.org\x07link\x1b]8;;\x1b\\\n", ["link"]),
        ("a\tb\x07\n", ["a\tb"]),
        ("one\n\x1b[2Atwo\n", ["one", "two"]),
        ("\x1b[", ["["]),
        ("\n\b\n", ["", ""]),
        (b"tw\xffo\n", ["tw\N{REPLACEMENT CHARACTER}o"]),
        (f"{'x' * (LONGEST_LINE + 3)}\n", ["x" * LONGEST_LINE, "xxx"]),
    ],
)
def test_a_line_is_shown_as_a_terminal_would_have_left_it(written: str | bytes, shown: list[str]) -> None:
    assert collapsed(written) == shown


def test_nested_bars_are_shown_once_each_and_text_between_them_stays() -> None:
    tqdm = pytest.importorskip("tqdm", reason="the bars of tqdm are drawn by tqdm")
    screen = io.StringIO()
    for epoch in tqdm.tqdm(range(3), file=screen, desc="epochs", mininterval=0):
        for _ in tqdm.tqdm(range(5), file=screen, desc="batches", leave=False, mininterval=0):
            pass
        tqdm.tqdm.write(f"epoch {epoch} is over", file=screen)
    screen.write("trained\n")
    lines = collapsed(screen.getvalue())
    assert [line for line in lines if "is over" in line] == [f"epoch {n} is over" for n in range(3)]
    (bar,) = [line for line in lines if line.startswith("epochs")]
    assert "3/3" in bar
    assert lines[-1] == "trained"
    assert len(lines) <= 6


def test_nested_bars_drawn_by_hand_keep_their_last_states() -> None:
    drawn = "".join(f"\router {n}/3\n\rinner {n}/3\x1b[A" for n in range(4))
    assert collapsed(f"{drawn}\n\n\ndone\n") == ["outer 3/3", "inner 3/3", "", "done"]


def test_colours_are_kept_where_they_are_wanted_and_end_with_their_line() -> None:
    text = "\x1b[1m\x1b[31mred\x1b[0m plain\n"
    assert collapsed(text, with_colours=True) == ["\x1b[1m\x1b[31mred\x1b[0m plain"]
    green = ["\x1b[32mgreen\x1b[0m", "\x1b[32mstill\x1b[0m", "", "not"]
    assert collapsed("\x1b[32mgreen\nstill\n\x1b[0m\nnot\n", with_colours=True) == green


def test_lines_come_out_as_soon_as_they_cannot_change() -> None:
    collapser = Collapser()
    assert [line.text for line in collapser.add(b"one\ntw", 1.0)] == ["one"]
    assert collapser.pending == "tw"
    assert [(line.text, line.seconds) for line in collapser.add(b"o\n", 2.0)] == [("two", 2.0)]
    assert collapser.add(b"\r 10%\r 20%", 3.0) == []
    assert collapser.pending == " 20%"
    # Many bars below each other do not wait for ever.
    shown = [line.text for line in collapser.add(b"".join(b"\rbar %d\n" % n for n in range(99)), 4.0)]
    assert len(shown) >= 99 - MOST_ROWS


CODES = [
    "\x1b[A",
    "\x1b[2A",
    "\x1b[B",
    "\x1b[E",
    "\x1b[F",
    "\x1b[3C",
    "\x1b[2D",
    "\x1b[7G",
    "\x1b[1m",
    "\x1b[0m",
    "\x1b[?25l",
]
ERASING = ["\x1b[K", "\x1b[1K", "\x1b[2K", "\x1b[J"]
SPECIAL = ["\n", "\r", "\r\n", "\b", "\t", *CODES]
outputs = st.lists(
    st.sampled_from(SPECIAL + ERASING + ["\x1b]0;title\x07", "\x1b[", "\x1b"]) | st.text(max_size=6)
)


@given(outputs.map("".join), st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_how_it_is_cut_into_pieces_makes_no_difference(text: str, cuts: Sequence[int], colours: bool) -> None:
    written = text.encode(errors="surrogateescape") if text.isprintable() else text.encode(errors="replace")
    whole = Collapser(with_colours=colours)
    expected = [line.text for line in whole.add(written, 1.0) + whole.finish()]
    cut = Collapser(with_colours=colours)
    places = [0, *sorted(min(place, len(written)) for place in cuts), len(written)]
    lines = [line for start, end in pairwise(places) for line in cut.add(written[start:end], 1.0)]
    assert [line.text for line in lines + cut.finish()] == expected


@given(st.lists(st.sampled_from(SPECIAL) | st.integers(1, 5)))
def test_no_text_is_lost_that_nothing_was_drawn_over(parts: Sequence[str | int]) -> None:
    # Every character is another one, so that each can be followed to its end.
    fresh = iter(range(0x4E00, 0x9FFF))
    written = [p if isinstance(p, str) else "".join(chr(next(fresh)) for _ in range(p)) for p in parts]
    shown = set("".join(collapsed("".join(written))))
    assert set(left_on_an_endless_screen(written)) <= shown


# How many rows down each goes, and to which column.
MOVES: dict[str, tuple[int, Callable[[int], int]]] = {
    "\n": (1, lambda _: 0),
    "\r": (0, lambda _: 0),
    "\r\n": (1, lambda _: 0),
    "\b": (0, lambda column: max(0, column - 1)),
    "\x1b[A": (-1, lambda column: column),
    "\x1b[2A": (-2, lambda column: column),
    "\x1b[B": (1, lambda column: column),
    "\x1b[E": (1, lambda _: 0),
    "\x1b[F": (-1, lambda _: 0),
    "\x1b[3C": (0, lambda column: column + 3),
    "\x1b[2D": (0, lambda column: max(0, column - 2)),
    "\x1b[7G": (0, lambda _: 6),
    "\x1b[1m": (0, lambda column: column),
    "\x1b[0m": (0, lambda column: column),
    "\x1b[?25l": (0, lambda column: column),
}


def left_on_an_endless_screen(parts: Sequence[str]) -> list[str]:
    """A terminal that is as large as it needs to be, without anything it could scroll away."""
    cells: dict[tuple[int, int], str] = {}
    row, column = 0, 0
    for part in parts:
        if part in MOVES:
            down, across = MOVES[part]
            row, column = row + down, across(column)
            continue
        for character in part:
            cells[row, column] = character
            column += 1
    return [character for character in cells.values() if character != "\t"]
