"""The exceptions: their family, and that they survive the ways they travel."""

import inspect
import pickle

import pytest

from kp_dynamo import exceptions

pytestmark = pytest.mark.compat

BASES = {
    "TPUBackendError": (Exception,),
    "TPUNotAvailableError": (exceptions.TPUBackendError,),
    "TPUDeviceError": (exceptions.TPUBackendError,),
    "TPUConfigurationError": (exceptions.TPUBackendError, ValueError),
    "TPUModelPreparationError": (exceptions.TPUBackendError,),
    "XLACompilationError": (exceptions.TPUBackendError,),
    "XLACompilationTimeoutError": (exceptions.XLACompilationError,),
    "TPUMemoryError": (exceptions.TPUBackendError,),
    "TPUOutOfMemoryError": (exceptions.TPUMemoryError,),
    "TPUMemoryPoolError": (exceptions.TPUMemoryError,),
    "TPUCacheError": (exceptions.TPUBackendError,),
    "TPUOptimizationError": (exceptions.TPUBackendError,),
    "TPUValidationError": (exceptions.TPUBackendError, ValueError),
    "TPUDistributedError": (exceptions.TPUBackendError,),
    "TPUCheckpointError": (exceptions.TPUBackendError,),
}


def test_these_exceptions_and_no_others_exist():
    assert {name: cls.__bases__ for name, cls in inspect.getmembers(exceptions, inspect.isclass)} == BASES


@pytest.mark.parametrize("name", BASES)
def test_an_exception_travels_between_processes(name):
    error = getattr(exceptions, name)("level is 'fast'; allowed: 'balanced'")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == "level is 'fast'; allowed: 'balanced'"


@pytest.mark.parametrize("name", BASES)
def test_torch_does_not_take_an_exception_for_a_reason_to_fall_back(name):
    from torch._dynamo.exc import exceptions_allowed_to_be_fallback

    assert not issubclass(getattr(exceptions, name), exceptions_allowed_to_be_fallback)
