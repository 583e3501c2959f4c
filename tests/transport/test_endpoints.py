"""A client's listening side: private, never colliding, and gone without a trace, whatever is still queued."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import anyio
import psutil
import pytest
import zmq

from anyengine._transport.endpoints import Endpoints, Listeners, beside, open_endpoints
from anyengine._transport.zmq_socket import ZmqSocket
from anyengine.exceptions import WrongLoopError

both_transports = pytest.mark.parametrize("transport", ["ipc", "tcp"])
Transport = Literal["ipc", "tcp"]


@pytest.fixture
def child_environment(package_root: Path) -> dict[str, str]:
    """For child processes that import the package under test."""
    return os.environ | {"PYTHONPATH": str(package_root.parent)}


def addresses(endpoints: Endpoints) -> list[str]:
    return [endpoints.handshake_address, endpoints.input_address, endpoints.output_address]


def path_of(address: str) -> Path:
    return Path(address.removeprefix("ipc://"))


@pytest.mark.anyio
@both_transports
async def test_an_engine_reaches_all_three_sockets(transport: Transport) -> None:
    with open_endpoints(transport) as endpoints, zmq.Context() as context:
        peers = []
        for kind, address in zip((zmq.DEALER, zmq.DEALER, zmq.PUSH), addresses(endpoints), strict=True):
            peers.append(peer := context.socket(kind))
            peer.set(zmq.IDENTITY, b"\x00\x00")
            peer.connect(address)
            peer.send(b"hello")
        with anyio.fail_after(10):
            assert await endpoints.handshake.drain() == [[b"\x00\x00", b"hello"]]
            assert await endpoints.inputs.drain() == [[b"\x00\x00", b"hello"]]
            assert await endpoints.outputs.drain() == [[b"hello"]]
        for peer in peers:
            peer.close(0)


@pytest.mark.anyio
async def test_the_newest_connection_of_an_identity_is_the_live_one() -> None:
    """An engine that comes back must not be hidden by the connection of its predecessor."""
    with open_endpoints() as endpoints, ExitStack() as undo:
        context = zmq.Context()
        undo.callback(context.destroy, linger=0)
        peers = [context.socket(zmq.DEALER) for _ in range(2)]
        with anyio.fail_after(10):
            for number, peer in enumerate(peers):
                peer.set(zmq.IDENTITY, b"\x00\x00")
                peer.set(zmq.RECONNECT_IVL, -1)
                peer.connect(endpoints.input_address)
                peer.send(b"%d" % number)
                assert await endpoints.inputs.drain() == [[b"\x00\x00", b"%d" % number]]
        endpoints.inputs.send_nowait([b"\x00\x00", b"to the second"])
        assert peers[1].poll(5000)
        assert peers[1].recv() == b"to the second"


def test_the_directory_is_private_short_and_removed(private_temp_dir: Path) -> None:
    with open_endpoints() as endpoints:
        paths = [path_of(address) for address in addresses(endpoints)]
        directory = paths[0].parent
        assert directory.parent == private_temp_dir
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert all(path.is_socket() for path in paths)
    assert not directory.exists()
    endpoints.close()


def test_a_base_directory_that_will_not_do_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, private_temp_dir: Path
) -> None:
    (private_temp_dir / ("x" * 90)).mkdir()
    for unusable in (private_temp_dir / "missing", private_temp_dir / ("x" * 90)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(unusable))
        with open_endpoints() as endpoints:
            assert path_of(endpoints.input_address).parent.parent == private_temp_dir
    (private_temp_dir / ("x" * 90)).rmdir()


def test_a_failed_bind_leaves_nothing(monkeypatch: pytest.MonkeyPatch, private_temp_dir: Path) -> None:
    real = ZmqSocket.bind

    def bind(self: ZmqSocket, address: str) -> str:
        if address.endswith("/o"):
            raise anyio.BrokenResourceError("no room")
        return real(self, address)

    monkeypatch.setattr(ZmqSocket, "bind", bind)
    with pytest.raises(anyio.BrokenResourceError, match="no room"):
        open_endpoints()
    assert list(private_temp_dir.iterdir()) == []


# ------------------------------------------------------------------------------------------ at addresses that are given


def reach(address: str, kind: int = zmq.DEALER) -> None:
    """Say hello to a ROUTER (or, as a PUSH, to a PULL) at ``address``, over a connection that is then gone."""
    with zmq.Context() as context, context.socket(kind) as peer:
        peer.set(zmq.IPV6, int("[" in address))
        peer.connect(address)
        peer.send(b"hello")


def test_what_is_not_given_is_beside_the_handshake() -> None:
    nothing = {"inputs": None, "outputs": None, "advertise_host": None}
    assert beside("tcp://10.0.0.5:29550", **nothing) == Listeners(
        "tcp://10.0.0.5:*", "tcp://10.0.0.5:*", "tcp://10.0.0.5:29550"
    )
    assert beside("tcp://[::1]:*", **nothing).inputs == "tcp://[::1]:*"
    assert beside("ipc:///run/h", **nothing) == Listeners("ipc:///run/h.i", "ipc:///run/h.o", "ipc:///run/h")
    given = beside("ipc:///h", inputs="ipc:///i", outputs="tcp://127.0.0.1:9", advertise_host="me")
    assert given == Listeners("ipc:///i", "tcp://127.0.0.1:9", "ipc:///h", "me")


@pytest.mark.feature("D12")
@pytest.mark.parametrize("port", ["*", "0"])
def test_a_wildcard_port_is_told_as_a_number(port: str) -> None:
    place = f"tcp://127.0.0.1:{port}"
    with open_endpoints(Listeners(place, place, place)) as endpoints:
        ports = {int(address.rpartition(":")[2]) for address in addresses(endpoints)}
        assert len(ports) == 3 and min(ports) > 0


@pytest.mark.parametrize(("host", "spelled"), [("10.0.0.5", "10.0.0.5"), ("gpu1", "gpu1"), ("fd00::1", "[fd00::1]")])
def test_engines_are_told_another_host(host: str, spelled: str, private_temp_dir: Path) -> None:
    everywhere = "tcp://0.0.0.0:*"
    listeners = Listeners(f"ipc://{private_temp_dir}/i", everywhere, everywhere, advertise_host=host)
    with open_endpoints(listeners) as endpoints:
        for address in (endpoints.handshake_address, endpoints.output_address):
            assert address.rpartition(":")[0] == f"tcp://{spelled}"
        assert endpoints.input_address == f"ipc://{private_temp_dir}/i"


@pytest.mark.feature("D29")
@pytest.mark.parametrize(
    ("address", "exposed"),
    [
        ("tcp://127.0.0.1:1", False),
        ("tcp://127.8.0.1:*", False),
        ("tcp://localhost:1", False),
        ("tcp://lo:1", False),
        ("tcp://[::1]:1", False),
        ("ipc:///run/h", False),
        ("tcp://0.0.0.0:1", True),
        ("tcp://*:*", True),
        ("tcp://[::]:1", True),
        ("tcp://10.0.0.5:1", True),
        ("tcp://eth0:1", True),
        ("tcp://gpu1.example.org:1", True),
    ],
)
def test_what_other_hosts_can_reach(address: str, exposed: bool) -> None:
    assert Listeners(address, address, address).exposed == [address] * exposed
    assert Listeners(3, 4, None).exposed == []


@pytest.mark.feature("D12")
def test_ipc_files_at_given_paths_are_removed(private_temp_dir: Path) -> None:
    paths = [private_temp_dir / name for name in "hio"]
    places = [f"ipc://{path}" for path in paths]
    paths[0].touch()  # whatever a dead one left is no obstacle
    with open_endpoints(Listeners(places[1], places[2], places[0])) as endpoints:
        assert addresses(endpoints) == places
        assert all(path.is_socket() for path in paths)
    assert list(private_temp_dir.iterdir()) == []
    with pytest.raises(anyio.BrokenResourceError):
        open_endpoints(Listeners(places[1], "ipc:///no/such/directory/o", places[0]))
    assert list(private_temp_dir.iterdir()) == []


@pytest.mark.anyio
async def test_a_path_where_somebody_listens_is_refused(private_temp_dir: Path) -> None:
    """libzmq would take it, and the other one would wait for ever."""
    places = Listeners(f"ipc://{private_temp_dir}/i", f"ipc://{private_temp_dir}/o")
    with open_endpoints(places) as endpoints:
        with pytest.raises(anyio.BrokenResourceError, match="somebody listens there already"):
            open_endpoints(places)
        reach(endpoints.input_address)
        with anyio.fail_after(10):
            [[_, hello]] = await endpoints.inputs.drain()
    assert hello == b"hello"


def test_a_path_where_somebody_is_too_busy_to_answer_is_refused(private_temp_dir: Path) -> None:
    path = str(private_temp_dir / "i")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as visitor:
        listener.bind(path)
        listener.listen(0)
        visitor.connect(path)  # there is no room for another one
        with pytest.raises(anyio.BrokenResourceError, match="somebody listens there already"):
            open_endpoints(Listeners(f"ipc://{path}", f"ipc://{private_temp_dir}/o"))
    Path(path).unlink()


@pytest.mark.feature("D18")
@pytest.mark.anyio
@pytest.mark.blocking_ok
@pytest.mark.parametrize("kind", ["tcp", "unix", "abstract"])
async def test_sockets_that_somebody_hands_over(kind: str, private_temp_dir: Path) -> None:
    """They are used, told by their addresses, closed; their files are left to whoever made them."""
    handed = []
    for name in "io":
        listener = socket.socket(socket.AF_INET if kind == "tcp" else socket.AF_UNIX)
        path = f"\0anyengine-{os.getpid()}-{name}" if kind == "abstract" else str(private_temp_dir / name)
        listener.bind(("127.0.0.1", 0) if kind == "tcp" else path)
        listener.listen()
        handed.append(listener.detach())
    with open_endpoints(Listeners(*handed)) as endpoints:
        assert endpoints.handshake is None and endpoints.handshake_address is None
        for address, receiver, kind_of_peer in (
            (endpoints.input_address, endpoints.inputs, zmq.DEALER),
            (endpoints.output_address, endpoints.outputs, zmq.PUSH),
        ):
            reach(address, kind_of_peer)
            with anyio.fail_after(10):
                [[*_, hello]] = await receiver.drain()
            assert hello == b"hello"
    for descriptor in handed:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    if kind == "unix":
        for name in "io":
            (private_temp_dir / name).unlink()


def test_a_descriptor_that_is_no_socket() -> None:
    """The leak check sees that nothing of it is kept."""
    read, write = os.pipe()
    with pytest.raises(OSError, match="non-socket"):
        open_endpoints(Listeners(read, write))
    os.close(read)
    os.close(write)


def test_another_thread_may_not_close_them() -> None:
    with open_endpoints() as endpoints, ThreadPoolExecutor(1) as pool:
        with pytest.raises(WrongLoopError):
            pool.submit(endpoints.close).result()
        assert path_of(endpoints.input_address).exists()


@pytest.mark.anyio
async def test_close_ends_a_parked_reader() -> None:
    endpoints = open_endpoints()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                with pytest.raises(anyio.ClosedResourceError):
                    await endpoints.outputs.drain()

            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            endpoints.close()


@pytest.mark.feature("L41")
def test_500_cycles_leak_nothing() -> None:
    process = psutil.Process()
    with open_endpoints():
        pass
    descriptors, threads = process.num_fds(), process.num_threads()
    for cycle in range(500):
        with open_endpoints("tcp" if cycle % 2 else "ipc") as endpoints, zmq.Context() as context:
            peer = context.socket(zmq.PUSH)
            peer.connect(endpoints.output_address)
            peer.close(0)
    assert process.num_fds() == descriptors
    assert process.num_threads() == threads


@pytest.mark.feature("F14")
def test_20_parallel_openings_never_collide() -> None:
    everybody = threading.Barrier(20, timeout=30)

    def launch(_: int) -> list[str]:
        everybody.wait()
        with open_endpoints("tcp") as endpoints:
            everybody.wait()  # all are open at the same time
            return addresses(endpoints)

    with ThreadPoolExecutor(20) as pool:
        found = [address for trio in pool.map(launch, range(20)) for address in trio]
    assert len(set(found)) == 60


PEER = """
import sys, zmq
with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
    peer.set(zmq.IDENTITY, b"peer")
    peer.connect(sys.argv[1])
    peer.send(b"hello")
    sys.stdin.read()
