"""Engines that somebody else starts: joined by a handshake, taken over from a dead client, or inherited."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import pytest
from remote_peers import RemotePeers

from anyengine import (
    EngineClient,
    EngineDeadError,
    EngineStartupError,
    InheritedEngine,
    RemoteEngine,
    RunningEngine,
    SamplingParams,
    StartupTimeout,
)

pytestmark = pytest.mark.anyio

LOOPBACK = "tcp://127.0.0.1:*"
SHORT = SamplingParams(max_tokens=10)
IPV6 = Path("/proc/net/if_inet6").exists() and "lo" in Path("/proc/net/if_inet6").read_text()
ENDLESS = [9]  # a prompt for which the scripted peer goes on and on


@pytest.fixture
def directory(private_temp_dir: Path) -> Iterator[Path]:
    """For sockets; the client removes its own."""
    (directory := private_temp_dir / "d").mkdir()
    yield directory
    assert list(directory.iterdir()) == []
    directory.rmdir()


async def tokens(client: EngineClient, prompt: list[int]) -> list[int]:
    return [token async for out in client.generate(prompt, SHORT) for token in out.token_ids]


def remote(
    peers: RemotePeers, *, ranks: int = 1, handshake: str = LOOPBACK, startup_timeout_s: float = 20
) -> EngineClient:
    engine = RemoteEngine(handshake=handshake, ranks=ranks)
    return EngineClient(engine=engine, startup_timeout_s=startup_timeout_s, on_progress=peers.joining)


# ------------------------------------------------------------------------------------------------------------- joining


@pytest.mark.feature("D02")
async def test_an_engine_of_somebody_elses_is_served_and_left_alone() -> None:
    with anyio.fail_after(30), RemotePeers("serve") as peers:
        async with remote(peers) as client:
            assert await tokens(client, [1]) == [0, 7]
            endless = await client.submit(ENDLESS, SHORT)
            await anext(endless)
            running = client.core.running_engine
        assert peers.processes[0].poll() is None
        async with EngineClient(engine=running) as client:
            assert await client.core.utility("held", unchecked=True) == []  # leaving has aborted it
            assert await tokens(client, [1]) == [0, 7]


@pytest.mark.feature("D02")
async def test_two_ranks_take_turns() -> None:
    with anyio.fail_after(30), RemotePeers("serve", "serve") as peers:
        async with remote(peers, ranks=2) as client:
            answers = [await tokens(client, [1]) for _ in range(6)]
    assert sorted(answers) == [[0, 7]] * 3 + [[1, 7]] * 3


@pytest.mark.feature("D12")
@pytest.mark.parametrize("handshake", [LOOPBACK, "tcp://127.0.0.1:0", "ipc:///{}/handshake"])
async def test_a_wildcard_port_becomes_a_number_and_ipc_files_go(handshake: str, directory: Path) -> None:
    with anyio.fail_after(30), RemotePeers("serve") as peers:
        async with remote(peers, handshake=handshake.format(directory)) as client:
            assert await tokens(client, [1]) == [0, 7]
            running = client.core.running_engine
    for address in (running.inputs, running.outputs):
        assert address.startswith(handshake[:6])
        assert not address.endswith((":*", ":0"))


@pytest.mark.feature("L04")
async def test_the_deadline_names_who_is_late() -> None:
    with anyio.fail_after(30), RemotePeers("serve", "serve", "stops_after_hello") as peers:
        with pytest.raises(StartupTimeout, match=r"\(1 of 3 are not: 2\)") as caught:
            async with remote(peers, ranks=3, startup_timeout_s=5):
                pytest.fail("it must not become ready")
    assert (caught.value.rank, caught.value.stage) == (2, "initialized")
    assert "127.0.0.1" in str(caught.value)  # where it should have connected


@pytest.mark.feature("D11")
@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (("says", '{"local": true, "headless": false}'), "engine 0 says local=True, but this client did not start it"),
        (("says", '{"headless": false}'), "engine 0 says headless=False: .* start it with --headless"),
        (("says", "{}", '{"status": "HELLO"}'), "engine 0 sent HELLO in stage initialized"),
        (("says", '{"status": "READY"}'), "engine 0 sent READY in stage waiting"),
        (("says", '{"status": "WELCOME"}'), "engine 0 sent neither HELLO nor READY"),
        (("registers_twice",), "engine 0 registered twice on the input socket"),
        (("registers_nonsense",), "engine 0 sent no registration"),
        (("registers_with", '{"vllm_version": "0.8.0"}'), "the engine runs vLLM 0.8.0; this client speaks"),
    ],
    ids=["local", "headless", "hello twice", "ready first", "no handshake", "registered twice", "nonsense", "too old"],
)
async def test_every_mismatch_has_its_words(behaviour: tuple[str, ...], message: str) -> None:
    with anyio.fail_after(30), RemotePeers(behaviour) as peers:
        with pytest.raises(EngineStartupError, match=message) as caught:
            async with remote(peers):
                pytest.fail("it must not become ready")
    assert caught.value.rank == 0
    assert "tcp://127.0.0.1:" in str(caught.value)


@pytest.mark.feature("D11")
async def test_more_ranks_than_expected() -> None:
    with anyio.fail_after(30), RemotePeers("stops_after_hello", "serve") as peers:
        with pytest.raises(EngineStartupError, match=r"rank 1 is not expected here; expected \[0\]"):
            async with remote(peers, ranks=1):
                pytest.fail("it must not become ready")


@pytest.mark.feature("D11")
async def test_ranks_that_are_configured_differently() -> None:
    behaviours = [("says", "{}", f'{{"parallel_config_hash": "{word}"}}') for word in ("one", "another")]
    message = "configured differently .*: start all ranks with the same arguments"
    with anyio.fail_after(30), RemotePeers(*behaviours) as peers:
        with pytest.raises(EngineStartupError, match=message):
            async with remote(peers, ranks=2):
                pytest.fail("it must not become ready")


async def test_ranks_that_step_together_are_refused() -> None:
    """Without a coordinator their requests would wait for ever."""
    with anyio.fail_after(30), RemotePeers(("registers_with", '{"data_parallel_size": 2}')) as peers:
        with pytest.raises(EngineStartupError, match="engine 0 is one of 2 that step together"):
            async with remote(peers):
                pytest.fail("it must not become ready")


async def test_an_address_that_is_taken(private_temp_dir: Path) -> None:
    """Also an ipc path, which libzmq would take from whoever listens there."""
    with anyio.fail_after(30), RemotePeers("serve") as peers:
        async with remote(peers, handshake=f"ipc://{private_temp_dir}/h") as client:
            taken = client.core.running_engine
            for engine in (taken, RemoteEngine(handshake=f"ipc://{private_temp_dir}/h")):
                with pytest.raises(EngineStartupError, match=r"the client cannot listen for engines.*already"):
                    async with EngineClient(engine=engine):
                        pytest.fail("it must not get that far")
            assert await tokens(client, [1]) == [0, 7]
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
            with pytest.raises(EngineStartupError, match=r"cannot listen for engines.*in use"):
                async with EngineClient(engine=RemoteEngine(handshake=address)):
                    pytest.fail("it must not get that far")


async def test_a_failing_callback_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    with anyio.fail_after(30), RemotePeers("serve") as peers:

        def on_progress(status: object) -> None:
            peers.joining(status)
            raise ZeroDivisionError("the application's own bug")

        async with EngineClient(engine=RemoteEngine(handshake=LOOPBACK), on_progress=on_progress) as client:
            assert await tokens(client, [1]) == [0, 7]
    assert "on_progress" in caplog.text


@pytest.mark.feature("D29")
@pytest.mark.parametrize(
    ("settings", "exposed"),
    [
        ({"handshake": LOOPBACK}, False),
        pytest.param({"handshake": "tcp://[::1]:*"}, False, marks=pytest.mark.skipif(not IPV6, reason="no IPv6 here")),
        ({"handshake": "tcp://localhost:*"}, False),
        ({"handshake": "tcp://0.0.0.0:*", "advertise_host": "127.0.0.1"}, True),
        ({"handshake": LOOPBACK, "inputs": "tcp://*:*", "advertise_host": "127.0.0.1"}, True),
    ],
)
async def test_listening_on_a_network_is_warned_of(
    settings: dict[str, str], exposed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with anyio.fail_after(30), RemotePeers("serve") as peers:
        async with EngineClient(engine=RemoteEngine(**settings), on_progress=peers.joining) as client:
            assert await tokens(client, [1]) == [0, 7]
    ours = [record for record in caplog.records if record.name.startswith("anyengine")]  # asyncio warns of slow tasks
    warnings = [record.message for record in ours if record.levelname == "WARNING"]
    assert [("nothing is encrypted" in warning) for warning in warnings] == [True] * exposed


@pytest.mark.feature("F10")
async def test_vllm_host_ip_is_what_engines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an address listens everywhere; a host that is given comes first."""
    everywhere = "tcp://0.0.0.0:*"
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    with pytest.raises(ValueError, match="give advertise_host, or set VLLM_HOST_IP"):
        RemoteEngine(handshake=everywhere)
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    for handshake in (everywhere, LOOPBACK):
        with anyio.fail_after(30), RemotePeers("serve") as peers:
            async with remote(peers, handshake=handshake) as client:
                assert await tokens(client, [1]) == [0, 7]
                assert client.core.running_engine.inputs.startswith("tcp://127.0.0.1:")
    assert RemoteEngine(handshake=LOOPBACK).advertised_host is None
    assert RemoteEngine(handshake=everywhere, advertise_host="10.0.0.5").advertised_host == "10.0.0.5"


