"""No more threads than there are places, however many callers have gone meanwhile."""

from __future__ import annotations

import threading

import anyio
import pytest

from anyengine._client.worker_threads import WorkerThreads

pytestmark = [pytest.mark.anyio, pytest.mark.feature("R38")]


class Work:
    """Keeps its threads until it is told to go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.num_running = self.most_running = self.num_done = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        assert self.go_on.wait(30)
        with self._lock:
            self.num_running -= 1
            self.num_done += 1
            return self.num_done


async def test_who_is_cancelled_leaves_his_place_to_nobody_before_the_thread_has_ended() -> None:
    threads, work = WorkerThreads(4), Work()
    with anyio.fail_after(30):
        for _ in range(10):  # callers who come and go
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(threads.run, work)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
        assert work.num_running <= 4
        work.go_on.set()
        for number in range(20):  # all places have come back
            assert await threads.run(lambda number=number: number) == number
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(threads.run, work)
    assert 1 <= work.most_running <= 4
    assert work.num_running == 0


async def test_what_it_raises_and_returns() -> None:
    threads = WorkerThreads(1)
    with anyio.fail_after(30):
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await threads.run(lambda: 1 // 0)
            assert await threads.run(divmod, 7, 2) == (3, 1)


async def test_who_is_cancelled_while_he_waits_takes_no_place() -> None:
    threads, work = WorkerThreads(1), Work()
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(threads.run, work)
            await anyio.wait_all_tasks_blocked()
            with anyio.move_on_after(0):
                await threads.run(work)
            async with anyio.create_task_group() as waiting:
                for _ in range(3):
                    waiting.start_soon(threads.run, work)
                await anyio.wait_all_tasks_blocked()
                waiting.cancel_scope.cancel()
            work.go_on.set()
        assert await threads.run(work) == 2
