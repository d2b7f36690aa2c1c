"""The options: defaults by level, what is refused and in which words, and what enters the compile key."""

import copy
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kp_dynamo.config.matmul_precision import resolve_matmul_precision
from kp_dynamo.config.options import CompileOptions, ignored_in_key, option_fields
from kp_dynamo.exceptions import TPUConfigurationError

pytestmark = pytest.mark.compat


@dataclass(frozen=True)
class AddNothing:
    """A pass as options see one."""

    times: int = 1
    name: str = "add_nothing"

    def __call__(self, gm):
        return gm


NAMES = [f.name for f in option_fields()]

# For each option: a value that is accepted, as it is stored, and is not the default at the level it comes with.
ANOTHER_VALUE = {
    "level": "aggressive",
    "precision": "float32",
    "matmul_precision": "high",
    "keep_float32": ("aten.mm",),
    "reduce_dtype": "bfloat16",
    "reduce_scatter": "all_to_all",
    "fuse": False,
    "checkpoint": 0.5,
    "optimizer_state_factor": 0,
    "memory_fraction": 0.5,
    "memory_budget_gb": 16.0,
    "target": "v6e",
    "disable_passes": ("cast_bf16",),
    "extra_passes": (AddNothing(2),),
    "donate": "mutated",
    "blocks": "on",
    "buckets": (64, 128),
    "over_bucket": "error",
    "cache_size": 7,
    "compile_timeout_s": 2.5,
    "lowering": "stock",
    "strict": True,
    "check_indices": True,
    "ledger": True,
    "dump_dir": Path("dumps"),
}
WRONG = {
    "level": ["fast", "", "BALANCED", 1, None, ["balanced"]],
    "precision": ["bf16", None, 16],
    "matmul_precision": ["medium", 3],
    "keep_float32": ["aten.mm", [1], [""], {"aten.mm"}, None],
    "reduce_dtype": ["float32", "bf16", True],
    "reduce_scatter": ["all-to-all", "ring", True],
    "fuse": [1, 0, "yes", None],
    "blocks": ["On", True, None],
    "checkpoint": ["on", True, False, None, 1.5, -0.1, float("nan")],
    "buckets": ["pow3", [], [128, 64], [64, 64], [0], [1.5], [True], {"min": 1}, {"min": 9, "max": 3, "step": 1}, 64],
    "over_bucket": ["ignore", None],
    "memory_fraction": [0, -1, 1.1, None, "90%", True, float("nan")],
    "memory_budget_gb": [0, -1, "16", float("inf"), 10**400],
    "optimizer_state_factor": [-1, "2", True],
    "disable_passes": ["cast_bf16", [None], 3, None],
    "extra_passes": [AddNothing(), [AddNothing], [print], [object()], None],
    "donate": ["on", True, None],
    "target": ["v3", "V5E", None, 5],
    "cache_size": [0, -1, 1.0, True, "100", None],
    "compile_timeout_s": [0, -1, "300", True],
    "lowering": ["torch_xla", None],
    "strict": [1, "true", None],
    "check_indices": [1, "yes", None],
    "ledger": [1, "yes", None],
    "dump_dir": ["", b"dumps", 3, "a\0b", True],
}
PAIRS_WRONG = [(key, value) for key, values in WRONG.items() for value in values]


def test_every_option_is_in_these_tables():
    assert set(ANOTHER_VALUE) == set(NAMES)
    assert set(WRONG) == set(NAMES)


@pytest.mark.parametrize(
    ("level", "scope", "fuse", "checkpoint"),
    [
        ("conservative", "linear", False, "off"),
        ("balanced", "matmul", True, "auto"),
        ("aggressive", "all", True, "auto"),
    ],
)
def test_a_level_decides_what_the_user_left_out(level, scope, fuse, checkpoint):
    options = CompileOptions(level=level)
    assert (options.cast_scope, options.fuse, options.checkpoint) == (scope, fuse, checkpoint)
    assert options.precision == "bfloat16"
    assert options.given == {"level"}


def test_balanced_is_the_default():
    assert CompileOptions() == CompileOptions(level="balanced")


@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
@pytest.mark.parametrize("fuse", [True, False])
def test_the_user_wins_over_the_level(level, fuse):
    options = CompileOptions.from_dict({"fuse": fuse, "level": level, "precision": "float32"})
    assert (options.level, options.fuse, options.precision) == (level, fuse, "float32")
    assert options.given == {"level", "fuse", "precision"}


@pytest.mark.parametrize(("key", "value"), ANOTHER_VALUE.items())
def test_a_value_is_stored(key, value):
    options = CompileOptions(**{key: value})
    assert getattr(options, key) == value
    assert options != CompileOptions()


def test_lists_become_tuples_and_paths_become_paths():
    options = CompileOptions(keep_float32=["aten.mm"], disable_passes=[], extra_passes=[AddNothing()], dump_dir="a/b")
    assert (options.keep_float32, options.disable_passes) == (("aten.mm",), ())
    assert options.extra_passes == (AddNothing(),)
    assert options.dump_dir == Path("a/b")


