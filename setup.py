"""Builds the library of the disk cache. What else setuptools needs is in pyproject.toml and setup.cfg."""

from glob import glob

from setuptools import Extension, setup

NATIVE = "kp_dynamo/disk_cache/native"

setup(
    ext_modules=[
        # No Python module: torch_xla loads it. The name places it beside the Python files that look for it.
        Extension(
            "kp_dynamo.disk_cache._plugin",
            sorted(glob(f"{NATIVE}/*.c")),
            depends=sorted(glob(f"{NATIVE}/*.h")),
            extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden"],
            libraries=["dl"],
            optional=True,  # without a C compiler the package installs, and `enable_disk_cache` says what is missing
        )
    ]
)
