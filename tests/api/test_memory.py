"""The memory manager: what it gives out, what it says of it, and what it refuses."""

import gc
import threading
import time
import types

import pytest
import torch

from kp_dynamo import (
    KernelPyTorchConfig,
    TPUConfig,
    TPUConfigurationError,
    TPUMemoryError,
    TPUMemoryPoolError,
    TPUNotAvailableError,
    TPUOutOfMemoryError,
    TPUVersion,
)
from kp_dynamo.api.memory import manager as memory
from kp_dynamo.api.memory.manager import TPUMemoryManager
from kp_dynamo.compat import xla
from kp_dynamo.hardware import CHIPS, GB

pytestmark = pytest.mark.compat

MIB = 2**20


def config(**changes):
    return TPUConfig(**{"version": "v5e", **changes})


@pytest.fixture
def manager():
    return TPUMemoryManager(config())


def of_bytes(num_bytes):
    """A configuration whose budget is `num_bytes`."""
    return config(version="v6e", v6e_memory_gb=num_bytes / GB, memory_fraction=1.0)


def test_a_switched_off_tpu_has_no_memory_to_give():
    with pytest.raises(TPUNotAvailableError, match="enabled=False"):
        TPUMemoryManager(config(enabled=False))


def test_a_tpu_that_is_switched_off_later_has_none_either():
    config = TPUConfig()
    manager = TPUMemoryManager(config)
    config.enabled = False
    with pytest.raises(TPUNotAvailableError):
        manager.allocate_tensor((2, 2))
    with pytest.raises(TPUNotAvailableError):
        manager.create_memory_pool(2, (2, 2))
    with pytest.raises(TPUNotAvailableError):
        manager.optimize_tensor_layout(torch.ones(3, 3, device="xla"))


def test_what_is_no_configuration_of_a_tpu_is_refused():
    with pytest.raises(
        TPUConfigurationError, match=r"of type KernelPyTorchConfig is invalid.*Try: config\.hardware\.tpu"
    ):
        TPUMemoryManager(KernelPyTorchConfig())


# Tensors.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_a_tensor_is_zeros_on_the_device(manager, dtype):
    tensor = manager.allocate_tensor((3, 5), dtype)
    assert (tensor.device, tensor.dtype, tuple(tensor.shape)) == (xla.device(), dtype, (3, 5))
    assert not tensor.any().item()


def test_a_tensor_has_its_buffer_when_it_is_returned(manager):
    tensor = manager.allocate_tensor((4, 4))
    assert not xla.xlac()._check_tensor_need_materialization([tensor])[0]


def test_live_tensors_are_counted_and_dead_ones_are_not(manager):
    a, b = manager.allocate_tensor((256, 1024)), manager.allocate_tensor((2, 256, 1024), torch.bfloat16)
    stats = manager.get_memory_stats()
    assert (stats.allocated_memory, stats.active_tensors, stats.source) == (2 * MIB, 2, "accounting")
    assert stats.available_memory == int(16 * GB * 0.9) - 2 * MIB
    del a
    assert manager.get_memory_stats().allocated_memory == MIB
    del b
    stats = manager.get_memory_stats()
    assert (stats.allocated_memory, stats.active_tensors) == (0, 0)


def test_a_view_keeps_the_memory_of_its_tensor_counted(manager):
    view = manager.allocate_tensor((256, 1024))[:1]
    gc.collect()
    assert manager.get_memory_stats().allocated_memory == MIB
    del view
    gc.collect()
    assert manager.get_memory_stats().allocated_memory == 0


def test_a_device_that_counts_is_believed(manager, monkeypatch):
    told = {"bytes_used": 3 * 10**9, "bytes_limit": 10**10, "peak_bytes_used": 5 * 10**9}
    monkeypatch.setattr(xla, "memory_info", lambda device: told)
    stats = manager.get_memory_stats()
    assert (stats.source, stats.allocated_memory, stats.total_memory) == ("xla", 3 * 10**9, 10**10)
    assert stats.available_memory == 6 * 10**9
    told["bytes_used"] = 10**10
    assert manager.get_memory_stats().available_memory == 0
    with pytest.raises(TPUOutOfMemoryError, match=r"10.000 GB in use \(xla\)"):
        manager.allocate_tensor((1,))


