"""What hurts an engine, walked row by row on a real vLLM engine core: refused before anything is sent, or harmless."""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hurtful import MAX_MODEL_LEN, ROWS, Attempt, Collector, Elsewhere, Harmless, Refused, greedy, request, send_raw
from spoilt_requests import runnable
from tiny_models import VOCAB_SIZE
from vllm_engines import make_vllm_model, on_asyncio, on_trio, one_process, tiny_vllm
from wire_strategies import examples

from anyengine import (
    EncodeError,
    EngineClient,
    EngineDeadError,
    LocalProtocolError,
    LoRARequest,
    RequestRejected,
    SamplingParams,
    UtilityError,
    UtilityRejected,
)
from anyengine._transport.socket_base import SocketBase
from anyengine._wire import NEWEST, AbortRequests, UtilityCall, WireLoRARequest, WirePoolingParams

pytestmark = pytest.mark.anyio

REFUSALS = (RequestRejected, UtilityRejected, LocalProtocolError, EncodeError)
HEADINGS = {"protocol.md": "## 12. What kills an engine", "interop.md": "## 3. Faults"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
async def client(vllm_python: str, model: Path) -> AsyncIterator[EngineClient]:
    engine = tiny_vllm(vllm_python, model, env=one_process, max_model_len=MAX_MODEL_LEN)
    async with EngineClient(engine=engine, startup_timeout_s=120, shutdown_grace_s=30) as it:
        yield it


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Any]]]:
    """Every message that leaves."""
    messages: list[list[Any]] = []
    original = SocketBase.send_nowait

    def record(self: Any, parts: Any) -> None:
        messages.append(list(parts))
        original(self, parts)

    record.unrecorded = original  # type: ignore[attr-defined]
    monkeypatch.setattr(SocketBase, "send_nowait", record)
    yield messages
    monkeypatch.undo()


def first_cells(text: str, heading: str) -> list[str]:
    """The first cells of the first table behind ``heading``, as plain text."""
    section = text[text.index(heading) :]
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table is not None
    return [re.sub(r"[*`]", "", line.split("|")[1]).strip() for line in table[1].splitlines()]


@pytest.mark.parametrize("document", HEADINGS)
@on_trio
async def test_every_row_of_the_tables_has_an_entry(repo_root: Path, document: str) -> None:
    cells = first_cells((repo_root / "docs" / document).read_text(), HEADINGS[document])
    assert len(cells) >= 20
    unmatched = dict.fromkeys(ROWS[document])
    for cell in cells:
        entries = [entry for entry in ROWS[document] if entry in cell]
        assert len(entries) == 1, f"{cell!r} has the entries {entries}"
        assert ROWS[document][entries[0]], f"{cell!r} has no attempts"
        unmatched.pop(entries[0], None)
    assert not unmatched, "entries for rows that are not there"
    tests = {attempt.test for rows in ROWS.values() for row in rows.values() for attempt in row
             if isinstance(attempt, Elsewhere) and attempt.test}  # fmt: skip
    for test in tests:
        file, _, name = test.partition("::")
        assert f"async def {name}(" in (Path(__file__).with_name(file)).read_text()


async def attempt_refused(client: EngineClient, attempt: Refused) -> str | None:
    """What is wrong with the refusal; ``None``: nothing."""
    try:
        result = attempt.act(client)
        if inspect.isawaitable(result):
            await result
    except REFUSALS as exc:
        text = str(exc)
        if isinstance(exc, LocalProtocolError):  # it has no attributes: its words must do
            return None if attempt.parameter.replace("_", " ") in text.replace("_", " ") else f"it says {text}"
        if isinstance(exc, EncodeError):
            return None if (exc.field or "").startswith(attempt.parameter) else f"it names {exc.field}: {text}"
        named = exc.parameter is not None and exc.parameter.startswith(attempt.parameter)
        return None if named and exc.remedy else f"it names {exc.parameter}, and {exc.remedy!r}: {text}"
    return "it was taken"


@pytest.mark.feature("R54", "C42")
@pytest.mark.case("K66")
@on_trio
async def test_the_rows(client: EngineClient, sent: list[list[Any]]) -> None:
    """All of them on one engine, which serves afterwards as it did before, and holds nothing."""
    wrong: list[str] = []
    attempts: list[tuple[str, Attempt]] = [
        (f"{document}: {name}", attempt)
        for document, rows in ROWS.items()
        for name, row in rows.items()
        for attempt in row
    ]
    with anyio.fail_after(200):
        before = await greedy(client)
        for name, attempt in attempts:
            if isinstance(attempt, Refused):
                count = len(sent)
                trouble = await attempt_refused(client, attempt)
                kinds = [bytes(message[1]) for message in sent[count:]]
                # Two attempts need a good request first, and abort it.
                if trouble is None and kinds and kinds != [b"\x00", b"\x01"]:
                    trouble = f"it sent {kinds}"
                if trouble is not None:
                    wrong.append(f"{name}: {attempt.parameter}: {trouble}")
            elif isinstance(attempt, Harmless):
                with anyio.fail_after(60):
                    await attempt.act(client)
                assert await greedy(client) == before, name
        assert not wrong, "\n".join(wrong)
        assert sum(isinstance(attempt, Refused) for _, attempt in attempts) > 150
        for _, *frames in sent:  # "impossible": it writes nothing but what its types say
            told = NEWEST.decode_input(frames)
            assert isinstance(told, AbortRequests | UtilityCall) or told.request_id
        assert await greedy(client) == before
        assert await client.reset_prefix_cache()  # no request holds a block
        assert client.statistics()["requests_in_flight"] == 0
        assert client.statistics()["malformed_messages"] == 0


