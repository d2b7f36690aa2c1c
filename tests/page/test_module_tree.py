"""Time by module as a tree: equal layers are one row, every row has the time of all below it."""

from __future__ import annotations

import pytest

from kp_dynamo.page.content import Branch
from kp_dynamo.page.limits import ModuleRow, limits_sentence
from kp_dynamo.page.module_tree import module_branches


def lines(branches: tuple[Branch, ...], depth: int = 0) -> list[str]:
    """One line for each row, indented."""
    found = []
    for branch in branches:
        cells = " | ".join(map(str, branch.cells))
        found.append(f"{'  ' * depth}{branch.label} {branch.detail}".rstrip() + f": {cells}")
        found += lines(branch.children, depth + 1)
    return found


def layer(i: int, kind: str = "Block", ms: float = 1.0) -> list[ModuleRow]:
    return [
        ModuleRow(f"layers.{i}", kind, 0.0),
        ModuleRow(f"layers.{i}.attn", "Attn", ms, matmul_ms=ms / 2),
        ModuleRow(f"layers.{i}.norm", "LayerNorm", ms, memory_ms=ms / 10),
    ]


def test_equal_layers_are_one_row_and_different_ones_are_not():
    rows = [row for i in range(32) for row in layer(i)] + layer(32, "Head")
    assert lines(module_branches(rows, "Gpt", {})) == [
        "Gpt: 66 ms | 100% | 4.0x | nothing known",
        "  layers: 66 ms | 100% | 4.0x | nothing known",
        "    0 to 31 x 32 Block: 64 ms | 97% | 4.0x | nothing known",
        "      attn Attn: 32 ms | 48% | 2.0x | matrix unit",
        "      norm LayerNorm: 32 ms | 48% | 10.0x | nothing known",
        "    32 Head: 2 ms | 3% | 4.0x | nothing known",
        "      attn Attn: 1 ms | 2% | 2.0x | matrix unit",
        "      norm LayerNorm: 1 ms | 2% | 10.0x | nothing known",
    ]


def test_a_list_with_equal_layers_alone_is_one_row():
    [root] = module_branches([row for i in range(4) for row in layer(i)], "Gpt", {})
    assert [child.label for child in root.children] == ["layers.0 to 3 x 4"]


def test_lists_in_lists_keep_their_counts():
    rows = [ModuleRow(f"layers.{i}.experts.{j}", "Expert", 1.0, 1.0) for i in range(3) for j in range(8)]
    assert lines(module_branches(rows, "Moe", {})) == [
        "Moe: 24 ms | 100% | 1.0x | matrix unit",
        "  layers.0 to 2 x 3.experts.0 to 7 x 8 Expert: 24 ms | 100% | 1.0x | matrix unit",
    ]


def test_what_a_module_does_itself_is_a_row_and_the_sum_stays():
    rows = [ModuleRow("attn", "Attn", 3.0, 3.0), ModuleRow("attn.out", "Linear", 1.0, 0.0, 1.0)]
    assert lines(module_branches(rows, "M", {"outside": [ModuleRow("", "", 4.0, links_ms=4.0)]})) == [
        "M: 4 ms | 50% | 1.3x | matrix unit",
        "  attn Attn: 4 ms | 50% | 1.3x | matrix unit",
        "    out Linear: 1 ms | 12% | 1.0x | memory",
        "    itself: 3 ms | 38% | 1.0x | matrix unit",
        "outside: 4 ms | 50% | 1.0x | links",
    ]


@pytest.mark.parametrize("rows", [[], [ModuleRow("a", "A", 0.0)]])
def test_no_time_is_no_tree(rows):
    assert module_branches(rows, "M", {}) == ()


def test_odd_names_are_kept():
    [root] = module_branches([ModuleRow("0", "<script>", 1.0), ModuleRow("$x$", "A", 1.0)], "M", {})
    assert {(child.label, child.detail) for child in root.children} == {("0", "<script>"), ("$x$", "A")}


def test_the_largest_rows_are_open_down_to_where_they_divide():
    rows = [row for i in range(4) for row in layer(i)]  # attn and norm take half of a layer each
    [root] = module_branches(rows, "Gpt", {})
    [layers] = root.children
    assert (root.is_open, layers.is_open) == (True, True)
    heavy = ModuleRow("head", "Head", 40.0)
    inside = [ModuleRow(f"head.{name}", "Linear", 30.0) for name in ("a.b", "c")]
    [root] = module_branches([*rows, heavy, *inside], "Gpt", {})
    head, layers = root.children
    assert (root.is_open, head.is_open, layers.is_open) == (True, True, False)
    assert [child.is_open for child in head.children] == [False, False, False]  # none has half of it


ROWS = [
    ModuleRow("a", "A", 6.0, matmul_ms=5.0, memory_ms=1.0),
    ModuleRow("b", "B", 2.5, memory_ms=2.0),
    ModuleRow("c", "C", 1.0, memory_ms=0.1),
    ModuleRow("", "", 0.5, links_ms=0.5),
]


def test_what_limits_the_step_is_said_in_words():
    assert limits_sentence(ROWS) == (
        "The matrix unit limits most of the step: 60% of the time is in modules that it bounds; 25% by the memory, 10% "
        "by nothing known, 5% waiting for the links."
    )
    assert limits_sentence(ROWS[2:], "programs") == (
        "No bound explains most of the step: 67% of the time is in programs that take more than 3 times every bound; "
        "33% waiting for the links."
    )
    assert limits_sentence(ROWS[1:2]) == (
        "The memory limits most of the step: 100% of the time is in modules that it bounds."
    )
    assert limits_sentence([]) == ""