def test_a_failure_of_the_device_to_count_is_not_taken_for_silence(monkeypatch):
    import torch_xla.core.xla_model as xm

    def fail(device):
        raise RuntimeError("Bad StatusOr access: INTERNAL: the chip is gone")

    monkeypatch.setattr(xm, "get_memory_info", fail)
    with pytest.raises(RuntimeError, match="the chip is gone"):
        xla.memory_info()


def test_the_cpu_device_does_not_count():
    assert xla.memory_info() is None


@pytest.mark.parametrize(
    ("given", "total"),
    [
        ({"version": "auto"}, CHIPS["v5e"].hbm_bytes),
        ({"version": TPUVersion.V5P}, CHIPS["v5p"].hbm_bytes),
        ({"version": "v6e"}, CHIPS["v6e"].hbm_bytes),
        ({"version": "v6e", "v6e_memory_gb": 31.5, "v7_memory_gb": 1.0}, 31.5e9),
        ({"version": "v7"}, CHIPS["v7"].hbm_bytes / 2),  # a device is half a chip
        ({"version": "v7", "v7_memory_gb": 128.0}, 64e9),
        ({"version": "v5e", "v6e_memory_gb": 1.0}, CHIPS["v5e"].hbm_bytes),
    ],
)
def test_the_configured_chip_is_the_budget(given, total):
    stats = TPUMemoryManager(config(memory_fraction=0.5, **given)).get_memory_stats()
    assert (stats.total_memory, stats.available_memory) == (int(total), int(total) // 2)
    assert stats.memory_fraction == 0.5


def test_what_does_not_fit_is_refused_before_it_is_allocated(manager):
    with pytest.raises(
        TPUOutOfMemoryError, match=r"float32\[100000, 100000\] takes 40.000 GB, but only 14.400 GB are available"
    ):
        manager.allocate_tensor((100_000, 100_000))
    assert manager.get_memory_stats().allocated_memory == 0


def test_the_budget_is_what_live_tensors_leave():
    manager = TPUMemoryManager(of_bytes(2 * MIB))
    held = [manager.allocate_tensor((256, 1024)), manager.allocate_tensor((256, 1024))]
    with pytest.raises(TPUOutOfMemoryError):
        manager.allocate_tensor((1,))
    held.pop()
    manager.allocate_tensor((256, 1024))


@pytest.mark.parametrize(
    ("text", "error"),
    [("RESOURCE_EXHAUSTED: 5 bytes", TPUOutOfMemoryError), ("INTERNAL: no", TPUMemoryError)],
)
def test_a_device_that_refuses_is_an_error_of_ours(manager, monkeypatch, text, error):
    def refuse(tensors):
        raise RuntimeError(text)

    monkeypatch.setattr(xla, "materialize", refuse)
    with pytest.raises(TPUMemoryError, match=text) as raised:
        manager.allocate_tensor((2,))
    assert type(raised.value) is error


@pytest.mark.parametrize(
    "given",
    [((2, -1), torch.float32), (5, torch.float32), ((2.0,), torch.float32), ((True,), torch.float32), ("ab", 1)],
)
def test_a_shape_that_is_none_is_refused(manager, given):
    with pytest.raises(TPUMemoryError, match="Allowed: a tuple of ints >= 0"):
        manager.allocate_tensor(*given)


def test_a_dtype_that_is_none_is_refused(manager):
    with pytest.raises(TPUMemoryError, match=r"dtype='float32' is invalid. Allowed: a torch.dtype"):
        manager.allocate_tensor((2,), "float32")


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**63,)])
def test_sizes_that_no_memory_has(manager, shape):
    for allocate in (manager.allocate_tensor, lambda shape: manager.create_memory_pool(2, shape)):
        with pytest.raises(TPUOutOfMemoryError, match="exceeds every memory"):
            allocate(shape)


