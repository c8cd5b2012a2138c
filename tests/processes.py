"""Real processes for tests: started from one that has the libraries loaded already."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault('OMP_NUM_THREADS', '1')
_context = multiprocessing.get_context('forkserver')
_context.set_forkserver_preload(['mmdet.apis', 'mmseg.apis', 'inline_mm'])


def start(function: Callable, *args: Any, log: str = os.devnull):
    """Start ``function(*args)``, what it prints going to ``log``; returns the process."""
    process = _context.Process(target=_logged, args=(function, args, str(log)))
    process.start()
    return process


def run(function: Callable, *args: Any, ranks: int = 1, timeout: float = 400) -> list:
    """Results of ``function(*args)`` in each rank of a process group of ``ranks`` processes."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    processes, pipes = [], []
    for rank in range(ranks):
        env = dict(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
            MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port),
        )  # fmt: skip
        here, there = _context.Pipe()
        process = _context.Process(
            target=_call, args=(function, args, env if ranks > 1 else {}, there)
        )
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    try:
        results = []
        for pipe in pipes:
            assert pipe.poll(timeout), f'no answer within {timeout} s'
            failed, result = pipe.recv()
            assert not failed, result
            results.append(result)
        return results
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _logged(function, args, log):
    torch.set_num_threads(1)
    with open(log, 'a') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*args)


def _call(function, args, env, pipe):
    os.environ.update(env)
    torch.set_num_threads(1)
    if 'RANK' in env:
        torch.distributed.init_process_group('gloo')
    try:
        pipe.send((False, function(*args)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
    if 'RANK' in env:
        torch.distributed.destroy_process_group()
