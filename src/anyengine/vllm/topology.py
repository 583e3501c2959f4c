"""Which engine cores a set of vLLM's arguments stands for: how many, which are here, who serves and greets them.

Owns vLLM's rules for data parallelism, as facts. Must not know how engines are started or joined. Pure.

Mirrors vLLM 0.32.0: ``EngineArgs.create_engine_config``, ``launch_core_engines``, ``run_headless``, ``vllm serve`` and
the ranks of ``MPClient``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .arguments import UnderstoodArguments

__all__ = ["DEFAULT_RPC_PORT", "Topology", "check_launchable", "derive_topology"]

DEFAULT_RPC_PORT = 29550

_DEFAULTS = UnderstoodArguments()


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The engine cores of one model, seen from one node.

    ``size`` counts all data-parallel ranks. ``local_ranks`` are started on this node, ``served_ranks`` get their
    requests from this node's front end, and ``greeted_ranks`` shake hands with it (the head's front end greets all of
    them; both are empty on a headless node). ``handshake_address`` is where the engines say HELLO first; ``None``: at a
    private ``ipc`` address. ``greeted_twice``: they then do it again, over ``ipc``, with the front end of their node.
    """

    size: int
    balancing: Literal["internal", "hybrid", "external"]
    local_ranks: tuple[int, ...]
    served_ranks: tuple[int, ...]
    greeted_ranks: tuple[int, ...]
    handshake_address: str | None
    greeted_twice: bool
    needs_coordinator: bool
    """Whether there is one, on the node of rank 0."""
    runs_coordinator: bool
    headless: bool
    api_server_count: int


def derive_topology(arguments: UnderstoodArguments, *, is_moe: bool = False) -> Topology:
    """What ``arguments`` stand for; ``is_moe`` says whether the model is a mixture of experts, which they do not.

    Raises:
        ValueError: the arguments contradict each other, or describe several front ends at once.
    """
    size = arguments.data_parallel_size
    rank, local_count, balancing = _place(arguments, is_moe)
    if size == 1 and balancing == "external":
        raise ValueError("external load balancing needs a data_parallel_size above 1")
    local = tuple(range(rank, rank + local_count))
    if size == 1 and local_count:
        rank, local = 0, (0,)
    elif not 0 <= rank < size:
        raise ValueError(f"data_parallel_rank={rank} must be from 0 to {size - 1}, for data_parallel_size={size}")
    elif local_count > size:
        raise ValueError(f"data_parallel_size_local={local_count} must be at most data_parallel_size={size}")
    alone = balancing != "internal"  # the front end serves its own node only
    if rank > 0 and not alone and not arguments.headless:
        raise ValueError(f"start rank {rank} needs headless, or a load-balancing mode: the front end stands at rank 0")
    served = local if alone else tuple(range(size))
    coordinated = size > 1 and (is_moe or balancing != "external")
    private = local_count == size and not arguments.enable_elastic_ep and not arguments.headless
    return Topology(
        size=size,
        balancing=balancing,
        local_ranks=local,
        served_ranks=() if arguments.headless else served,
        greeted_ranks=() if arguments.headless else tuple(range(size)) if rank == 0 else local,
        handshake_address=None if private else _handshake_address(arguments),
        greeted_twice=not arguments.headless and alone and rank > 0,
        needs_coordinator=coordinated,
        runs_coordinator=coordinated and rank == 0 and not arguments.headless,
        headless=arguments.headless,
        api_server_count=_api_server_count(arguments),
    )


_ELSEWHERE = (
    "headless",
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb",
    "data_parallel_backend",
)
"""Arguments of engine cores that somebody else starts, on this node or on others."""


def check_launchable(arguments: UnderstoodArguments) -> None:
    """Refuse what contradicts being started by a client: all ranks, on this node, with this one front end.

    Raises:
        ValueError: the first argument that does; the message says what to do instead.
    """
    size = arguments.data_parallel_size
    if size < 1:
        raise ValueError(f"data_parallel_size={size} must be at least 1")
    for name in _ELSEWHERE:
        if (value := getattr(arguments, name)) != getattr(_DEFAULTS, name):
            raise ValueError(
                f"{name}={value!r} describes engine cores that somebody else starts, or that are on several nodes; the "
                "client starts all of its own on this one: leave it out, or start them with `vllm serve --headless` "
                "and join them with RemoteEngine"
            )
    if (local := arguments.data_parallel_size_local) not in (None, size):
        raise ValueError(
            f"data_parallel_size_local={local} of data_parallel_size={size} leaves ranks to other nodes, which the "
            "client does not start: leave it out, or start the ranks with `vllm serve --headless` and join them with "
            "RemoteEngine"
        )
    if arguments.nnodes > 1 and size > 1:
        raise ValueError(
            f"nnodes={arguments.nnodes} with data_parallel_size={size} leaves ranks to other nodes, which the client "
            "does not start: start them with `vllm serve --headless` and join them with RemoteEngine"
        )
    if (arguments.api_server_count or 1) > 1:
        raise ValueError(
            f"api_server_count={arguments.api_server_count} asks for more front ends than one: this client is the only "
            "one; leave it out"
        )


