"""`unbroken inspect --html`: checkpoints of several formats in a real browser."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.rundir.identity import open_run

from ..checkpoint.states import snapshot_at
from .browser import BINARY, Browser

HOSTILE = "<script>alert(7)</script>\u202e\x1b[31m<img src=x onerror=alert(8)>"
LAYERS = 1250
MANY = (*(f"attention.{name}.weight" for name in "qkvo"), "mlp.up", "mlp.down", "norm.weight", "norm.bias")

LOOK = """(() => {
  const all = selector => [...document.querySelectorAll(selector)]
  const tree = document.querySelector('#tensors')
  return {
    foreign: document.scripts.length + all('img, link, iframe, [src]').length,
    isTooWide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    shown: all('.tree .one').filter(row => row.checkVisibility()).length,
    there: all('.tree .one').length,
    parts: all('#parts td:first-child').map(cell => cell.innerText.trim()),
    bar: all('#parts .bar i').map(piece => Math.round(piece.getBoundingClientRect().width)),
    bad: all('.bad').map(one => one.innerText),
    said: document.body.innerText,
    text: document.body.textContent,
  }
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if BINARY is None:
        pytest.skip("looks at the page in a real browser: Chromium is not installed")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "digits"
    open_run(directory)
    CheckpointStore(directory).save(snapshot_at(7))
    return directory


def safetensors(path: Path, tensors: dict[str, bytes]) -> Path:
    """Write tensors of float32 in one dimension."""
    header, at = {}, 0
    for name, data in tensors.items():
        end = at + len(data)
        header[name] = {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [at, end]}
        at = end
    words = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(words)) + words + b"".join(tensors.values()))
    return path


def page(source: Path, path: Path, *options: str, expect: int = 0) -> Path:
    assert main(["inspect", str(source), "--html", str(path), *options]) == expect
    return path


def test_ten_thousand_tensors_are_there_folded_and_open_level_by_level(
    browser: Browser, tmp_path: Path
) -> None:
    tensors = {f"model.layers.{layer}.{name}": bytes(8) for layer in range(LAYERS) for name in MANY}
    source = safetensors(tmp_path / "large.safetensors", tensors)
    path = page(source, tmp_path / "page.html")
    browser.open(path, width=1280)
    seen = browser.look(LOOK)
    assert (seen["there"], seen["shown"], seen["foreign"]) == (LAYERS * len(MANY), 0, 0)
    assert "10,000 tensors" in seen["said"]
    assert "model.layers" in seen["said"]
    for fold in range(3):
        browser.look(f"document.querySelectorAll('.tree summary')[{fold}].click()")
    seen = browser.look(LOOK)
    assert seen["shown"] == 4
    assert "q.weight\nF32\n2\n8 B" in seen["said"]


MAP = """(() => {
  const texts = [...document.querySelectorAll('.map text')].filter(one => one.checkVisibility())
  return {
    isTooWide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    outside: texts.filter(text => {
      const inner = text.getBBox(), outer = text.parentNode.querySelector('rect').getBBox()
      return inner.x < outer.x || inner.x + inner.width > outer.x + outer.width
        || inner.y < outer.y || inner.y + inner.height > outer.y + outer.height
    }).map(text => text.textContent),
    shown: texts.map(text => text.textContent),
    bars: [...document.querySelectorAll('.histogram')].map(one => one.getBoundingClientRect().width),
  }
})()"""
SOME = struct.pack("<4f", 0, 1, 2, 3)
OF_SIZES = {"a.large": SOME * 750, "a.half": SOME * 375, "a.long." + "name" * 40: SOME * 125, "b": SOME * 63}


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (360, True)], ids=["wide", "telephone"])
def test_the_names_in_a_map_of_sizes_lie_in_their_rectangles_and_histograms_are_seen(
    browser: Browser, tmp_path: Path, width: int, is_dark: bool
) -> None:
    path = page(safetensors(tmp_path / "x", OF_SIZES), tmp_path / "page.html", "--values")
    browser.open(path, width=width, dark=is_dark)
    browser.look("document.querySelectorAll('.tree details').forEach(one => { one.open = true })")
    seen = browser.look(MAP)
    assert (browser.asked, browser.said) == ([path.as_uri()], [])
    assert (seen["outside"], seen["isTooWide"]) == ([], False)
    assert {"a", "large", "half"} <= set(seen["shown"]) if width > 1000 else seen["shown"] == []
    assert (len(seen["bars"]), min(seen["bars"]) > 100) == (4, True)