@pytest.mark.feature("R54")
@on_trio
async def test_whatever_is_taken_is_survived(client: EngineClient) -> None:
    """Beyond the tables: random requests, all at once; each ends, and so well that the engine serves on as before."""
    consumers = []
    with anyio.fail_after(200):
        before = await greedy(client)
        for number, drawn in enumerate(examples(runnable(VOCAB_SIZE), 0, 60)):
            consumers.append(Collector())
            it = msgspec.structs.replace(drawn, request_id=f"random-{number}")
            client.core.add(it, consumers[-1], rank=0)
        for consumer in consumers:
            await consumer.ended.wait()
        assert await greedy(client) == before
        assert await client.reset_prefix_cache()


@pytest.mark.feature("R54")
@on_trio
async def test_adapters_and_pooling_models(vllm_python: str, model: Path, sent: list[list[Any]]) -> None:
    """Rows that need an engine of another kind: an adapter that cannot be loaded, a task that the model has not."""
    lora = tiny_vllm(vllm_python, model, env=one_process, max_model_len=256, enable_lora=True, max_lora_rank=8)
    pooling = tiny_vllm(vllm_python, model, env=one_process, max_model_len=256, runner="pooling")
    with anyio.fail_after(200):
        async with EngineClient(engine=lora, startup_timeout_s=120, shutdown_grace_s=30) as client:
            before = await greedy(client)
            with pytest.raises(UtilityError, match="/no/such/adapter"):  # of a call, a failure is an answer
                await client.add_lora(LoRARequest("l", 1, "/no/such/adapter"))
            count = len(sent)
            for adapter in (WireLoRARequest("l", 1, "/no/such/adapter"), WireLoRARequest("l", 2, str(model))):
                with pytest.raises(RequestRejected, match="call add_lora") as caught:
                    client.core.add(request(lora_request=adapter), Collector())
                assert (caught.value.parameter, caught.value.value) == ("lora_request.lora_path", adapter.lora_path)
            assert len(sent) == count
            assert await greedy(client) == before
        async with EngineClient(engine=pooling, startup_timeout_s=120, shutdown_grace_s=30) as client:
            count = len(sent)
            with pytest.raises(RequestRejected, match="embed"):
                client.core.add(request(), Collector())
            with pytest.raises(RequestRejected, match="embed"):
                await client.submit([1, 2], SamplingParams(max_tokens=2))
            for task in (None, "classify", "score", "nonsense"):
                with pytest.raises(RequestRejected, match="it can do embed") as caught:
                    params = WirePoolingParams(task=task)
                    client.core.add(request(sampling=None, pooling_params=params), Collector())
                assert (caught.value.parameter, caught.value.value) == ("pooling_params.task", task)
            assert len(sent) == count
            consumer = Collector()
            good = WirePoolingParams(task="embed", use_activation=True)
            client.core.add(request(sampling=None, pooling_params=good), consumer)
            await consumer.ended.wait()
            assert consumer.outputs[0].pooling_output is not None


@on_asyncio
async def test_two_of_the_rows_really_hurt(vllm_python: str, model: Path) -> None:
    """Sent behind the client's back: otherwise the walk would show nothing."""
    engine = tiny_vllm(vllm_python, model, env=one_process, max_model_len=256)

    async def mute(client: EngineClient) -> None:
        await client.core.utility("collective_rpc", "get_kv_cache_spec", unchecked=True)

    async def deaf(client: EngineClient) -> None:
        kind, payload = NEWEST.encode_add(request())
        fields = msgspec.msgpack.decode(payload)
        fields[3]["temperature"] = -1.0
        send_raw(client, bytes(kind), msgspec.msgpack.encode(fields))
        await client.wait_dead()
        await client.core.utility("is_sleeping")

    async def suffer(act: Any, link: str) -> None:
        async with EngineClient(engine=engine, startup_timeout_s=120, shutdown_grace_s=30) as client:
            with anyio.fail_after(20), pytest.raises(EngineDeadError, match=f"{link} connection is gone"):
                await act(client)

    with anyio.fail_after(150):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(suffer, mute, "output")
            tasks.start_soon(suffer, deaf, "input")
