"""An engine that breaks the rules: the client neither hangs nor grows, and whoever is concerned is told so."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from engines import misbehaving, toy
from scripted_peer import UNDECODABLE, UNREADABLE

from anyengine import (
    ClientState,
    DecodeError,
    EncodeError,
    EngineClient,
    EngineCoreClient,
    EngineDeadError,
    EngineStartupError,
    OutputProcessingError,
    RemoteProtocolError,
    RequestRejected,
    SamplingParams,
    Status,
    UtilityError,
)
from anyengine.testing.scripted import Script, ScriptedTwin, UtilityRule
from anyengine.testing.scripted import expected_tokens as scripted_tokens

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------------------------------------------------- start-up


@pytest.mark.parametrize(
    "fields",
    [
        '{"max_model_len": 0}',
        '{"max_model_len": -5}',
        '{"max_model_len": "64"}',
        '{"max_model_len": null}',
        '{"vllm_version": "0.1.0"}',
        '{"vllm_version": 32}',
    ],
)
async def test_a_senseless_registration_is_a_start_up_error_with_its_facts(fields: str) -> None:
    with anyio.fail_after(30), pytest.raises(EngineStartupError, match="its handshake makes no sense") as caught:
        async with EngineClient(engine=misbehaving("registers_with", fields)):
            pytest.fail("it must not become ready")
    error = caught.value
    assert isinstance(error.__cause__, RemoteProtocolError)
    assert (error.rank, error.stage) == (0, "spawned")
    assert error.pid is not None


async def test_a_version_that_is_no_version_is_harmless() -> None:
    fields = f'{{"vllm_version": "{"9" * 5000}.1"}}'  # more digits than Python turns into an int
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("registers_with", fields)) as client:
            assert client.state is ClientState.READY


@pytest.mark.blocking_ok
async def test_an_engine_that_hangs_up_after_its_hello(tmp_path: Path) -> None:
    """The answer to HELLO finds nobody; the exit, a moment later, says why."""
    marker = tmp_path / "gone"

    def hold_the_loop(status: Status) -> None:
        while status.stage == "spawned" and not marker.exists():
            time.sleep(0.01)  # the loop must not answer before the connection is gone
        time.sleep(0.1)  # libzmq's thread has no signal that it has noticed
        marker.unlink()

    with anyio.fail_after(30), pytest.raises(EngineStartupError) as caught:
        async with EngineClient(engine=misbehaving("vanish", str(marker)), on_progress=hold_the_loop):
            pytest.fail("it must not become ready")
    assert caught.value.exit_code == 3


async def test_what_is_no_status_line_changes_nothing_and_fills_nothing() -> None:
    seen: list[str] = []
    with anyio.fail_after(30), pytest.raises(EngineStartupError) as caught:
        async with EngineClient(engine=misbehaving("talkative"), on_progress=lambda status: seen.append(status.stage)):
            pytest.fail("it must not become ready")
    error = caught.value
    assert seen == ["spawned", "loading"]
    assert (error.exit_code, error.stage) == (3, "loading")
    assert error.stderr_tail and max(map(len, error.stderr_tail)) <= 4096


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (None, b""),
        ("config.json", b"[" * 200_000),
        ("config.json", b'{"vocab_size":' + b"9" * 5000 + b"}"),
        ("tokenizer.json", b"{"),
        # Makes the Rust code of tokenizers panic, which is no Exception in Python.
        ("tokenizer.json", b'{"normalizer":{"type":"Precompiled","precompiled_charsmap":"/////w=="}}'),
    ],
    ids=["name too long", "nested", "huge number", "cut short", "panic"],
)
async def test_whatever_is_in_the_directory_that_an_engine_names(
    tmp_path: Path, file: str | None, content: bytes
) -> None:
    if file is not None:
        await anyio.Path(tmp_path / file).write_bytes(content)
    model_dir = str(tmp_path) if file is not None else "x" * 5000
    with anyio.fail_after(30), pytest.raises(RequestRejected) as caught:
        async with EngineClient(engine=misbehaving("model_at", model_dir)):
            pytest.fail("it must not be entered")
    assert (caught.value.parameter, caught.value.value) == ("model", model_dir)


async def test_a_disk_that_hangs_does_not_hold_the_start(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    ready = anyio.Event()

    def on_progress(status: Status) -> None:
        if status.model_dir is not None:
            ready.set()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:

                async def cancel() -> None:
                    await ready.wait()
                    writer = await anyio.to_thread.run_sync(os.open, path, os.O_WRONLY)  # waits for the reader
                    scope.cancel()
                    await left.wait()
                    os.close(writer)  # frees the reader's thread, for the leak check

                left = anyio.Event()
                tasks.start_soon(cancel)
                async with EngineClient(engine=misbehaving("model_at", str(tmp_path)), on_progress=on_progress):
                    pytest.fail("it must not be entered")
            left.set()
    assert scope.cancelled_caught


# ----------------------------------------------------------------------------------------------------------- outputs


async def consume(client: EngineClient, prompt: int, results: dict[int, Any]) -> None:
    try:
        results[prompt] = [token_id async for out in client.generate([prompt]) for token_id in out.token_ids]
    except OutputProcessingError as exc:
        results[prompt] = exc


@pytest.mark.case("K64")
@pytest.mark.parametrize("what", UNDECODABLE)
async def test_an_output_that_cannot_be_decoded_fails_its_request_alone(what: str) -> None:
    """No hole in its tokens, no wait for ever, and the engine is told to stop it; its neighbours lose nothing."""
    results: dict[int, Any] = {}
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("undecodable", what)) as client:
            async with anyio.create_task_group() as tasks:
                for prompt in (1, 2, 3):
                    await anyio.lowlevel.checkpoint()
                    tasks.start_soon(consume, client, prompt, results)
            added, aborted = await client.core.utility("get_ids")
            failed = [prompt for prompt, result in results.items() if result != [7]]
            assert len(failed) == 1
            assert isinstance(results[failed[0]].__cause__.__cause__, DecodeError)
            assert aborted == [added[1]]
            statistics = client.statistics()
            assert (statistics["malformed_messages"], statistics["requests_in_flight"]) == (1, 0)
            assert client.state is ClientState.READY


@pytest.mark.case("K64")
async def test_what_stands_beside_the_outputs_does_not_matter_to_them() -> None:
    results: dict[int, Any] = {}
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("undecodable", "statistics")) as client:
            async with anyio.create_task_group() as tasks:
                for prompt in (1, 2, 3):
                    tasks.start_soon(consume, client, prompt, results)
            assert client.statistics()["malformed_messages"] == 1
    assert results == {1: [7], 2: [7], 3: [7]}


@pytest.mark.case("K66")
async def test_what_one_side_cannot_encode_is_an_error_of_that_call_alone() -> None:
    """A value of ours in a request or a call, and one of the engine's in a reply; a stream beside them goes on."""
    unencodable = UtilityRule(method="get_weight_version", do="unencodable")
    scripted = ScriptedTwin(Script(step_interval_s=0.001, utilities=(unencodable,)))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            stream = await client.submit([1], SamplingParams(max_tokens=50))
            with pytest.raises(RequestRejected) as refused:
                await client.submit([2], SamplingParams(extra_args={"x": {"y": object()}}))
            assert (refused.value.parameter, refused.value.value) == ("extra_args['x']['y']", "object")
            with pytest.raises(EncodeError) as ours:
                await client.core.utility("collective_rpc", "method", None, [object()])
            assert (ours.value.field, ours.value.type_name) == ("args[2][0]", "object")
            with pytest.raises(UtilityError) as theirs:
                await client.get_weight_version()
            assert (theirs.value.method, theirs.value.rank) == ("get_weight_version", 0)
            assert [token for out in [out async for out in stream] for token in out.token_ids] == scripted_tokens(
                [1], 50
            )
            statistics = client.statistics()
            assert (statistics["requests_in_flight"], statistics["utility_calls_in_flight"]) == (0, 0)
            assert client.core.session.connection.utilities.pending == {}
    assert len(scripted.received("add")) == 1
    assert scripted.received("collective_rpc") == []