"""

HOST = """
import atexit, faulthandler, gc, signal, subprocess, sys
import anyio, zmq
from anyengine._transport.endpoints import open_endpoints

def report():
    gc.collect()
    alive = [o for o in gc.get_objects() if issubclass(type(o), (zmq.Context, zmq.Socket)) and not o.closed]
    print("alive", len(alive), flush=True)

atexit.register(report)
route, transport, backend = sys.argv[1:4]

async def main():
    with open_endpoints(transport) as endpoints:
        peer = subprocess.Popen([sys.executable, "-c", sys.argv[4], endpoints.input_address], stdin=subprocess.PIPE)
        print("peer", peer.pid, flush=True)
        with anyio.fail_after(20):
            await endpoints.inputs.drain()
        peer.send_signal(signal.SIGSTOP)  # connected, and never reads again
        for _ in range(100):
            endpoints.inputs.send_nowait([b"peer", bytes(1 << 20)])
        if route == "error":
            raise RuntimeError("an error of the application")
        if route == "exit":
            sys.exit(3)
        if route == "interrupt":
            raise KeyboardInterrupt
    print("closed", flush=True)

try:
    anyio.run(main, backend=backend)
finally:
    faulthandler.dump_traceback_later(1, exit=True)  # the bound of K18
"""


@pytest.mark.case("K18", budget_s=1)
@both_transports
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("route", ["return", "error", "exit", "interrupt"])
def test_100_mb_for_a_peer_that_never_reads(
    route: str, backend: str, transport: Transport, child_environment: dict[str, str]
) -> None:
    """Every way out closes everything before the exit, and the process ends."""
    command = [sys.executable, "-c", HOST, route, transport, backend, PEER]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment)
    try:
        assert host.stdout is not None
        peer = psutil.Process(int(host.stdout.readline().split()[1]))
        try:
            host.wait(timeout=30)
        finally:
            peer.kill()
        output, errors = host.communicate(timeout=30)
    finally:
        host.kill()
        host.wait()
    assert "Timeout (" not in errors, "the interpreter had to be ended"
    assert "alive 0" in output
    assert ("closed" in output) == (route == "return")
    expected = {"return": 0, "error": 1, "exit": 3}
    assert host.returncode == expected.get(route, host.returncode), errors


def test_endpoints_that_nobody_closed_do_not_hang_the_exit(child_environment: dict[str, str]) -> None:
    script = "from anyengine._transport.endpoints import open_endpoints\nopened = open_endpoints('tcp')\n"
    for ending in ("", "del opened\n"):
        subprocess.run([sys.executable, "-c", script + ending], check=True, timeout=30, env=child_environment)
