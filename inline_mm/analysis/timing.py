"""Side-by-side measurement of time, memory and saved activations, in one process."""

import ctypes
import gc
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

__all__ = [
    'describe_machine',
    'interleaved_seconds',
    'peak_bytes',
    'saved_bytes',
]


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on a device; nothing to wait for on a CPU."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def interleaved_seconds(
    calls: dict[str, Callable[[], object]],
    device: torch.device,
    rounds: int = 9,
    budget: float = 20.0,
    on_call: Callable[[str], None] = lambda name: None,
) -> dict[str, float]:
    """Median seconds of each call, all calls taking turns so that noise hits them alike.

    Args:
        calls: What to time, by name. Each is called once to warm up and once to learn its
            duration first.
        device: Where they run; the clock stops when its queue is empty.
        rounds: Most turns of each call.
        budget: Seconds that the turns of one call may take; a slow call has fewer turns, at
            least one.
        on_call: Told the name before each turn, for progress.

    Returns:
        dict[str, float]: Seconds by name.
    """

    def timed(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        synchronize(device)
        return time.perf_counter() - start

    times: dict[str, list[float]] = {}
    turns = {}
    for name, call in calls.items():
        on_call(name)
        first = timed(call)
        if first > budget:  # A warm-up this long is a measurement.
            times[name], turns[name] = [first], 0
        else:
            times[name] = []
            turns[name] = max(1, min(rounds, int(budget / max(timed(call), 1e-6))))
    order = list(calls)
    shuffle = random.Random(0).shuffle
    for turn in range(max(turns.values(), default=0)):
        shuffle(order)  # What runs after a side that filled the memory pays for it.
        for name in order:
            if turn < turns[name]:
                on_call(name)
                times[name].append(timed(calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def saved_bytes(call: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd keeps for the backward pass of a call, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = call()
    del result
    return sum(storages.values())


@contextmanager
def _peak_resident() -> Iterator[Callable[[], int]]:
    """Peak growth of this process's resident memory (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)

    def status(key: str) -> int:
        text = Path('/proc/self/status').read_text()
        return int(re.search(rf'{key}:\s+(\d+) kB', text)[1]) * 1024

    Path('/proc/self/clear_refs').write_text('5')  # The peak starts again from here.
    before = status('VmRSS')
    yield lambda: status('VmHWM') - before


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Peak memory of a call beyond what was held before it: device memory, or resident memory."""
    if device.type == 'cuda':
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _peak_resident() as peak:
        call()
        return peak()


def describe_machine(device: torch.device) -> str:
    """One line naming the device, its cores or memory, and the torch version."""
    if device.type == 'cuda':
        name = torch.cuda.get_device_name(device)
    else:
        cpuinfo = Path('/proc/cpuinfo')
        found = (
            re.search(r'model name\s*:\s*(.+)', cpuinfo.read_text()) if cpuinfo.exists() else None
        )
        name = found[1] if found else platform.processor() or platform.machine()
        name = f'{name}, {torch.get_num_threads()} threads'
    return f'{name}, torch {torch.__version__}'