@pytest.mark.parametrize("address", ["tcp://h", "tcp://h:", "tcp://:1", "tcp://h:99999", "h:1", "ipc://"])
def test_an_address_that_cannot_be(address: str) -> None:
    with pytest.raises(ValueError, match="must be an address such as"):
        RemoteEngine(handshake=address)


# --------------------------------------------------------------------------------------------------------------- death


@pytest.mark.feature("L06")
async def test_a_killed_engine_of_somebody_elses_ends_its_streams() -> None:
    with anyio.fail_after(30), RemotePeers("serve") as peers:
        async with remote(peers) as client:
            async with client.generate(ENDLESS, SHORT) as stream:
                await anext(stream)
                peers.processes[0].kill()
                with anyio.fail_after(2), pytest.raises(EngineDeadError) as caught:
                    async for _ in stream:
                        pass
            assert caught.value.rank == 0
            with pytest.raises(EngineDeadError):
                await client.ping()


@pytest.mark.feature("L06")
async def test_the_other_rank_goes_on() -> None:
    with anyio.fail_after(30), RemotePeers("serve", "serve") as peers:
        async with remote(peers, ranks=2) as client:
            streams = [await client.submit(ENDLESS, SamplingParams(max_tokens=1000)) for _ in range(2)]
            for stream in streams:
                await anext(stream)
            peers.processes[1].send_signal(signal.SIGKILL)
            with anyio.fail_after(2), pytest.raises(EngineDeadError) as caught:
                async for _ in streams[1]:
                    pass
            assert (await client.wait_dead(1)).rank == caught.value.rank == 1
            for _ in range(5):
                await anext(streams[0])
            assert [await tokens(client, [1]) for _ in range(2)] == [[0, 7]] * 2
            assert client.ranks == (0,)
            await client.ping()


