"""Threads for tests: started together, joined within a time limit, with what each has returned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["crowd", "started", "until"]

LIMIT_S = 60.0


@contextmanager
def started(count: int, work: Callable[[int], Any]) -> Iterator[list[Future[Any]]]:
    """``work(0)``, ``work(1)``, ... in a thread each; they have ended when the block is left."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> Any:
        barrier.wait(LIMIT_S)
        return work(number)

    pool = ThreadPoolExecutor(count)
    futures = [pool.submit(begin, number) for number in range(count)]
    try:
        yield futures
        for future in futures:
            future.exception(LIMIT_S)
    finally:
        pool.shutdown(wait=all(future.done() for future in futures))


def crowd(count: int, work: Callable[[int], Any]) -> list[Any]:
    """:func:`started`, and what each has returned."""
    with started(count, work) as futures:
        pass
    return [future.result() for future in futures]


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does, which cannot tell."""
    pause = threading.Event()
    for _ in range(int(LIMIT_S / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("it has not happened")