def test_a_tensor_made_in_inference_mode_can_be_written_to_outside(manager):
    with torch.inference_mode():
        tensor = manager.allocate_tensor((2,))
    tensor.add_(1)
    assert tensor.tolist() == [1, 1]


# Layout.


@pytest.mark.parametrize(
    ("version", "dtype", "shape", "padded"),
    [
        ("v5e", torch.float32, (3, 100), (8, 128)),
        ("v5e", torch.float32, (9, 129), (16, 256)),
        ("v5e", torch.bfloat16, (3, 100), (16, 128)),
        ("v5e", torch.int8, (3, 100), (32, 128)),
        ("v5e", torch.float64, (3, 100), (8, 128)),
        ("v6e", torch.float32, (3, 100), (8, 128)),
        ("v6e", torch.float32, (8, 300), (8, 512)),
        ("v5e", torch.float32, (8, 300), (8, 384)),
        ("v5e", torch.float32, (2, 5, 7, 130), (2, 5, 8, 256)),
        ("v5e", torch.float32, (130,), (256,)),
    ],
)
def test_the_last_two_dimensions_fill_the_tiles(version, dtype, shape, padded):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    result = TPUMemoryManager(config(version=version)).optimize_tensor_layout(tensor)
    assert (tuple(result.shape), result.dtype) == (padded, dtype)
    front = result[tuple(slice(size) for size in shape)]
    assert torch.equal(front, tensor)
    assert result.double().sum() == tensor.double().sum()


@pytest.mark.parametrize("shape", [(8, 128), (16, 256), (4, 8, 384), (), (128,), (0, 3)])
def test_what_fills_its_tiles_is_returned_as_it_is(manager, shape):
    tensor = torch.ones(shape)
    assert manager.optimize_tensor_layout(tensor) is tensor


def test_padding_keeps_device_and_gradient(manager):
    tensor = torch.ones(3, 5, device="xla", requires_grad=True)
    result = manager.optimize_tensor_layout(tensor)
    assert result.device == tensor.device
    result.square().sum().backward()
    assert tensor.grad.cpu().tolist() == [[2.0] * 5] * 3
    assert manager.get_memory_stats().allocated_memory == 8 * 128 * 4


def test_padding_on_the_cpu_takes_no_memory_of_the_device():
    manager = TPUMemoryManager(of_bytes(4000))
    assert manager.optimize_tensor_layout(torch.ones(3, 5)).shape == (8, 128)
    assert manager.get_memory_stats().allocated_memory == 0
    assert not manager.get_allocation_history()


def test_padded_products_keep_their_values(manager):
    a, b = torch.randn(5, 70), torch.randn(70, 30)
    with_zeros = manager.optimize_tensor_layout(a) @ manager.optimize_tensor_layout(b.t()).t()
    torch.testing.assert_close(with_zeros[:5, :30], a @ b)


def test_padding_that_does_not_fit_is_refused():
    manager = TPUMemoryManager(of_bytes(4000))
    with pytest.raises(TPUOutOfMemoryError, match=r"padded to \[8, 128\]"):
        manager.optimize_tensor_layout(torch.ones(1, 1, device="xla"))


def test_what_is_no_tensor_has_no_layout(manager):
    with pytest.raises(TPUMemoryError, match="tensor of type list is invalid"):
        manager.optimize_tensor_layout([1.0])


# Pools.