@pytest.mark.parametrize("link", ["input", "output"])
async def test_deaf_or_mute_over_tcp(link: str) -> None:
    with anyio.fail_after(30), RemotePeers(("loses_link", link)) as peers:
        async with remote(peers) as client:
            assert await client.core.utility("first", unchecked=True) == "done"
            stream = await client.submit([1], SHORT)
            with anyio.fail_after(2), pytest.raises(EngineDeadError, match=f"its {link} connection is gone"):
                await anext(stream)
        assert peers.processes[0].poll() is None


# ---------------------------------------------------------------------------------------------------------- taking over

HOST = """
import sys, anyio, msgspec
from anyengine import EngineClient, RemoteEngine, SamplingParams

async def main():
    engine = msgspec.json.decode(sys.argv[1], type=RemoteEngine)
    listening = lambda status: print(status.detail, flush=True)
    async with EngineClient(engine=engine, on_progress=listening) as client:
        stream = await client.submit([9], SamplingParams(max_tokens=10_000))
        await anext(stream)
        print(msgspec.json.encode(client.core.running_engine).decode(), flush=True)
        await anyio.sleep_forever()

anyio.run(main, backend=sys.argv[2])
"""


@pytest.mark.feature("F15")
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_the_engines_of_a_killed_client_are_taken_over(
    transport: str, directory: Path, anyio_backend_name: str
) -> None:
    """What they had buffered for it is dropped; what they still run for it goes on until somebody aborts it."""
    fixed = {"inputs": f"ipc://{directory}/i", "outputs": f"ipc://{directory}/o"}
    settings = RemoteEngine(handshake=LOOPBACK, ranks=2, **(fixed if transport == "ipc" else {}))
    command = [sys.executable, "-c", HOST, msgspec.json.encode(settings).decode(), anyio_backend_name]
    with anyio.fail_after(30), RemotePeers() as peers:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as host:  # noqa: ASYNC220 - the same on every loop
            try:
                assert host.stdout is not None
                address = (await anyio.to_thread.run_sync(host.stdout.readline)).decode().strip()
                for rank in range(2):
                    peers.start("serve", rank=rank, handshake_address=address)
                stored = await anyio.to_thread.run_sync(host.stdout.readline)
            finally:
                host.kill()
        running = msgspec.json.decode(stored, type=RunningEngine)
        async with EngineClient(engine=running, startup_timeout_s=20) as client:
            assert sorted([await tokens(client, [1]) for _ in range(4)]) == [[0, 7]] * 2 + [[1, 7]] * 2
            assert client.statistics()["late_outputs"] > 0
            held = await client.core.utility_on(None, "held", unchecked=True)
            assert sorted(map(len, held.values())) == [0, 1]  # the dead client's
        assert all(process.poll() is None for process in peers.processes)