def drawn(source: Path, path: Path, *options: str) -> tuple[str, list[ElementTree.Element]]:
    """Return the page and its pictures, each of which is whole XML."""
    text = page(source, path, *options).read_text()
    return text, [ElementTree.fromstring(one) for one in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


def test_areas_are_in_proportion_and_a_name_is_there_only_where_it_fits(tmp_path: Path) -> None:
    text, (picture,) = drawn(safetensors(tmp_path / "x", OF_SIZES), tmp_path / "page.html")
    places = {group.findtext("title"): group for group in picture.findall("g")}
    areas = {
        name: float(found.get("width", 0)) * float(found.get("height", 0))
        for name, found in ((name, group.find("rect")) for name, group in places.items())
        if found is not None
    }
    large, half = "a.large: F32, 3000, 12.0 kB", "a.half: F32, 1500, 6.0 kB"
    assert areas[large] / areas[half] == pytest.approx(2, rel=0.01)
    assert [one.text for one in places[large].findall("text")] == ["large", "12.0 kB"]
    assert not any("namename" in (one.text or "") for one in picture.iter("text"))
    assert any((name or "").startswith("a.long.namename") for name in places)
    assert '<i class="swatch d0"></i>F32 21.0 kB, 100.0%' in text


def test_a_page_of_very_many_tensors_has_histograms_of_the_largest_and_says_so(tmp_path: Path) -> None:
    some = struct.pack("<2f", 0, 1)
    tensors = {f"x.{index}": some for index in range(2000)}
    _, pictures = drawn(safetensors(tmp_path / "all", tensors), tmp_path / "all.html", "--values")
    assert len(pictures) == 1 + 2000
    source = safetensors(tmp_path / "many", {**tensors, "large": some * 2})
    text, pictures = drawn(source, tmp_path / "many.html", "--values")
    assert len(pictures) == 1 + 200
    assert "Histograms are of the 200 largest of 2,001 tensors only." in text
    assert "16 B</span><em><svg" in text
    assert "histogram" not in page(source, tmp_path / "none.html").read_text().partition("</style>")[2]


def test_a_map_of_very_many_tensors_is_no_larger_than_one_can_see(tmp_path: Path) -> None:
    tensors = {f"model.layers.{layer}.{name}": bytes(8) for layer in range(LAYERS) for name in MANY}
    source = safetensors(tmp_path / "large.safetensors", {**tensors, "head": bytes(80_000)})
    _, (picture,) = drawn(source, tmp_path / "page.html")
    rectangles = picture.findall(".//rect")
    assert 2 < len(rectangles) < 4000
    titles = [one.text for one in picture.iter("title")]
    assert "head: F32, 20000, 80.0 kB" in titles


def test_a_map_shows_hostile_names_as_text_and_only_what_has_bytes(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    _, (picture,) = drawn(safetensors(tmp_path / "x", {HOSTILE: bytes(400), "empty": b""}), path)
    (title,) = picture.iter("title")
    assert title.text == f"{HOSTILE!r}: F32, 100, 400 B".replace("'", "")
    assert drawn(safetensors(tmp_path / "y", {"empty": b""}), path)[1] == []


def test_a_page_shows_what_fits_a_pattern_and_that_there_is_more(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "x", {"a.one": bytes(4), "b.two": bytes(8)})
    text, (picture,) = drawn(source, tmp_path / "page.html", "--match", "a.*")
    assert "1 of 2 tensors fit a.*: no others are shown" in text
    assert [one.text for one in picture.iter("title")] == ["a.one: F32, 1, 4 B"]


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (360, True)], ids=["wide", "telephone"])
def test_what_a_hostile_file_says_is_shown_and_never_obeyed(
    browser: Browser, tmp_path: Path, width: int, is_dark: bool
) -> None:
    bad = struct.pack("<3f", float("nan"), 1, float("inf"))
    deep = "a." * 500 + "b"
    tensors = {HOSTILE: bad, f"model.{HOSTILE}": bytes(4), "model.weight": bytes(400), deep: bytes(4)}
    path = page(safetensors(tmp_path / f"{HOSTILE[:8]}.bin", tensors), tmp_path / "page.html", "--values")
    browser.open(path, width=width, dark=is_dark)
    seen = browser.look(LOOK)
    browser.picture(tmp_path / "picture.png")
    assert (browser.asked, browser.said) == ([path.as_uri()], [])
    assert (seen["foreign"], seen["isTooWide"], seen["there"]) == (0, False, 4)
    assert "<script>alert(7)<" in seen["text"]
    assert "\\u202e\\x1b[31m<img src=x onerror=alert(8)>" in seen["text"]
    assert "\u202e" not in seen["text"]
    assert "1 tensor with NaN or infinite numbers" in seen["bad"][0]
    assert "least 1, largest 1, mean 1, nans 1, infinities 1" in seen["said"]


def test_a_checkpoint_of_a_run_shows_its_step_parts_and_that_it_was_verified(
    browser: Browser, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = page(run, tmp_path / "page.html", "--verify")
    assert capsys.readouterr().out == f"{path}\n"
    browser.open(path, width=1280)
    seen = browser.look(LOOK)
    assert (browser.asked, browser.said, seen["foreign"]) == ([path.as_uri()], [], 0)
    assert [name.partition(" ")[0] for name in seen["parts"]] == ["model", "optimizer", "rng"]
    assert seen["bar"][0] > 1000
    assert "every byte is what was written (xxh3-128 of every byte)" in seen["said"]
    for words in ("step-00000007", "step 7, inside epoch 0", "600x500", "1.2 MB", "betas"):
        assert words in seen["text"]
    assert main(["inspect", str(run), "--html", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    assert main(["inspect", str(run), "--html", str(path), "--json"]) == 2
    assert main(["inspect", str(run), "--html", str(tmp_path / "no/such.html")]) == 2


def test_damage_is_named_on_the_page_and_ends_with_3(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "run")
    open_run(tmp_path / "run")
    store.save(snapshot_at(7))
    shard = max((tmp_path / "run").glob("checkpoints/*/*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(data)
    text = page(tmp_path / "run", tmp_path / "page.html", "--verify", "--values", expect=3).read_text()
    assert '<span class="state bad">DAMAGED</span>' in text
    assert f"<li>{shard.name}: " in text
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "run"), "--verify", "--json"]) == 3
    check = json.loads(capsys.readouterr().out)["verification"]
    assert (check["intact"], check["findings"][0]["file"]) == (False, shard.name)
    assert main(["inspect", str(run), "--verify"]) == 0
    assert "every byte is what was written" in capsys.readouterr().out
    plain = safetensors(tmp_path / "plain.safetensors", {"a": bytes(4)})
    assert main(["inspect", str(plain), "--verify"]) == 0
    assert "carries no checksum" in capsys.readouterr().out
