"""Requests that compute something of a prompt instead of generating: one result each.

Owns the waiting for it, with the same ways out as a request stream has: every one of them leaves nothing in the engine.
"""

from __future__ import annotations

from anyengine.exceptions import RequestFailed
from anyengine.outputs import PoolingOutput
from anyengine.params import PoolingParams

from .inputs.prompts import Prompt
from .inputs.request_fields import RequestFields
from .requests.desk import RequestDesk

__all__ = ["encode_once"]


async def encode_once(
    desk: RequestDesk,
    prompt: Prompt,
    params: PoolingParams,
    label: str | None,
    fields: RequestFields,
    *,
    nowait: bool = False,
) -> PoolingOutput:
    """See :meth:`EngineClient.encode`."""
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