def test_a_pool_gives_the_same_buffer_again(manager):
    pool = manager.create_memory_pool(pool_size=2, tensor_size=(4, 4), dtype=torch.bfloat16)
    tensor = manager.get_tensor_from_pool(pool)
    assert (tensor.dtype, tuple(tensor.shape), tensor.device) == (torch.bfloat16, (4, 4), xla.device())
    assert manager.return_tensor_to_pool(pool, tensor) is True
    assert manager.get_tensor_from_pool(pool) is tensor
    details = manager.get_pool_stats()["pool_details"][pool]
    assert (details["lent"], details["idle"], details["utilization"]) == (1, 0, 0.5)


def test_a_pool_costs_nothing_before_it_is_used(manager):
    pool = manager.create_memory_pool(4, (256, 1024))
    assert manager.get_memory_stats().allocated_memory == 0
    tensor = manager.get_tensor_from_pool(pool)
    stats = manager.get_memory_stats()
    assert (stats.allocated_memory, stats.reserved_memory) == (MIB, MIB)
    manager.return_tensor_to_pool(pool, tensor)
    del tensor
    assert manager.get_memory_stats().allocated_memory == MIB


def test_an_exhausted_pool_says_so(manager):
    pool = manager.create_memory_pool(2, (2,))
    held = [manager.get_tensor_from_pool(pool) for _ in range(2)]
    assert held[0] is not held[1]
    assert manager.get_pool_stats()["pool_details"][pool]["utilization"] == 1.0
    with pytest.raises(TPUMemoryPoolError, match=f"{pool} is exhausted: all 2 of its tensors are in use"):
        manager.get_tensor_from_pool(pool)


def test_a_buffer_that_is_dropped_makes_room(manager):
    pool = manager.create_memory_pool(1, (2,))
    for _ in range(3):
        tensor = manager.get_tensor_from_pool(pool)
        assert not tensor.any()
        tensor.fill_(1)
        del tensor
        gc.collect()


REFUSED = {
    "twice": "it was already returned",
    "foreign": "it is not from this pool",
    "another pool's": "it is not from this pool",
    "a view": "it is not from this pool",
    "a copy": "it is not from this pool",
    "not a tensor": "it is not from this pool",
}


@pytest.fixture
def not_taken(manager):
    """What a pool must not take back, by what it is; and the pool."""
    pool, other = manager.create_memory_pool(2, (2,)), manager.create_memory_pool(2, (2,))
    lent, twice = manager.get_tensor_from_pool(pool), manager.get_tensor_from_pool(pool)
    manager.return_tensor_to_pool(pool, twice)
    return pool, {
        "twice": twice,
        "foreign": torch.zeros(2, device="xla"),
        "another pool's": manager.get_tensor_from_pool(other),
        "a view": lent.view(2),
        "a copy": lent.clone(),
        "not a tensor": "x",
    }


@pytest.mark.parametrize("what", REFUSED)
def test_a_return_that_is_not_due_is_false_and_changes_nothing(manager, not_taken, caplog, what):
    pool, tensors = not_taken
    before = manager.get_pool_stats()
    assert manager.return_tensor_to_pool(pool, tensors[what]) is False
    assert manager.get_pool_stats() == before
    assert REFUSED[what] in caplog.text


@pytest.mark.parametrize("what", REFUSED)
def test_under_strict_validation_it_raises(manager, not_taken, what):
    pool, tensors = not_taken
    manager.config.enable_strict_validation = True
    with pytest.raises(TPUMemoryPoolError, match=REFUSED[what]):
        manager.return_tensor_to_pool(pool, tensors[what])


def test_a_buffer_of_another_shape_by_now_is_not_taken(manager):
    pool = manager.create_memory_pool(1, (2,))
    tensor = manager.get_tensor_from_pool(pool)
    tensor.data = torch.zeros(3, device="xla")
    assert manager.return_tensor_to_pool(pool, tensor) is False
    assert tuple(manager.get_tensor_from_pool(pool).shape) == (2,)