async def test_engines_that_do_not_come_are_a_timeout() -> None:
    running = RunningEngine(inputs=LOOPBACK, outputs=LOOPBACK, registrations={0: {"max_model_len": 64}, 1: None})
    with anyio.fail_after(30), pytest.raises(StartupTimeout, match="which someone else starts, is not ready"):
        async with EngineClient(engine=running, startup_timeout_s=0.3):
            pytest.fail("it must not become ready")


# ------------------------------------------------------------------------------------------------------------ inherited


@pytest.fixture(params=["ipc", "tcp"])
def bound(request: pytest.FixtureRequest, directory: Path) -> Iterator[list[tuple[socket.socket, str]]]:
    """Two listening sockets and their addresses, as a parent makes them."""
    made = []
    for name in "io":
        if request.param == "tcp":
            listener = socket.create_server(("127.0.0.1", 0))
            made.append((listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"))
        else:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(directory / name))
            listener.listen()
            made.append((listener, f"ipc://{directory / name}"))
    yield made
    for path in directory.iterdir():  # the parent's, and so left to it
        path.unlink()


@pytest.mark.feature("D18")
async def test_sockets_that_a_parent_has_bound(bound: list[tuple[socket.socket, str]]) -> None:
    (inputs, inputs_at), (outputs, outputs_at) = bound
    with anyio.fail_after(30), RemotePeers() as peers:
        for rank in (3, 4):
            peers.start("serve", rank=rank, inputs=inputs_at, outputs=outputs_at)
        with inputs, outputs:
            engine = InheritedEngine(
                input_fd=os.dup(inputs.fileno()), output_fd=os.dup(outputs.fileno()), start_rank=3, ranks=2
            )
        async with EngineClient(engine=engine, startup_timeout_s=20) as client:
            assert sorted([await tokens(client, [1]) for _ in range(4)]) == [[3, 7]] * 2 + [[4, 7]] * 2
            peers.processes[0].kill()
            assert (await client.wait_dead(3)).rank == 3
            assert await tokens(client, [1]) == [4, 7]
        with pytest.raises(RuntimeError, match="good for one block"):  # the numbers may be somebody else's by now
            await client.__aenter__()


async def test_descriptors_that_are_no_sockets() -> None:
    read, write = os.pipe()
    try:
        with anyio.fail_after(10), pytest.raises(EngineStartupError, match="cannot listen for engines"):
            async with EngineClient(engine=InheritedEngine(input_fd=read, output_fd=write)):
                pytest.fail("it must not get that far")
    finally:
        os.close(read)
        os.close(write)
