"""``anyengine run``: one prompt, one answer, and whatever ends it early.

Owns the session of one command: the client, the request, the signals. Signals are the application's business, and this
is one: the library installs no handler.
"""

from __future__ import annotations

import sys
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, TextIO

import anyio
from anyio.abc import TaskStatus

from anyengine import EngineClient
from anyengine.cli.rendering import Answer, JsonAnswer, StartupProgress, TextAnswer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyengine import EmbeddedEngine, SamplingParams
    from anyengine.cli.options import RunOptions

__all__ = ["OutputClosedError", "answer_prompt", "until_signal"]


class OutputClosedError(Exception):
    """Nobody reads our standard output any more (``| head``)."""


async def answer_prompt(options: RunOptions, prompt: str, engine: EmbeddedEngine, params: SamplingParams) -> None:
    """Start ``engine``, stream its answer to ``prompt`` to standard output, stop it.

    Raises:
        EngineError: the engine did not start or died, or the request was refused.
        OutputClosedError: standard output is closed.

    Cancellation: the request is aborted and the engine is gone before it propagates.
    """
    answer: Answer = JsonAnswer() if options.json else TextAnswer()
    progress = None if options.quiet else StartupProgress(sys.stderr)
    finish_reason = None
    try:
        async with EngineClient(engine=engine, on_progress=progress.report if progress else None) as client:
            request = prompt if options.raw else client.tokenizer.encode_chat(options.messages(prompt))
            async with client.generate(request, params) as stream:
                async for output in stream:
                    _write(sys.stdout, answer.add(output))
                    finish_reason = output.finish_reason
    finally:
        if progress is not None:
            progress.close()
    if finish_reason == "length" and not options.quiet and not options.json:
        print("anyengine: the answer was cut off; --max-tokens allows a longer one", file=sys.stderr)


def _write(stream: TextIO, text: str) -> None:
    """Blocks when the reader is slow: a terminal or a pipe has nobody else to serve in the meantime."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError as error:
        raise OutputClosedError from error


async def until_signal(job: Callable[[], Awaitable[None]]) -> int | None:
    """Run ``job``; cancel it on SIGINT or SIGTERM. Returns the number of the signal that came, or ``None``.

    Further signals change nothing: the job's clean-up is bounded in time, and cutting it short would leave processes
    behind.

    Raises:
        Exception: what ``job`` raised, when no signal came.

    Cancellation: cancels ``job``.
    """
    received: list[int] = []
    failure: Exception | None = None
    scope = anyio.CancelScope()

    async def watch(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(SIGINT, SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                received.append(number)
                scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(watch)
            with scope:
                try:
                    await job()
                except Exception as error:  # noqa: BLE001 - raised again below: the task group would wrap it in a group
                    failure = error
            tasks.cancel_scope.cancel()
    except* KeyboardInterrupt:  # trio delivers anew what came too late for the receiver; the job is over by then
        received.append(SIGINT)
    if received:
        return received[0]
    if failure is not None:
        raise failure
    return None
