"""The report of the demo's run, which has seen kills, a stop and a flipped byte, in a real browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.cli.main import main

from .browser import BINARY, Browser

DEMO = Path(__file__).resolve().parents[2] / "demo" / "run_demo.py"
LOOK = """[
  [...document.querySelectorAll('#curve line.restart')].length,
  document.querySelector('#curve path.superseded').getTotalLength(),
  document.documentElement.scrollWidth - document.documentElement.clientWidth,
  document.body.innerText,
]"""


@pytest.mark.chaos
@pytest.mark.skipif(BINARY is None, reason="looks at the page in a real browser: Chromium is not installed")
def test_the_report_of_the_demo_shows_its_disasters(tmp_path: Path) -> None:
    output, page = tmp_path / "out", tmp_path / "report.html"
    subprocess.run([sys.executable, str(DEMO), "--output", str(output)], check=True, capture_output=True)
    assert main(["report", str(output / "disturbed"), "-o", str(page)]) == 0
    browser = Browser(tmp_path / "profile")
    try:
        for width in (1280, 360):
            browser.open(page, width=width)
            restarts, superseded, too_wide, text = browser.look(LOOK)
            browser.picture(tmp_path / f"report-{width}.png")
            assert (browser.asked, browser.said) == ([page.as_uri()], [])
            assert restarts >= 3
            assert superseded > 0
            assert too_wide == 0
            for words in ("SIGKILL", "had to be done again", "in quarantine", "bit for bit"):
                assert words in text
    finally:
        browser.close()
