"""How a user's program sees our types. Not run: checked by pyright and mypy, see ``test_public_types.py``."""

from __future__ import annotations

from typing import assert_type

from anyengine import EngineClient, EngineError, RequestGroup, RequestOutput
from anyengine.sync import SyncEngineClient, SyncRequestGroup


async def groups(client: EngineClient, blocking: SyncEngineClient) -> None:
    """Whoever has errors raised need not look for them among the answers."""
    assert_type(client.generate_many(["a"]), RequestGroup[RequestOutput])
    assert_type(client.generate_many(["a"], on_error="raise", ordered=True, priority=1), RequestGroup[RequestOutput])
    assert_type(client.generate_many(["a"], on_error="collect"), RequestGroup[RequestOutput | EngineError])
    assert_type(blocking.generate_many(["a"]), SyncRequestGroup[RequestOutput])
    assert_type(blocking.generate_many(["a"], on_error="collect"), SyncRequestGroup[RequestOutput | EngineError])
    async for index, out in client.generate_many(["a"]):
        assert_type((index, out.text), tuple[int, str])
    async with client.generate_many(["a"], on_error="collect") as group:
        async for _, answer in group:
            assert_type(answer, RequestOutput | EngineError)
    for _, out in blocking.generate_many(["a"]):
        assert_type(out.token_ids, list[int])