def test_a_returned_buffer_has_neither_gradient_nor_history(manager):
    pool = manager.create_memory_pool(1, (2,))
    tensor = manager.get_tensor_from_pool(pool).requires_grad_()
    tensor.sum().backward()
    manager.return_tensor_to_pool(pool, tensor)
    tensor = manager.get_tensor_from_pool(pool)
    assert (tensor.grad, tensor.requires_grad) == (None, False)
    tensor.mul_(torch.ones(2, device="xla", requires_grad=True))
    manager.return_tensor_to_pool(pool, tensor)
    assert manager.get_tensor_from_pool(pool).grad_fn is None


@pytest.mark.parametrize("call", ["get_tensor_from_pool", "return_tensor_to_pool"])
@pytest.mark.parametrize("pool_id", ["pool_9", None, []])
def test_an_unknown_pool(manager, call, pool_id):
    known = manager.create_memory_pool(1, (2,))
    args = (pool_id, torch.ones(2)) if call.startswith("return") else (pool_id,)
    with pytest.raises(TPUMemoryPoolError, match=f"pool_id=.* is unknown. Allowed: {known}"):
        getattr(manager, call)(*args)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_pool_has_a_size(manager, size):
    with pytest.raises(TPUMemoryPoolError, match="Allowed: an int >= 1"):
        manager.create_memory_pool(size, (2,))


def test_a_pool_that_cannot_fit_is_refused_when_it_is_made(manager):
    with pytest.raises(TPUOutOfMemoryError, match=r"a pool of 1000 x torch.float32\[1000, 10000\] takes 40.000 GB"):
        manager.create_memory_pool(1000, (1000, 10_000))
    assert manager.get_pool_stats() == {"total_pools": 0, "reserved_bytes": 0, "pool_details": {}}


def test_a_pool_that_fitted_when_it_was_made_may_find_no_memory_later():
    manager = TPUMemoryManager(of_bytes(MIB))
    pool = manager.create_memory_pool(1, (256, 1024))
    tensor = manager.allocate_tensor((256, 512))
    with pytest.raises(TPUOutOfMemoryError):
        manager.get_tensor_from_pool(pool)
    assert manager.get_pool_stats()["pool_details"][pool]["lent"] == 0
    del tensor
    manager.get_tensor_from_pool(pool)


def test_pools_go_and_what_is_lent_stays_with_its_borrower(manager):
    pool = manager.create_memory_pool(1, (2,))
    tensor = manager.get_tensor_from_pool(pool)
    manager.clear_memory_pools()
    assert manager.get_pool_stats()["total_pools"] == 0
    assert tensor.tolist() == [0, 0]
    with pytest.raises(TPUMemoryPoolError, match=r"pool_id=.* is unknown. Allowed: none. Try: create_memory_pool"):
        manager.return_tensor_to_pool(pool, tensor)


def test_threads_never_hold_one_buffer_at_once(manager):
    pool = manager.create_memory_pool(3, (2,))
    held, wrong, lock = set(), [], threading.Lock()

    def work():
        for _ in range(60):
            try:
                tensor = manager.get_tensor_from_pool(pool)
            except TPUMemoryPoolError:
                continue
            with lock:
                if id(tensor) in held:
                    wrong.append("two at once")
                held.add(id(tensor))
            time.sleep(0)
            manager.get_memory_stats()  # asks the pools, while others allocate
            with lock:
                held.discard(id(tensor))
            if not manager.return_tensor_to_pool(pool, tensor):
                wrong.append("not taken back")

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    details = manager.get_pool_stats()["pool_details"][pool]
    assert details["idle"] <= 3
    assert details["lent"] == 0