@pytest.mark.case("K66")
@pytest.mark.parametrize("what", UNREADABLE)
async def test_a_reply_that_cannot_be_read_fails_its_call(what: str) -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient(misbehaving("unreadable_reply", what)) as core:
            for failures in (1, 2):
                with pytest.raises(UtilityError, match="its reply cannot be read") as caught:
                    await core.utility("get_something")
                assert caught.value.method == "get_something"
                assert await core.utility("get_something") == "done"
                assert core.statistics()["malformed_messages"] == failures


# ------------------------------------------------------------------------------------------------- floods and the end


async def test_an_engine_that_talks_on_after_its_last_word_is_dead() -> None:
    """Neither the wait for its end nor the reading of what it still sends goes on for ever; then nobody listens."""
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("dead_but_talking"), shutdown_grace_s=0.2) as client:
            cause = await client.wait_dead()
            assert type(cause) is EngineDeadError
            assert "ENGINE_CORE_DEAD" in str(cause)
            assert client.state is ClientState.DEAD
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(anyio.ClosedResourceError):
                client.core.session.endpoints.outputs.drain_nowait()


@pytest.mark.parametrize("count", ["1", "2", "5000"])
async def test_one_rank_cannot_say_that_others_are_dead(count: str) -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient([toy(), misbehaving("sentinels", count)], shutdown_grace_s=0.2) as core:
            with anyio.move_on_after(5), pytest.raises(EngineDeadError):
                await core.utility("anything", rank=1, unchecked=True)
            assert (await core.wait_dead(1)).rank == 1
            assert await core.ping(rank=0) >= 0
            assert core.state is ClientState.READY
            assert core.session.connection.rota.serving == (0,)
            assert core.session.connection.utilities._counter < 100  # one asks for signs of life, not one for each


async def test_notifications_without_end_start_no_tasks_without_end() -> None:
    handled = 0
    release = anyio.Event()

    async def on_notification(_: object) -> None:
        nonlocal handled
        handled += 1
        await release.wait()

    with anyio.fail_after(30):
        engine = misbehaving("notifies_without_end", "5000")
        async with EngineCoreClient(engine, on_notification=on_notification) as core:
            assert await core.utility("anything", unchecked=True) == "done"
            await anyio.wait_all_tasks_blocked()
            assert 0 < handled <= 1000
            assert core.statistics()["notification_failures"] == 5000 - handled
            release.set()
            assert await core.utility("anything", unchecked=True) == "done"
            assert core.state is ClientState.READY


async def test_garbage_without_end_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient(misbehaving("garbage_without_end", "5000")) as core:
            assert await core.utility("anything", unchecked=True) == "done"
            assert core.statistics()["malformed_messages"] == 5000
    assert 0 < sum("cannot be decoded" in record.message for record in caplog.records) < 20


@pytest.mark.parametrize("name", ["handshake", "inputs"])
async def test_what_nobody_reads_fills_the_engines_memory(name: str) -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient(misbehaving("flood", name)) as core:
            taken = await core.utility("flood")
            assert taken < 5000  # its own queue, the kernel's buffers, and sixteen here
            assert core.state is ClientState.READY
