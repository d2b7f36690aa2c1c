"""A page in headless Chromium, at the width of a phone or a desktop: what overflows, what overlaps, a screenshot.

The page is shown in a frame of that width, because a window of Chromium is at least 500 pixels wide. A script around
the frame looks at every piece of visible text, and Chromium prints the document with what the script found. The page
itself has no script.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

INSTALL = "apt-get install --yes --no-install-recommends chromium"
WIDTHS = {"phone": 390, "desktop": 1280}
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_TIME_LIMIT_S = 120
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--allow-file-access-from-files", "--virtual-time-budget=10000", "--no-first-run", "--disable-extensions",
)  # fmt: skip
LOOK = (Path(__file__).parent / "look.js").read_text()
_WHEN_LOADED = """
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const found = looked(frame, %s);
  frame.style.height = `${found[0]}px`;
  document.getElementById("found").textContent = JSON.stringify(found);
});
"""


def chromium() -> str | None:
    """The path of an installed Chromium."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def look(html: str, size: str, folder: Path, *, is_open: bool, is_dark: bool = False) -> list[str]:
    """What is wrong with the page at a size: one line for each finding. Writes a screenshot to `folder`.

    Args:
        html: The page.
        size: "phone" or "desktop".
        folder: Where the page and its screenshot go.
        is_open: Whether everything that folds is opened first.
        is_dark: Whether the page is shown in dark colors.
    """
    name = f"{size}{'-open' if is_open else ''}{'-dark' if is_dark else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "page.html").write_text(html)
    width = WIDTHS[size]
    frame = folder / f"{name}.html"
    frame.write_text(
        f'<!doctype html><meta charset="utf-8"><body style="margin:0"><pre id="found" hidden></pre>'
        f'<iframe src="page.html" style="border:0;display:block;width:{width}px;height:900px"></iframe>'
        f"<script>{LOOK}{_WHEN_LOADED % json.dumps(is_open)}</script>"
    )
    scheme = ("--blink-settings=preferredColorScheme=0",) if is_dark else ()
    printed = _run(folder, frame, *scheme, "--dump-dom", f"--window-size={max(width, 500)},900")
    found = re.search(r'<pre id="found"[^>]*>(.*?)</pre>', printed, re.DOTALL)
    assert found is not None, printed[:2000]
    assert found[1], "the script did not end in time"
    height, findings = json.loads(unescape(found[1]))
    size_of_window = f"--window-size={max(width, 500)},{min(height, 12000)}"
    _run(folder, frame, *scheme, f"--screenshot={folder / name}.png", size_of_window)
    return [f"{name}: {line}" for line in findings]


def _run(folder: Path, page: Path, *options: str) -> str:
    path = chromium()
    assert path is not None, f"the pages are tested in Chromium, which is not installed. Try: {INSTALL}"
    command = [path, *_OPTIONS, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
