"""Which chip this machine has."""

from __future__ import annotations

from kp_dynamo.compat import importing, xla
from kp_dynamo.exceptions import TPUDeviceError


def device_kind() -> str:
    """ "CPU", "TPU" or PJRT's name of another device."""
    importing.load()
    import torch_xla.runtime

    return str(torch_xla.runtime.device_type())


# XLA's names of the chips (torch_xla 2.9 passes on PJRT's).
_CHIP_OF_KIND = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7",
    "TPU v7": "v7",
}


def chip_name() -> str | None:
    """The chip of this machine, as named in `hardware.py`; None if the device is not a TPU. Starts the client.

    Raises:
        TPUDeviceError: The TPU's generation is unknown.
    """
    if device_kind() != "TPU":
        return None
    kind = _kind_of_chip()
    if kind not in _CHIP_OF_KIND:
        raise TPUDeviceError(
            f"the device {kind!r} is unknown. Known: {', '.join(_CHIP_OF_KIND)}. Try: name the most similar chip with "
            "config.hardware.tpu.version, or the option 'target'."
        )
    return _CHIP_OF_KIND[kind]


def _kind_of_chip() -> str:
    xla.device()
    if not hasattr(xla.xlac(), "_xla_device_kind"):  # torch_xla 2.5 does not say
        return "TPU"
    if not xla.began_with_spmd():
        return str(xla.xlac()._xla_device_kind(str(xla.device())))
    # torch_xla 2.9 would ask SPMD's virtual device, which has no kind. libtpu names the chip among its versions, on a
    # line such as "TFRT TPU v5 lite".
    lines = str(xla.xlac()._xla_get_platform_version()).splitlines()
    return next((line.removeprefix("TFRT ") for line in lines if line.startswith("TFRT TPU")), "TPU")