@pytest.mark.parametrize(("key", "value"), PAIRS_WRONG)
def test_a_bad_value_raises_with_the_allowed_ones(key, value):
    with pytest.raises(
        TPUConfigurationError, match=rf"^option {key}=.* is invalid.*\. Allowed: .+\. Try: correct it, or omit"
    ) as e:
        CompileOptions(**{key: value})
    assert isinstance(e.value, ValueError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "fast"}, "option level='fast' is invalid. Allowed: 'conservative', 'balanced', 'aggressive'. Try: "),
        ({"cache_size": 0}, "option cache_size=0 is invalid. Allowed: an int >= 1. Try: correct it"),
        (
            {"memory_fraction": 2},
            "option memory_fraction=2 is invalid. Allowed: a number > 0 and <= 1. Try: correct it",
        ),
        (
            {"keep_float32": "aten.mm"},
            "option keep_float32='aten.mm' is invalid: write ['aten.mm'], a list with one name. Allowed: a list of ",
        ),
        ({"precison": "float32"}, "option 'precison' is unknown; did you mean 'precision'? Allowed: level, "),
        ({"zzz": 1}, "option 'zzz' is unknown. Allowed: level, precision, "),
        ({3: 1}, "option 3 is unknown. Allowed: level, "),
        (
            ["level"],
            "options=['level'] (list) is invalid. Allowed: a dict such as {'level': 'balanced'}. Try: torch.compile(",
        ),
        (
            "level",
            "options='level' (str) is invalid. Allowed: a dict such as {'level': 'balanced'}. Try: torch.compile(",
        ),
    ],
)
def test_the_words_of_a_refusal(options, message):
    with pytest.raises(TPUConfigurationError) as e:
        CompileOptions.from_dict(options)
    assert str(e.value).startswith(message)


def test_an_unknown_keyword_is_no_type_error():
    with pytest.raises(TPUConfigurationError, match="did you mean 'cache_size'"):
        CompileOptions(cachesize=3)


def test_no_options_are_the_defaults():
    assert CompileOptions.from_dict(None) == CompileOptions.from_dict({}) == CompileOptions()


@dataclass
class NotFrozen:
    name: str = "not_frozen"

    def __call__(self, gm):
        return gm


@dataclass(frozen=True)
class NotCallable:
    name: str = "not_callable"


@dataclass(frozen=True)
class Nameless:
    def __call__(self, gm):
        return gm


@dataclass(frozen=True)
class HasAnAddress(AddNothing):
    helper: object = field(default_factory=object)


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (AddNothing, "is a class; give an instance of it"),
        (NotCallable(), "is not callable"),
        (NotFrozen(), "is not a frozen dataclass"),
        (Nameless(), "has no `name` string"),
        (HasAnAddress(), "has a memory address in its repr"),
    ],
)
def test_an_object_that_is_no_pass_is_refused_with_the_reason(candidate, reason):
    with pytest.raises(TPUConfigurationError, match=re.escape(reason)):
        CompileOptions(extra_passes=[AddNothing(), candidate])


def test_every_option_changes_the_key_or_says_why_not():
    plain = CompileOptions()
    for name in NAMES:
        another = copy.copy(plain)
        value = ANOTHER_VALUE[name]
        object.__setattr__(another, name, value)
        is_ignored = name in ignored_in_key()
        assert (another.key() == plain.key()) == is_ignored, name


def test_what_the_key_ignores_and_why():
    assert ignored_in_key() == {
        "blocks": "it decides how a graph is divided, not what a program contains; captures are looked up by it",
        "cache_size": "it limits how many programs are kept, not what is in them",
        "compile_timeout_s": "it limits how long compiling may take, not what is compiled",
        "dump_dir": "it sets where graphs are written, not what is in them",
    }


def test_equal_options_have_equal_keys():
    assert CompileOptions(keep_float32=["a"]).key() == CompileOptions.from_dict({"keep_float32": ("a",)}).key()
    assert CompileOptions(extra_passes=[AddNothing(1)]).key() != CompileOptions(extra_passes=[AddNothing(2)]).key()


@pytest.mark.parametrize(
    ("chosen", "torch_setting", "resolved"),
    [
        (None, "highest", "highest"),
        (None, "high", "high"),
        (None, "medium", "default"),
        ("default", "highest", "default"),
        ("highest", "medium", "highest"),
    ],
)
def test_matmul_precision_follows_torch_unless_chosen(chosen, torch_setting, resolved):
    assert resolve_matmul_precision(chosen, torch_setting) == resolved


def test_every_word_of_torch_for_matmul_precision_is_known():
    import torch

    before = torch.get_float32_matmul_precision()
    try:
        for word in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(word)
            assert resolve_matmul_precision(None, torch.get_float32_matmul_precision())
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_unknown_word_of_torch_is_refused():
    with pytest.raises(
        TPUConfigurationError, match=r"precision\(\)='lowest' is invalid. Allowed: highest, high, medium"
    ):
        resolve_matmul_precision(None, "lowest")


def test_options_cannot_be_changed():
    with pytest.raises(AttributeError):
        CompileOptions().level = "aggressive"


@pytest.mark.parametrize("twin_of", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_options_can_be_copied_hashed_and_sent(twin_of):
    options = CompileOptions(**ANOTHER_VALUE)
    twin = twin_of(options)
    assert (twin, hash(twin), twin.given, twin.key()) == (options, hash(options), options.given, options.key())


_VALUES = st.one_of(
    *(st.just(value) for value in ANOTHER_VALUE.values()),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
    st.builds(object) | st.just(float) | st.just(10**5000),
)
_JUNK = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=12) | st.integers(), _VALUES, max_size=4)


@given(_JUNK | _VALUES)
def test_junk_is_accepted_or_refused_in_our_words(junk):
    try:
        options, refusal = CompileOptions.from_dict(junk), None
    except TPUConfigurationError as error:
        options, refusal = None, str(error)
    assert options.given == frozenset(junk or ()) if refusal is None else refusal.startswith("option")


@given(st.fixed_dictionaries({}, optional={key: st.just(value) for key, value in ANOTHER_VALUE.items()}))
def test_given_options_are_returned(given_options):
    options = CompileOptions.from_dict(given_options)
    assert {key: getattr(options, key) for key in options.given} == given_options
    stored = {name: getattr(options, name) for name in NAMES}
    assert CompileOptions.from_dict(stored) == options
