"""Requests that compute something of a prompt instead of generating: one result each.

Owns the waiting for it, with the same ways out as a request stream has: every one of them leaves nothing in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import mul
from typing import Unpack

import anyio

from anyengine._rules import a_type, given, integer, reject
from anyengine.exceptions import EngineError, RequestFailed
from anyengine.outputs import PoolingOutput
from anyengine.params import PoolingParams

from .inputs.prompts import Prompt
from .inputs.request_fields import RequestFields
from .requests.desk import RequestDesk

__all__ = ["PoolingShortcuts", "encode_once"]


class PoolingShortcuts:
    """Part of :class:`EngineClient`. Lifetime: the client's. Errors and cancellation are those of
    :meth:`EngineClient.encode`."""

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, **fields: Unpack[RequestFields]
    ) -> PoolingOutput:
        """See :class:`EngineClient`."""
        raise NotImplementedError

    async def embed(
        self, prompt: Prompt, *, dimensions: int | None = None, **fields: Unpack[RequestFields]
    ) -> PoolingOutput:
        """The embedding of ``prompt``: ``data`` [size], ``embedding`` as a list. ``dimensions`` cuts those of a
        Matryoshka model."""
        return await self.encode(prompt, PoolingParams(task="embed", dimensions=dimensions), **fields)

    async def classify(self, prompt: Prompt, **fields: Unpack[RequestFields]) -> PoolingOutput:
        """The classes of ``prompt``: ``data`` [num_classes], ``probs`` as a list."""
        return await self.encode(prompt, PoolingParams(task="classify"), **fields)

    async def score(self, query: Prompt, documents: Sequence[Prompt], **fields: Unpack[RequestFields]) -> list[float]:
        """How near each of ``documents`` is to ``query``: the cosine of their embeddings. They are computed at once;
        the first failure ends all."""
        several: object = documents
        if isinstance(several, str | bytes | Mapping) or not isinstance(several, Sequence):
            reject("documents", documents, f"is {a_type(documents)}", "use a sequence of prompts: [document]")
        vectors: list[list[float]] = [[]] * (len(documents) + 1)

        async def embed(index: int, prompt: Prompt) -> None:
            vectors[index] = (await self.embed(prompt, **fields)).embedding

        with plain_errors():
            async with anyio.create_task_group() as tasks:
                for index, prompt in enumerate((query, *documents)):
                    tasks.start_soon(embed, index, prompt)
        first, *others = vectors
        return [_cosine(first, other) for other in others]

    async def rerank(
        self, query: Prompt, documents: Sequence[Prompt], top_n: int | None = None, **fields: Unpack[RequestFields]
    ) -> list[tuple[int, float]]:
        """Index and :meth:`score` of the ``top_n`` documents that are nearest to ``query``, nearest first."""
        integer(1, optional=True)("top_n", top_n)
        scores = await self.score(query, documents, **fields)
        ranked = sorted(enumerate(scores), key=lambda item: -item[1])
        return ranked if top_n is None else ranked[:top_n]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Of the errors of several requests, which are one call to its caller, the first."""
    try:
        yield
    except BaseExceptionGroup as group:
        matched, rest = group.split(EngineError)
        if matched is None or rest is not None:
            raise
        errors = [*_leaves(matched)]
        raise errors[0] from errors[0].__cause__


def _leaves(group: BaseExceptionGroup[EngineError]) -> Iterator[EngineError]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _leaves(one)
        else:
            yield one


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    length = math.sqrt(sum(map(mul, one, one)) * sum(map(mul, other, other)))
    return sum(map(mul, one, other)) / length if length else 0.0


async def encode_once(
    desk: RequestDesk,
    prompt: Prompt,
    pooling_params: PoolingParams | None,
    label: str | None,
    fields: RequestFields,
    *,
    nowait: bool = False,
) -> PoolingOutput:
    """See :meth:`EngineClient.encode`."""
    params = given("pooling_params", pooling_params, PoolingParams)
    ticket = desk.ticket(prompt, label, nowait=nowait)
    num_prompt_tokens = 0
    try:
        fields = desk.settled(fields)
        prepared = await desk.prepare(ticket, prompt, params, fields)
        if ticket.aborted:
            state = desk.unsent_pooling(label)
        else:
            state, num_prompt_tokens = desk.send_pooling(prepared, params, label, fields)
    finally:
        ticket.close()
    try:
        while not state.ended:
            await state.parker.park()
    except BaseException:  # cancelled, in whatever way: the engine must not go on
        if not state.ended:
            desk.abort([state])
        raise
    if state.error is not None:
        raise state.error.for_waiter()
    if state.data is None:
        desk.check_usable()  # if it is the client that has ended, that is the reason
        raise RequestFailed(
            f"request {state.label!r} was aborted before it had a result", code="aborted", request_id=state.label
        )
    return PoolingOutput(
        request_id=state.label,
        data=state.data,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=state.num_cached_tokens,
    )
