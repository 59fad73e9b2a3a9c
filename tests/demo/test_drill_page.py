"""The page of `unbroken drill` in a real browser: all of it is seen, and it asks nobody for anything."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "drill" / "scripts" / "standin.py"
STEPS = 9
KILLS = (("3", "SIGKILL after-step"), ("6:in-save", "SIGKILL in-save"))
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# It has to work for root and without a device, and must not call home.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
NEEDED = "looks at the page in a real browser: pip install playwright, and a Chromium on PATH"

# What the browser paints at the points of the undisturbed curve, and where the marks stand along the steps.
LOOK = """() => {
  const svg = document.querySelector('svg'), marks = [...svg.querySelectorAll('line')]
  const curves = [...svg.querySelectorAll('path')].slice(1)
  const [reference, ...attempts] = curves, box = reference.getBoundingClientRect()
  const colour = element => getComputedStyle(element).stroke
  const at = distance => {
    const point = reference.getPointAtLength(distance).matrixTransform(reference.getScreenCTM())
    return document.elementsFromPoint(point.x, point.y)
  }
  const painted = [0.02, 0.25, 0.5, 0.75, 0.98].map(share => at(share * reference.getTotalLength()))
  return {
    attempts: attempts.length,
    colours: [...new Set([...curves, ...marks].map(colour)), getComputedStyle(document.body).backgroundColor],
    bothArePainted: painted.map(found =>
      found.includes(reference) && attempts.some(attempt => found.includes(attempt))),
    marks: marks.map(mark => ({
      says: mark.querySelector('title').textContent,
      share: (mark.getBoundingClientRect().x - box.x) / box.width,
      height: mark.getBoundingClientRect().height / svg.getBoundingClientRect().height,
    })),
    isTooWide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  }
}"""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page of a real drill, and its fields."""
    place = tmp_path_factory.mktemp("drill")
    chosen = [word for at, _ in KILLS for word in ("--at", at)]
    drill = [sys.executable, "-P", "-m", "unbroken.cli.main", "drill", "--steps", str(STEPS), *chosen]
    command = [
        *drill,
        "--json",
        "--html",
        str(place / "drill.html"),
        "--",
        sys.executable,
        str(SCRIPT),
        "none",
    ]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "drill.html", json.loads(done.stdout)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason=NEEDED)
    if BROWSER is None:
        pytest.skip(NEEDED)
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield started
        started.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_a_browser_paints_both_curves_and_marks_the_kills_and_asks_for_nothing_else(
    browser: Any, rehearsed: tuple[Path, dict[str, Any]], width: int, scheme: str
) -> None:
    path, fields = rehearsed
    asked: list[str] = []
    said: list[str] = []
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    view.on("request", lambda request: asked.append(request.url))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("console", lambda message: said.append(message.text))
    view.goto(path.as_uri())
    seen = view.evaluate(LOOK)

    assert (asked, said) == ([path.as_uri()], [])
    assert view.title() == fields["headline"]
    assert view.locator(".verdict strong").is_visible()
    assert seen["attempts"] == len(fields["processes"]) == 3
    assert seen["bothArePainted"] == [True] * 5
    # The undisturbed curve, the resumed ones, the marks and what is behind them.
    assert len(set(seen["colours"])) == len(seen["colours"]) == 4
    assert [mark["says"] for mark in seen["marks"]] == [how for _, how in KILLS]
    for mark, ended in zip(seen["marks"], fields["processes"], strict=False):
        assert mark["share"] == pytest.approx((ended["reached"] - 1) / (STEPS - 1), abs=0.01)
        assert mark["height"] > 0.5
    assert not seen["isTooWide"]
    view.close()
