"""A page in the Chromium 88 of the package `kaleido` 0.2.1, which pip installs and which needs nothing of the system.

It has its own fonts, so that all machines see the same page. It takes no address and no pictures: it evaluates
`kaleido_scopes.plotly(spec)` for each line of its input, and prints the result. A script of ours, which it loads where
it would load plotly, is that function.
"""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.page.browser import LOOK, WIDTHS

INSTALL = "pip install kaleido==0.2.1"  # later ones have no Chromium of their own
_TIME_LIMIT_S = 60
_OPTIONS = ("--disable-gpu", "--no-sandbox", "--disable-breakpad", "--disable-dev-shm-usage")
_ANSWER = """
const answer = (spec) => new Promise((done) => {
  const frame = document.createElement("iframe");
  frame.style = `border:0;display:block;width:${spec.data.width}px;height:900px`;
  frame.srcdoc = spec.data.html;
  frame.onload = () => {
    const [, findings] = looked(frame, spec.data.is_open);
    done({ code: 0, message: "", format: "json", result: findings });
  };
  document.body.append(frame);
});
Object.defineProperty(window, "kaleido_scopes", { set() {}, get: () => ({ plotly: answer }) });
"""


def look_in_wheel(html: str, size: str, folder: Path, *, is_open: bool) -> list[str]:
    """What is wrong with the page at a size, as `browser.look`, without a screenshot.

    Args:
        html: The page.
        size: "phone" or "desktop".
        folder: Where the script goes.
        is_open: Whether everything that folds is opened first.
    """
    script = folder / "answer.js"
    script.write_text(LOOK + _ANSWER)
    spec = {"data": {"html": html, "width": WIDTHS[size], "is_open": is_open}, "format": "json"}
    command = [_chromium(), "plotly", f"--plotlyjs={script.as_uri()}", *_OPTIONS]
    given = f"{json.dumps(spec)}\n"
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    started, *answers = map(json.loads, done.stdout.splitlines())
    assert (started["code"], len(answers)) == (0, 1), done.stderr[-2000:]
    assert answers[0]["code"] == 0, answers[0]["message"]
    return list(answers[0]["result"])


def _chromium() -> str:
    found = find_spec("kaleido")
    folder = Path(found.origin or "").parent if found is not None else Path("none")
    path = folder / "executable" / "kaleido"
    if not path.exists():
        pytest.fail(f"the pages are tested in the Chromium of kaleido, which is not installed. Try: {INSTALL}", False)
    return str(path)
