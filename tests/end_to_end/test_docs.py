"""README.md and docs/ match the code: options, known limits, links, examples."""

import dataclasses
import re
from pathlib import Path

import pytest

import kp_dynamo
from kp_dynamo.compat.known_limits import EARLIER_LIMITS, KNOWN_LIMITS
from kp_dynamo.config import TPUConfig
from kp_dynamo.config.levels import LevelPreset
from kp_dynamo.config.options import option_fields
from tests.spine import run_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def page(name):
    return (ROOT / "docs" / name).read_text()


def documented_options():
    rows = (line.strip("|").split(" | ") for line in page("options.md").splitlines() if re.match(r"\| `\w+`", line))
    return {row[0].strip(" `"): row[1:] for row in rows}


def default_text(option):
    if option.name in LevelPreset.__dataclass_fields__:
        return "by level"
    return "[]" if option.default == () else repr(option.default)


def test_every_option_is_documented_as_it_is():
    expected = {f.name: (f.metadata["rule"].allowed, default_text(f)) for f in option_fields()}
    assert {name: (row[0], row[1]) for name, row in documented_options().items()} == expected


def test_every_field_of_the_configuration_is_documented_as_it_is():
    rows = (
        line.strip("|").split(" | ") for line in page("object_api.md").splitlines() if re.match(r"\| `\w+` \|", line)
    )
    documented = {row[0].strip(" `"): (row[1], row[2]) for row in rows if len(row) == 4}
    defaults = {f.name: getattr(f.default, "value", f.default) for f in dataclasses.fields(TPUConfig)}
    rules = {f.name: f.metadata["rule"].allowed for f in dataclasses.fields(TPUConfig)}
    assert documented == {name: (rules[name], repr(defaults[name])) for name in rules}


def test_every_documented_exception_exists():
    _, _, table = page("object_api.md").partition("| exception | when |")
    named = {name for line in table.split("\n\n")[0].splitlines() for name in re.findall(r"`(\w+Error)s?`", line)}
    ours = {name for name in kp_dynamo.__all__ if name.endswith("Error")}
    assert ours - named == {"TPUBackendError"}
    assert named - ours == {"ValueError"}


def test_the_known_limits_are_those_of_doctor():
    _, _, limits = page("correctness.md").partition("## Known limits")
    assert items(limits) == [f"{limit.what} *{limit.cure}*" for limit in KNOWN_LIMITS]


def test_the_limits_of_earlier_versions_are_those_of_the_warning():
    limits = page("versions.md").partition("prints the\nsame:")[2].partition("\n## ")[0]
    assert items(limits) == [f"{limit.what} *{limit.cure}*" for limit in EARLIER_LIMITS]


def items(text):
    """The points of a list, each on one line."""
    return [" ".join(item.split()) for item in text.split("\n* ")[1:]]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(path):
    text = path.read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        linked = path.parent / target if target else path
        assert linked.is_file(), target
        headings = [
            re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-")
            for h in re.findall(r"^#+ (.*)", linked.read_text(), re.M)
        ]
        assert not anchor or anchor in headings
    for named in re.findall(r"`((?:kp_dynamo|tests|docs)/[\w./]+)`", text):
        assert (ROOT / named).exists(), named


def test_the_files_of_the_architecture_exist():
    rows = [line.split("|")[1] for line in page("architecture.md").splitlines() if line.startswith("| `")]
    files = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(files) > 20
    assert [name for name in files if not (ROOT / "kp_dynamo" / name).exists()] == []


def test_the_files_of_the_answers_exist():
    named = set(re.findall(r"`([\w.]+/[\w./]*\w\.(?:py|md))`", page("architecture.md")))
    assert len(named) > 100
    assert [name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / "kp_dynamo"))] == []


EXAMPLES = [
    pytest.param(code, id=f"{path.stem}-{number}")
    for path in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code):
    exec(code, {"__name__": "example"})


@pytest.mark.parametrize(("name", "count"), [("devices.md", 4), pytest.param("sharding.md", 8, marks=pytest.mark.slow)])
def test_the_examples_for_several_devices_run(name, count):
    examples = re.findall(rf"```python devices={count}\n(.*?)```", page(name), re.S)
    assert examples
    for code in examples:
        run_script(code, {"CPU_NUM_DEVICES": str(count)}, timeout_s=300)
