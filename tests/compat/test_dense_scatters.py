"""torch_xla's dense scatter, which only a TPU takes, is off. The variable that turns it off is read in C++."""

import importlib.util
import mmap
import os

from kp_dynamo.compat import dense_scatters
from kp_dynamo.compat.dense_scatters import FACTOR
from tests.spine import run_script


def test_the_dense_form_is_off_unless_the_user_asks_for_it(monkeypatch):
    monkeypatch.setenv(FACTOR, "")  # so that it is restored
    monkeypatch.delenv(FACTOR)
    dense_scatters.turn_off()
    assert os.environ[FACTOR] == "0"
    monkeypatch.setenv(FACTOR, "7")
    dense_scatters.turn_off()
    assert os.environ[FACTOR] == "7"


def test_importing_the_package_turns_it_off():
    source = f"import os; os.environ.pop('{FACTOR}', 0); import kp_dynamo; print(os.environ['{FACTOR}'])"
    assert run_script(source).strip() == "0"


def test_torch_xla_reads_the_variable():
    """A name that torch_xla no longer knows would change nothing."""
    library = importlib.util.find_spec("_XLAC").origin
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(FACTOR.encode()) > 0
