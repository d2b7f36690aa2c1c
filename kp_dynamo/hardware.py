"""Hardware figures of each TPU generation in one table, each figure with its source.

Figures in `CHIPS` are per chip: the two cores together, on chips with two. A program runs on a device: a chip, but on
v7 half a chip. `DEVICES` has the figures of a device. GB is 1e9 bytes, GiB is 2**30.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

GB = 1e9
GIB = 2**30

GOOGLE = "cloud.google.com/tpu/docs, the system architecture page of the generation"
JAX = "jax/_src/pallas/mosaic/tpu_info.py of JAX 0.7.1"
SCALING_BOOK = "jax-ml.github.io/scaling-book, 'How to think about TPUs'"
PRICES = "cloud.google.com/tpu/pricing, on demand, a US region, as published in September 2026"


LANES = 128
"""Columns of a memory tile, on every generation (JAX)."""
SUBLANES = 8
"""Rows of a memory tile with 4-byte elements; narrower elements are packed, two or four rows in place of one."""


@dataclass(frozen=True)
class Chip:
    """One TPU chip.

    Attributes:
        name: Generation, such as "v5e".
        hbm_bytes: HBM capacity.
        hbm_bytes_per_s: HBM bandwidth.
        bf16_flops: Peak bfloat16 floating point operations a second, all cores.
        int8_ops: Peak int8 operations a second, or None.
        fp8_flops: Peak float8 operations a second, or None.
        num_cores: TensorCores.
        num_devices: Devices of JAX and torch_xla, each with its share of the memory and of the cores.
        num_mxus: Matrix units (MXUs) per core.
        mxu_size: Rows and columns of a matrix unit.
        vmem_bytes: Vector memory per core.
        ici_bytes_per_s: Bandwidth between chips, both directions together, or None if unpublished.
        clock_hz: Clock of the cores; `notes` says where it is derived.
        usd_per_hour: Price of a chip-hour.
        sources: Field -> source of its figure.
        notes: Caveats about the figures.
    """

    name: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    bf16_flops: float
    int8_ops: float | None
    fp8_flops: float | None
    num_cores: int
    num_mxus: int
    mxu_size: int
    vmem_bytes: int
    ici_bytes_per_s: float | None
    clock_hz: float
    usd_per_hour: float
    num_devices: int = 1
    sources: dict[str, str] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()

    def with_memory(self, memory_gb: float) -> Chip:
        """The same chip with the user's own memory size, in GB."""
        sources = {**self.sources, "hbm_bytes": "the user's configuration"}
        return replace(self, hbm_bytes=memory_gb * GB, sources=sources)

    @property
    def device_word(self) -> str:
        """What a report calls one device: "chip", or "device" if a chip has several."""
        return "chip" if self.num_devices == 1 else "device"

    def device_text(self, article: str = "one") -> str:
        """One device in words: "one v5e", "half a v7"."""
        return f"{article} {self.name}" if self.num_devices == 1 else f"half a {self.name}"

    def of_a_device(self) -> Chip:
        """The share of one device in the chip's memory, cores, links and price."""
        parts = self.num_devices
        if parts == 1:
            return self
        return replace(
            self,
            hbm_bytes=self.hbm_bytes / parts,
            hbm_bytes_per_s=self.hbm_bytes_per_s / parts,
            bf16_flops=self.bf16_flops / parts,
            int8_ops=None if self.int8_ops is None else self.int8_ops / parts,
            fp8_flops=None if self.fp8_flops is None else self.fp8_flops / parts,
            num_cores=self.num_cores // parts,
            ici_bytes_per_s=None if self.ici_bytes_per_s is None else self.ici_bytes_per_s / parts,
            usd_per_hour=self.usd_per_hour / parts,
            num_devices=1,
        )

    def tiled_shape(self, shape: Sequence[int], element_bytes: int) -> tuple[int, ...]:
        """`shape` with its last two sizes padded to the chip's tiles.

        Rows (the second-to-last size) are padded to a multiple of 8 x (4 / element bytes). Columns (the last size)
        are padded to a multiple of 128, or of the MXU size if there are more than 128. A vector has only columns.
        """
        *outer, columns = shape or (0,)
        edge = max(LANES, self.mxu_size) if columns > LANES else LANES
        tiled = [*outer, _round_up(columns, edge)] if shape else []
        if outer:
            tiled[-2] = _round_up(outer[-1], SUBLANES * max(1, 4 // element_bytes))
        return tuple(tiled)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _sources(**others: str) -> dict[str, str]:
    """The usual source of each field, overridden by `others`."""
    usual = {
        **dict.fromkeys(("hbm_bytes", "hbm_bytes_per_s", "bf16_flops", "int8_ops", "ici_bytes_per_s"), GOOGLE),
        "num_devices": GOOGLE,
        **dict.fromkeys(("num_cores", "num_mxus", "mxu_size", "vmem_bytes", "fp8_flops"), JAX),
        "clock_hz": SCALING_BOOK,
        "usd_per_hour": PRICES,
    }
    return {**usual, **others}


_DERIVED_CLOCK = "The clock is derived: peak FLOP/s over MXUs x rows x columns x 2."

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4", hbm_bytes=32 * GIB, hbm_bytes_per_s=1200e9, bf16_flops=275e12, int8_ops=275e12, fp8_flops=None,
            num_cores=2, num_mxus=4, mxu_size=128, vmem_bytes=16 * 2**20, ici_bytes_per_s=None, clock_hz=1.05e9,
            usd_per_hour=3.22, sources=_sources(clock_hz="derived from bf16_flops"), notes=(_DERIVED_CLOCK,),
        ),
        Chip(
            name="v5e", hbm_bytes=16 * GB, hbm_bytes_per_s=819e9, bf16_flops=197e12, int8_ops=393e12, fp8_flops=None,
            num_cores=1, num_mxus=4, mxu_size=128, vmem_bytes=128 * 2**20, ici_bytes_per_s=400e9, clock_hz=1.5e9,
            usd_per_hour=1.20, sources=_sources(),
        ),
        Chip(
            name="v5p", hbm_bytes=95 * GIB, hbm_bytes_per_s=2765e9, bf16_flops=459e12, int8_ops=918e12,
            fp8_flops=459e12, num_cores=2, num_mxus=4, mxu_size=128, vmem_bytes=64 * 2**20, ici_bytes_per_s=1200e9,
            clock_hz=1.75e9, usd_per_hour=4.20, sources=_sources(clock_hz="derived from bf16_flops"),
            notes=(_DERIVED_CLOCK,),
        ),
        Chip(
            name="v6e", hbm_bytes=32 * GB, hbm_bytes_per_s=1638e9, bf16_flops=918e12, int8_ops=1836e12,
            fp8_flops=918e12, num_cores=1, num_mxus=2, mxu_size=256, vmem_bytes=128 * 2**20, ici_bytes_per_s=800e9,
            clock_hz=1.75e9, usd_per_hour=2.70, sources=_sources(),
            notes=("The clock fits the peak only with four matrix units, where the documents say two.",),
        ),
        Chip(
            name="v7", hbm_bytes=192 * GIB, hbm_bytes_per_s=7380e9, bf16_flops=2307e12, int8_ops=None,
            fp8_flops=4614e12, num_cores=2, num_mxus=2, mxu_size=256, vmem_bytes=64 * 2**20, ici_bytes_per_s=1200e9,
            clock_hz=2.2e9, usd_per_hour=12.00, num_devices=2, sources=_sources(),
            notes=(
                "A chip is two devices. Each has half of the memory, of its bandwidth and of the peak.",
                "Memory is 192 GiB by the vendor and by JAX; a guide that says 128 GB is not followed.",
                "The clock fits the peak only with four matrix units a core, where the documents say two.",
            ),
        ),
    )
}  # fmt: skip

DEVICES: dict[str, Chip] = {name: chip.of_a_device() for name, chip in CHIPS.items()}
"""The figures of one device of each generation; on all except v7, those of the chip."""


@dataclass(frozen=True)
class Spread:
    """The chips that share the work of one program. Its graph has the sizes of all chips together.

    Attributes:
        num_chips: How many; on v7, how many devices.
        batch_parts: Among how many of them the batch is divided.
        head_parts: Among how many of them heads are divided.
    """

    num_chips: int = 1
    batch_parts: int = 1
    head_parts: int = 1

    @property
    def is_along_batch(self) -> bool:
        """Whether there are several, all along the batch: they divide weights for the memory only."""
        return self.batch_parts == self.num_chips > 1


ONE_CHIP = Spread()


def memory_budget_bytes(chip: Chip, fraction: float, budget_gb: float | None) -> float:
    """Bytes that a program may use: `fraction` of the chip's memory, or the user's own figure in GB."""
    return chip.hbm_bytes * fraction if budget_gb is None else budget_gb * GB
