"""What topology a set of vLLM's arguments stands for (``tests/interop`` holds it against vLLM's own)."""

from __future__ import annotations

from typing import Any

import pytest

from anyengine.vllm.arguments import understand_arguments
from anyengine.vllm.topology import DEFAULT_RPC_PORT, Topology, derive_topology

HEAD = f"tcp://10.0.0.5:{DEFAULT_RPC_PORT}"
ONE = Topology(
    size=1,
    balancing="internal",
    local_ranks=(0,),
    served_ranks=(0,),
    greeted_ranks=(0,),
    handshake_address=None,
    greeted_twice=False,
    needs_coordinator=False,
    runs_coordinator=False,
    headless=False,
    api_server_count=1,
)


def changed(topology: Topology) -> dict[str, Any]:
    return {
        name: getattr(topology, name)
        for name in Topology.__struct_fields__
        if getattr(topology, name) != getattr(ONE, name)
    }


ALL_FOUR = {"size": 4, "served_ranks": (0, 1, 2, 3), "greeted_ranks": (0, 1, 2, 3), "api_server_count": 4}
COORDINATED = {"needs_coordinator": True, "runs_coordinator": True}


@pytest.mark.feature("F03")
@pytest.mark.parametrize(
    ("line", "is_moe", "expected"),
    [
        ("", False, {}),
        ("-dp 4", False, {**ALL_FOUR, **COORDINATED, "local_ranks": (0, 1, 2, 3)}),
        (
            "-dp 4 -dpl 2 -dpa 10.0.0.5",
            False,
            {**ALL_FOUR, **COORDINATED, "local_ranks": (0, 1), "handshake_address": HEAD},
        ),
        (
            "-dp 4 -dpl 0 -dpa ::1 -dpp 5000",
            False,
            {**ALL_FOUR, **COORDINATED, "local_ranks": (), "handshake_address": "tcp://[::1]:5000"},
        ),
        (
            "-dp 4 -dpl 2 -dpr 2 -dpa 10.0.0.5 --headless",
            False,
            {
                "size": 4,
                "local_ranks": (2, 3),
                "served_ranks": (),
                "greeted_ranks": (),
                "handshake_address": HEAD,
                "needs_coordinator": True,
                "headless": True,
                "api_server_count": 0,
            },
        ),
        (
            "-dp 4 -dpl 2 -dpr 2 -dpa 10.0.0.5",
            True,
            {
                "size": 4,
                "balancing": "hybrid",
                "local_ranks": (2, 3),
                "served_ranks": (2, 3),
                "greeted_ranks": (2, 3),
                "handshake_address": HEAD,
                "greeted_twice": True,
                "needs_coordinator": True,
                "api_server_count": 2,
            },
        ),
        (
            "-dp 2 -dpn 0 -dpa 10.0.0.5",
            True,
            {"size": 2, "balancing": "external", "greeted_ranks": (0, 1), "handshake_address": HEAD, **COORDINATED},
        ),
        (
            "-dp 4 -n 2 -r 1 --headless --master-addr 10.0.0.5",
            False,
            {
                "size": 4,
                "local_ranks": (2, 3),
                "served_ranks": (),
                "greeted_ranks": (),
                "handshake_address": HEAD,
                "needs_coordinator": True,
                "headless": True,
                "api_server_count": 0,
            },
        ),
    ],
)
def test_topologies(line: str, is_moe: bool, expected: dict[str, Any]) -> None:
    assert changed(derive_topology(understand_arguments(line.split()), is_moe=is_moe)) == expected


@pytest.mark.parametrize(
    ("line", "is_moe", "words"),
    [
        ("-dp 2 -dpn 1", False, "has no external data parallelism"),
        ("-dpn 0", True, "needs a data_parallel_size above 1"),
        ("-dp 2 -dpn 2", True, "must be from 0 to 1"),
        ("-dp 2 -dpe", True, "needs a data_parallel_rank"),
        ("-dp 2 -dph", True, "needs data_parallel_size_local"),
        ("-dp 2 -dpn 1 -dpl 2", True, "data_parallel_size_local=2 must be 1"),
        ("-dp 2 -dpl 3", False, "data_parallel_size_local=3 must be at most"),
        ("-dp 2 -dph -dpn 1", True, "exclude each other"),
        ("-dp 4 -dpl 2 -dph --headless", True, "headless and data_parallel_hybrid_lb"),
        ("--headless --api-server-count 1", False, "api_server_count=1 and headless"),
        ("-dp 2 -dpm", True, "derive each of them"),
        ("-dp 3 -n 2", False, "does not divide"),
        ("-dp 2 -n 2 -r 2", False, "node_rank=2"),
        ("-dp 2 -n 2 -dpb ray", False, "needs data_parallel_backend='mp'"),
    ],
)
def test_contradictions(line: str, is_moe: bool, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        derive_topology(understand_arguments(line.split()), is_moe=is_moe)
