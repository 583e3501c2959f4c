"""HS: the start of an engine, as its handshake and its registration show it.

These checks look at what was written down while it started; they can judge an engine that did not become ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio.lowlevel
import msgspec

from anyengine._wire import engine_identity
from anyengine._wire.layouts import ROWS, last_names
from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.outcomes import CheckFailed, CheckSkipped, expect, expect_that
from anyengine.testing.conformance.registry import check

__all__: list[str] = []

_READY_EXTRAS = {"parallel_config_hash", "num_gpu_blocks", "dp_stats_address"}


def _check_start(
    check_id: str, title: str, source: str
) -> Callable[[Callable[[EngineLink], None]], Callable[[EngineLink], None]]:
    """Register the decorated function: it looks, and has nothing to wait for."""

    def register(judge: Callable[[EngineLink], None]) -> Callable[[EngineLink], None]:
        @check(check_id, title, source, handshake=True)
        async def look(link: EngineLink) -> None:
            judge(link)
            await anyio.lowlevel.checkpoint()

        return judge

    return register


def _maps(link: EngineLink, status: str) -> list[dict[str, Any]]:
    """The messages of this status on the handshake socket."""
    found = []
    for _, frames in link.start.handshake:
        message = _decoded(frames[0]) if frames else None
        if isinstance(message, dict) and message.get("status") == status:
            found.append(message)
    return found


def _greeted(link: EngineLink) -> None:
    """There is something to look at."""
    if not link.start.handshake:
        raise CheckSkipped("it did not greet: see HS-01")


def _decoded(frame: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _registration(link: EngineLink) -> tuple[bytes, list[bytes]]:
    if not link.start.registrations:
        raise CheckSkipped("it did not register: see HS-01")
    return link.start.registrations[min(link.start.registrations)][0]


def _registered_map(link: EngineLink) -> dict[str, Any]:
    _, frames = _registration(link)
    if not frames or not frames[0]:
        raise CheckSkipped("it registers with an empty frame, as releases up to 0.19.1 do")
    message = _decoded(frames[0])
    expect_that(isinstance(message, dict), "registration", expected="a msgpack map", got=message)
    return dict(message)


@_check_start("HS-01", "the engine becomes ready", "protocol.md §3")
def becomes_ready(link: EngineLink) -> None:
    if link.start.failure is not None:  # at full length: it has the engine's own words
        raise CheckFailed("start", expected="READY and a registration", got=link.start.failure)


@_check_start("HS-02", "its identity on the handshake socket is its rank, two bytes little endian", "protocol.md §1")
def handshake_identity(link: EngineLink) -> None:
    _greeted(link)
    found = {identity for identity, _ in link.start.handshake}
    expect("identities on the handshake socket", found, {engine_identity(link.rank)})


@_check_start("HS-03", "its identity on the input sockets is the same", "protocol.md §1")
def input_identity(link: EngineLink) -> None:
    _registration(link)
    found = {identity for messages in link.start.registrations.values() for identity, _ in messages}
    expect("identities on the input sockets", found, {engine_identity(link.rank)})


@_check_start("HS-04", "its first message is HELLO: a map of status, local and headless", "protocol.md §3")
def hello(link: EngineLink) -> None:
    _greeted(link)
    _, frames = link.start.handshake[0]
    expect("frames of HELLO", len(frames), 1)
    message = _decoded(frames[0])
    expect_that(isinstance(message, dict), "first message", expected="a msgpack map", got=message)
    expect("status of the first message", message.get("status"), "HELLO")
    expect("keys of HELLO", set(message), {"status", "local", "headless"})
    types = {name: type(message[name]) for name in ("local", "headless")}
    expect("types in HELLO", types, {"local": bool, "headless": bool})


@_check_start("HS-05", "HELLO and READY say truly how it was started (local, headless)", "protocol.md §3")
def says_how_it_was_started(link: EngineLink) -> None:
    _greeted(link)
    messages = _maps(link, "HELLO") + _maps(link, "READY")
    expected = {"local": link.start.expect_local, "headless": link.start.expect_headless}
    for message in messages:
        expect(str(message.get("status")), {name: message.get(name) for name in expected}, expected)


@_check_start("HS-06", "READY comes once, after INIT, and has no keys but its own", "protocol.md §3")
def ready(link: EngineLink) -> None:
    messages = _maps(link, "READY")
    if not messages and link.start.failure is not None:
        raise CheckSkipped("it did not become ready: see HS-01")
    expect("number of READY messages", len(messages), 1)
    expect("READY after INIT", link.start.ready_after_init, True)
    surplus = set(messages[0]) - {"status", "local", "headless"} - _READY_EXTRAS
    expect("keys of READY", surplus, set())


@_check_start("HS-07", "nothing but HELLO and READY comes on the handshake socket", "protocol.md §3")
def nothing_else(link: EngineLink) -> None:
    if link.start.failure is not None:
        raise CheckSkipped("it did not become ready: see HS-01")
    found = [len(frames) for _, frames in link.start.handshake]
    expect("frames of each handshake message", found, [1, 1])


@_check_start("HS-08", "it registers once with every client, in one frame", "protocol.md §4")
def registers_everywhere(link: EngineLink) -> None:
    _registration(link)
    found = {client: [len(frames) for _, frames in messages] for client, messages in link.start.registrations.items()}
    expect("frames of each message, by client", found, {client: [1] for client in range(len(link.ports.clients))})


@_check_start("HS-09", "every client gets the same registration", "protocol.md §4")
def same_registration(link: EngineLink) -> None:
    _registration(link)
    found = {messages[0][1][0] for messages in link.start.registrations.values() if messages[0][1]}
    expect_that(len(found) == 1, "registrations", expected="one and the same", got=f"{len(found)} different ones")


@_check_start("HS-10", "the registration has every key of its release", "protocol.md §4")
def registration_keys(link: EngineLink) -> None:
    message = _registered_map(link)
    names = last_names(ROWS["EngineCoreReadyResponse"], link.dialect.since, link.dialect.until)
    missing = sorted(set(names) - set(message))
    expect(f"missing keys ({link.dialect.releases})", missing, [])


_SIZES = (
    "max_model_len", "block_size", "world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size",
    "decode_context_parallel_size", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip
_TEXTS = ("dtype", "vllm_version", "instance_id")


@_check_start("HS-11", "what the registration says makes sense", "protocol.md §4")
def registration_values(link: EngineLink) -> None:
    message = _registered_map(link)
    for name in _SIZES:
        value = message.get(name, 1)
        fine = type(value) is int and value >= 1
        expect_that(fine, f"registration.{name}", expected="an int of at least 1", got=value)
    for name in _TEXTS:
        value = message.get(name, "x")
        expect_that(
            isinstance(value, str) and value != "" and not value.startswith("torch."),
            f"registration.{name}",
            expected="a str without a package in front",
            got=value,
        )
    for name in ("supports_lora", "enable_sleep_mode", "supports_draft_weight_updates"):
        expect_that(type(message.get(name, False)) is bool, f"registration.{name}", expected="a bool", got=message)
    blocks = message.get("num_gpu_blocks", 0)
    expect_that(type(blocks) is int and blocks >= 0, "registration.num_gpu_blocks", expected="an int", got=blocks)


@_check_start("HS-12", "the registration names the rank of the identity", "protocol.md §4")
def registration_rank(link: EngineLink) -> None:
    rank = _registered_map(link).get("data_parallel_rank")
    if rank is None:
        raise CheckSkipped("this release does not say its rank")
    expect("registration.data_parallel_rank", rank, link.rank)
