"""A request that names no rank goes where the client's balancer says, which is told what is known of the ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from engines import toy

from anyengine import (
    Balancer,
    EngineClient,
    EngineCoreClient,
    EngineCoreRequest,
    LocalProtocolError,
    RankLoad,
    RemoteEngine,
    RequestRejected,
    RestartPolicy,
    SamplingParams,
    SessionAffinity,
)
from anyengine._wire import WireLateInteractionParams, WirePoolingParams, WireSamplingParams
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin

pytestmark = pytest.mark.anyio

SILENT = Script(requests=(RequestRule(first_token=9, silent=True),))
"""Answers at once what does not begin with 9, and that never."""
SHORT = SamplingParams(max_tokens=2)


def engines(count: int) -> list[Any]:
    return [ScriptedTwin(SILENT).engine for _ in range(count)]


def endless(name: str, **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(name, [9], sampling_params=WireSamplingParams(max_tokens=5), **fields)


class Scripted:
    """Chooses what it was told to, and keeps what it was shown."""

    def __init__(self, *choices: Any) -> None:
        self.choices = list(choices)
        self.seen: list[tuple[str, dict[int, RankLoad]]] = []

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, RankLoad]) -> int:
        self.seen.append((request.request_id, dict(loads)))
        choice = self.choices.pop(0)
        if isinstance(choice, Exception):
            raise choice
        return choice  # type: ignore[no-any-return]


@pytest.mark.feature("C36")
@pytest.mark.parametrize(("count", "name"), [(1, "OnlyRank"), (2, "LeastLoaded"), (3, "LeastLoaded")])
async def test_the_topology_decides_on_the_strategy(count: int, name: str) -> None:
    """One class of clients for all of them; the strategy is an object that it has."""
    with anyio.fail_after(60):
        for kind in (EngineClient, EngineCoreClient):
            async with kind(engine=engines(count)) as client:
                core = client.core if isinstance(client, EngineClient) else client
                assert type(core.session.balancer).__name__ == name
                assert [core.add(endless(f"r{n}")) for n in range(2 * count)] == [*range(count)] * 2


@pytest.mark.feature("C36")
async def test_requests_go_where_fewest_are() -> None:
    """However many of its own a rank was given by name, and whatever ended meanwhile."""
    with anyio.fail_after(60):
        async with EngineCoreClient(engines(3)) as core:
            for n in range(6):
                core.add(endless(f"named{n}"), rank=n % 2)
            assert [core.add(endless(f"r{n}")) for n in range(3)] == [2, 2, 2]
            core.abort(["named0", "named2", "named4"])
            assert [core.add(endless(f"s{n}")) for n in range(3)] == [0, 0, 0]
            assert sorted(core.add(endless(f"t{n}")) for n in range(3)) == [0, 1, 2]  # all are equal: in turns


@pytest.mark.feature("R42")
async def test_a_session_stays_with_its_rank_while_that_lives() -> None:
    with anyio.fail_after(60):
        async with EngineClient(engine=engines(3), balancer=SessionAffinity()) as client:

            async def rank_of(session_id: str) -> int:
                stream = client.generate([1], SHORT, session_id=session_id)
                await stream.final()
                assert stream.rank is not None
                return stream.rank

            homes = {name: await rank_of(name) for name in "abc"}
            assert sorted(homes.values()) == [0, 1, 2]
            for n in range(10):
                client.core.add(endless(f"r{n}"), rank=homes["a"])  # it is the busiest by far
            assert [await rank_of("a") for _ in range(3)] == [homes["a"]] * 3
            client.core.session.burials.bury(homes["a"], "for the test")
            await client.wait_dead(homes["a"])
            elsewhere = await rank_of("a")
            assert elsewhere != homes["a"]
            assert [await rank_of("a") for _ in range(3)] == [elsewhere] * 3
            assert [await rank_of(name) for name in "bc"] == [homes["b"], homes["c"]]


async def test_what_a_strategy_is_told() -> None:
    """Its own requests to the moment; what waits and how full the cache is, as the engine said last."""
    balancer = Scripted(1, 1, 0)
    with anyio.fail_after(60):
        async with EngineClient(engine=[toy(max_num_seqs=1, step_delay_s=0.002)] * 2, balancer=balancer) as client:
            assert isinstance(balancer, Balancer)
            long = SamplingParams(max_tokens=1500)
            async with client.generate([1], long) as running, client.generate([2], long):
                await anext(running)
                statistics = client.core.session.liveness.last_statistics
                while not statistics.get(1) or not statistics[1].num_waiting_reqs:
                    await anext(running)  # says in each step how many wait
                async with client.generate([3], SHORT) as third:
                    await third.final()
    loads = [loads for _, loads in balancer.seen]
    assert loads[0] == {0: RankLoad(0), 1: RankLoad(0)}
    assert loads[1][1].num_in_flight == 1
    assert loads[2][0] == RankLoad(0)
    assert loads[2][1][:2] == (2, 1) and 0 < loads[2][1].kv_cache_usage <= 1


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (7, "chose rank 7, which was not among"),
        (None, "failed to choose"),
        ([1], "failed to choose"),
        (1.0, "failed to choose"),
        (KeyError("x"), "failed to choose"),
    ],
)
async def test_a_strategy_that_fails_is_the_requests_error_alone(choice: Any, message: str) -> None:
    balancer = Scripted(choice, 0, choice, 1)
    with anyio.fail_after(60):
        async with EngineClient(engine=engines(2), balancer=balancer, max_num_queued_reqs=1, strict=True) as client:
            for _ in range(2):
                with pytest.raises(LocalProtocolError, match=message):
                    await client.complete([1], SHORT)
                assert (await client.complete([1], SHORT)).finished  # no capacity was lost
            assert client.debug_snapshot().requests == ()


@pytest.mark.parametrize("choice", [KeyError("x"), [1], 1.0])
async def test_a_strategy_that_fails_when_a_request_is_sent_again(choice: Any) -> None:
    """It is told so, and nobody else."""
    balancer = Scripted(0, choice)
    policy = RestartPolicy(in_flight="replay")
    with anyio.fail_after(60):
        async with EngineClient(engine=engines(2), balancer=balancer, restart=policy) as client:
            stream = client.generate([9], SHORT)
            await stream.start()
            client.core.session.burials.bury(0, "for the test")
            with pytest.raises(LocalProtocolError, match="failed to choose"):
                await anext(stream)
            assert (await client.complete([1], SHORT, data_parallel_rank=1)).finished


@pytest.mark.parametrize("given", [3, "least", object(), SessionAffinity])
def test_what_is_no_strategy_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"balancer=.* must be an object with choose"):
        EngineClient(engine=RemoteEngine(handshake="tcp://127.0.0.1:0", ranks=2), balancer=given)


@pytest.mark.feature("C36")
async def test_a_query_and_its_documents_go_to_one_rank() -> None:
    """The one that vLLM's own client chooses (``v1/pool/late_interaction.py``), whatever the load is; when it has died,
    another one, all of them."""

    def scored(name: str, key: str, mode: str) -> EngineCoreRequest:
        pooling = WirePoolingParams(task="token_embed", late_interaction_params=WireLateInteractionParams(mode, key))
        return EngineCoreRequest(name, [9], pooling_params=pooling)

    keys = [f"query {number}" for number in range(20)]
    with anyio.fail_after(60):
        async with EngineCoreClient(engines(3)) as core:
            for n in range(5):
                core.add(endless(f"busy{n}"), rank=2)
            homes = {key: core.add(scored(key, key, "cache_query")) for key in keys}
            assert homes == {key: zlib.crc32(key.encode()) % 3 for key in keys}
            for n, key in enumerate(keys * 3):
                assert core.add(scored(f"document{n}", key, "score_doc")) == homes[key]
            core.session.engines[1].child.kill()
            await core.session.engines[1].child.exited.wait()
            while 1 in core.session.connection.rota.serving:
                await anyio.lowlevel.checkpoint()
            moved = {key: core.add(scored(f"again {key}", key, "cache_query")) for key in keys}
            assert moved == {key: 2 if home == 1 else home for key, home in homes.items()}
            assert core.add(endless("named"), rank=0) == 0


@pytest.mark.parametrize(
    "wrong", [7, "x", WirePoolingParams(late_interaction_params=7), WireLateInteractionParams("a", 7)]
)
async def test_what_is_no_query_is_refused_in_its_turn(wrong: Any) -> None:
    """A rank is chosen before a request is checked."""
    if isinstance(wrong, WireLateInteractionParams):
        wrong = WirePoolingParams(task="token_embed", late_interaction_params=wrong)
    with anyio.fail_after(30):
        async with EngineCoreClient(engines(2)) as core:
            with pytest.raises(RequestRejected):
                core.add(EngineCoreRequest("a", [9], pooling_params=wrong))
            assert core.add(endless("b")) in (0, 1)
