"""What a browser must find wrong with a page, so that a test that finds nothing can be believed."""

from __future__ import annotations

# Each is one line of HTML added to a page, and the beginning of what is found.
DEFECTS = {
    "wide": ('<p style="width:3000px">far too wide</p>', "the page is 30"),
    "on top": ('<p>below</p><p style="margin-top:-2.4rem">above it</p>', '"below" overlaps "above it"'),
    "table": ('<div class="scroll"><table><tr><td style="min-width:900px">x</td></tr></table></div>', "a table is 9"),
    "label": (
        '<figure><svg viewBox="0 0 100 20"><text x="90" y="15">a long label</text></svg></figure>',
        '"a long label" is cut off at the side',
    ),
}