def _place(arguments: UnderstoodArguments, is_moe: bool) -> tuple[int, int, Literal["internal", "hybrid", "external"]]:
    """The first rank of this node, how many it has, and who balances the load."""
    if arguments.data_parallel_multi_port_external_lb:
        raise ValueError(
            "data_parallel_multi_port_external_lb stands for one front end for each rank: derive each of them, with "
            "its data_parallel_rank"
        )
    _check_modes(arguments)
    size = arguments.data_parallel_size
    rank_of_node, count_of_node = _share_of_node(arguments)
    if arguments.data_parallel_external_lb or arguments.data_parallel_rank is not None:
        rank = arguments.data_parallel_rank
        if rank is None and arguments.nnodes > 1 and size > 1 and arguments.nnodes % size == 0:
            rank = rank_of_node
        if rank is None:
            raise ValueError("data_parallel_external_lb needs a data_parallel_rank")
        if size > 1 and not is_moe:
            raise ValueError(
                f"data_parallel_rank={rank}: a model without experts has no external data parallelism; start "
                "independent engines, without data_parallel_size"
            )
        if arguments.data_parallel_size_local not in (None, 1):
            raise ValueError(
                f"data_parallel_size_local={arguments.data_parallel_size_local} must be 1 for an external rank"
            )
        return rank, 1, "external"
    local = arguments.data_parallel_size_local if count_of_node is None else count_of_node
    if local is None:
        if arguments.data_parallel_hybrid_lb:
            raise ValueError("data_parallel_hybrid_lb needs data_parallel_size_local")
        return 0, size, "internal"
    start = arguments.data_parallel_start_rank
    hybrid = arguments.data_parallel_hybrid_lb or (start is not None and not arguments.headless)
    balancing: Literal["internal", "hybrid", "external"] = "internal"
    if hybrid and local == 1:
        balancing = "external"
    elif hybrid and local != size:
        balancing = "hybrid"
    return rank_of_node if start is None else start, local, balancing


def _share_of_node(arguments: UnderstoodArguments) -> tuple[int, int | None]:
    """Of several nodes that share the ranks: the first one's here, and how many, unless that was given."""
    nodes, node = arguments.nnodes, arguments.node_rank
    if nodes <= 1:
        return 0, None
    processes_of_rank = (
        arguments.pipeline_parallel_size * arguments.tensor_parallel_size * arguments.prefill_context_parallel_size
    )
    if arguments.data_parallel_backend != "mp":
        raise ValueError(f"nnodes={nodes} needs data_parallel_backend='mp', not {arguments.data_parallel_backend!r}")
    processes = arguments.data_parallel_size * processes_of_rank
    if processes % nodes:
        raise ValueError(f"nnodes={nodes} does not divide the {processes} processes of all ranks evenly")
    if not 0 <= node < nodes:
        raise ValueError(f"node_rank={node} must be from 0 to {nodes - 1}, for nnodes={nodes}")
    processes_here = processes // nodes
    given = arguments.data_parallel_size_local is not None
    count = None if given else max(processes_here // processes_of_rank, 1)
    return node * processes_here // processes_of_rank, count


def _check_modes(arguments: UnderstoodArguments) -> None:
    hybrid = arguments.data_parallel_hybrid_lb or arguments.data_parallel_start_rank is not None
    if hybrid and (arguments.data_parallel_external_lb or arguments.data_parallel_rank is not None):
        raise ValueError(
            "data_parallel_external_lb (data_parallel_rank) and data_parallel_hybrid_lb (data_parallel_start_rank) "
            "exclude each other"
        )
    if arguments.headless and arguments.data_parallel_hybrid_lb:
        raise ValueError("headless and data_parallel_hybrid_lb exclude each other: a headless node has no front end")
    if arguments.headless and (arguments.api_server_count or 0) > 0:
        raise ValueError(f"api_server_count={arguments.api_server_count} and headless exclude each other")


def _handshake_address(arguments: UnderstoodArguments) -> str:
    host = arguments.data_parallel_address
    if host is None:
        host = arguments.master_addr or "127.0.0.1"
    port = arguments.data_parallel_rpc_port
    return f"tcp://{f'[{host}]' if ':' in host else host}:{DEFAULT_RPC_PORT if port is None else port}"


def _api_server_count(arguments: UnderstoodArguments) -> int:
    """How many processes of the front end ``vllm serve`` starts; it decides before it looks at the nodes."""
    count = arguments.api_server_count
    if arguments.headless:
        return 0
    if count is None:
        if arguments.data_parallel_external_lb or arguments.data_parallel_rank is not None:
            count = 1
        elif arguments.data_parallel_hybrid_lb or arguments.data_parallel_start_rank is not None:
            count = arguments.data_parallel_size_local or 1
        else:
            count = arguments.data_parallel_size
    return min(count, 1) if arguments.enable_elastic_ep else count
