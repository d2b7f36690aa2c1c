"""Compiles small programs through a PJRT plugin, without torch: what one process does with the disk cache.

Usage: driver.py LIBRARY PLANS, with a JSON list of `{"program": number, "options": hex, "devices": number}`. Writes the
state and the counters of the cache, and the seconds of each compilation.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

CLIENT_CREATE, CLIENT_COMPILE, ERROR_MESSAGE = 10, 20, 1
# CompileOptionsProto: one replica, one partition.
ONE_DEVICE = "1a0420012801"


class Api:
    """The table of functions that `GetPjrtApi` of a library returns."""

    def __init__(self, path: str):
        library = ctypes.CDLL(path)
        library.GetPjrtApi.restype = ctypes.c_void_p
        self.address = library.GetPjrtApi()

    def call(self, function: int, *fields: int | bytes | None) -> ctypes.Array:
        """Call with `struct_size`, no extensions, and one word for each field; returns the words afterwards."""
        kept = [ctypes.create_string_buffer(field) if isinstance(field, bytes) else field for field in fields]
        words = [ctypes.addressof(field) if isinstance(field, ctypes.Array) else field or 0 for field in kept]
        arguments = (ctypes.c_uint64 * (2 + len(words)))(8 * (2 + len(words)), 0, *words)
        entry = ctypes.c_void_p.from_address(self.address + 40 + 8 * function).value
        error = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(entry)(ctypes.addressof(arguments))
        if error:
            text = self.call(ERROR_MESSAGE, error, 0, 0) if function != ERROR_MESSAGE else None
            raise RuntimeError(ctypes.string_at(text[3], text[4]).decode() if text else "no message")
        return arguments

    def client(self, num_devices: int) -> int:
        name = ctypes.create_string_buffer(b"cpu_device_count")
        int64 = 1
        option = (ctypes.c_uint64 * 7)(56, 0, ctypes.addressof(name), len(name) - 1, int64, num_devices, 1)
        return self.call(CLIENT_CREATE, ctypes.addressof(option), 1, 0, 0, 0, 0, 0, 0, 0)[8]

    def compile(self, client: int, code: bytes, options: bytes) -> int:
        kind = ctypes.create_string_buffer(b"mlir")
        text = ctypes.create_string_buffer(code)
        program = (ctypes.c_uint64 * 6)(48, 0, ctypes.addressof(text), len(code), ctypes.addressof(kind), 4)
        return self.call(CLIENT_COMPILE, client, ctypes.addressof(program), options, len(options), 0)[6]


def program(number: int) -> bytes:
    """A StableHLO module; programs of different numbers differ in one constant."""
    return f"""module @add {{
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
    %c = stablehlo.constant dense<{number}.0> : tensor<4xf32>
    %y = stablehlo.add %x, %c : tensor<4xf32>
    return %y : tensor<4xf32>
  }}
}}""".encode()


def main(path: str, plans: list[dict]) -> dict:
    """What the cache did with these compilations."""
    from kp_dynamo.disk_cache import library

    api = Api(path)
    clients: dict[int, int] = {}
    seconds = []
    for plan in plans:
        devices = plan.get("devices", 1)
        if devices not in clients:
            clients[devices] = api.client(devices)
        start = time.perf_counter()
        assert api.compile(clients[devices], program(plan["program"]), bytes.fromhex(plan.get("options", ONE_DEVICE)))
        seconds.append(time.perf_counter() - start)
    return {"state": library.state(path), "seconds": seconds, **library.counters(path)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