def test_threads_return_one_buffer_once(manager):
    pool = manager.create_memory_pool(1, (2,))
    tensor, taken = manager.get_tensor_from_pool(pool), []
    threads = [
        threading.Thread(target=lambda: taken.append(manager.return_tensor_to_pool(pool, tensor))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [False] * 7 + [True]


# Watching and tidying.


def test_monitoring_takes_no_longer_than_asked(manager):
    start = time.monotonic()
    looks = manager.monitor_memory(interval=0.05, duration=0.22)
    assert time.monotonic() - start < 0.6  # and a busy machine's share
    assert 2 <= len(looks) <= 5
    times = [look.timestamp for look in looks]
    assert times == sorted(times)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping and the test move."""

    class Clock:
        now = 1000.0

        def sleep(self, seconds):
            self.now += seconds

    clock = Clock()
    stand_in = types.SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now, sleep=clock.sleep)
    monkeypatch.setattr(memory, "time", stand_in)
    return clock


def test_the_configuration_says_how_long_to_watch(clock):
    manager = TPUMemoryManager(config(monitoring_interval_seconds=0.5, monitoring_duration_seconds=2.0))
    assert [look.timestamp - 1000 for look in manager.monitor_memory()] == [0, 0.5, 1, 1.5, 2]
    assert len(manager.monitor_memory(duration=0)) == 1
    assert len(manager.monitor_memory(interval=3, duration=2)) == 1
    assert clock.now == 1002.0


def test_looks_that_come_late_are_left_out(clock, manager, monkeypatch):
    original = manager.get_memory_stats

    def slow():
        clock.now += 2.5
        return original()

    monkeypatch.setattr(manager, "get_memory_stats", slow)
    looks = manager.monitor_memory(interval=1, duration=10)
    assert clock.now - 1000 <= 10 + 2.5
    assert len(looks) == 4


def test_monitoring_sees_the_peak(manager):
    held = manager.allocate_tensor((256, 1024))
    looks = manager.monitor_memory(interval=0.01, duration=0.02)
    assert max(look.allocated_memory for look in looks) == MIB
    del held


@pytest.mark.parametrize(
    "how",
    [
        {"interval": "1"},
        {"interval": 0},
        {"interval": -1},
        {"interval": float("nan")},
        {"duration": -1},
        {"duration": float("inf")},
    ],
)
def test_times_must_be_times(manager, how):
    with pytest.raises(TPUMemoryError, match=f"{next(iter(how))}=.* is invalid. Allowed: finite, interval > 0"):
        manager.monitor_memory(**how)


def test_allocations_are_remembered_for_as_long_as_configured(clock):
    manager = TPUMemoryManager(config(allocation_history_retention_seconds=10.0))
    manager.allocate_tensor((2, 3))
    clock.now += 6
    manager.allocate_tensor((4,), torch.int8)
    history = manager.get_allocation_history()
    assert [(entry.shape, entry.num_bytes) for entry in history] == [((2, 3), 24), ((4,), 4)]
    clock.now += 6
    assert [entry.shape for entry in manager.get_allocation_history()] == [(4,)]
    clock.now += 6
    assert manager.get_allocation_history() == []


def test_the_memory_of_allocations_is_bounded(manager, monkeypatch):
    monkeypatch.setattr(manager, "_history", memory.deque(maxlen=3))
    for size in range(5):
        manager.allocate_tensor((size,))
    assert [entry.shape for entry in manager.get_allocation_history()] == [(2,), (3,), (4,)]


def test_tidying_lets_go_of_what_nobody_uses(clock):
    manager = TPUMemoryManager(config(allocation_history_retention_seconds=10.0))
    pool = manager.create_memory_pool(2, (256, 1024))
    lent, idle = manager.get_tensor_from_pool(pool), manager.get_tensor_from_pool(pool)
    manager.return_tensor_to_pool(pool, idle)
    del idle
    cycle = [manager.allocate_tensor((256, 1024))]
    cycle.append(cycle)
    del cycle
    clock.now += 60
    manager.allocate_tensor((1,))
    told = manager.optimize_memory_usage()
    assert (told["idle_bytes"], told["freed_bytes"]) == (MIB, 2 * MIB)
    assert manager.get_memory_stats().allocated_memory == MIB
    assert manager.return_tensor_to_pool(pool, lent)
