"""What vLLM itself makes of arguments: a program for the interpreter of vLLM's environment.

Reads one JSON document from standard input, ``{"lines": [[string, ...], ...], "mappings": [{...}, ...], "topologies":
[[model, [string, ...]], ...]}``, and writes one to the descriptor named on its command line. Nothing is started:
``launch_core_engines`` and ``vllm serve`` run with everything that would start a process replaced by a note of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli import serve
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import utils


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(one) for one in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def refuse(message: str) -> Any:
    raise ValueError(message)


def parser() -> FlexibleArgumentParser:
    made = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    made.error = refuse
    return made


def answer(ask: Any, question: Any) -> Any:
    try:
        return ask(question)
    except Exception as exc:  # noqa: BLE001 - it is an answer, too
        return {"$refused": f"{type(exc).__name__}: {exc}"}


def of_line(strings: list[str]) -> Any:
    namespace = PARSER.parse_args(strings)
    args = AsyncEngineArgs.from_cli_args(namespace)
    return {**plain(args), "headless": namespace.headless, "api_server_count": namespace.api_server_count}


def of_mapping(mapping: dict[str, Any]) -> Any:
    return plain(AsyncEngineArgs(**mapping))


def of_topology(question: tuple[str, list[str]]) -> Any:
    model, strings = question
    served = api_servers([*strings, f"--model={model}"])
    namespace = PARSER.parse_args([*strings, f"--model={model}", "--skip-tokenizer-init", "--dtype=float32"])
    args = AsyncEngineArgs.from_cli_args(namespace)
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=namespace.headless)
    parallel = config.parallel_config
    first, count = parallel.data_parallel_rank, parallel.data_parallel_size_local
    facts: dict[str, Any] = {
        "size": parallel.data_parallel_size,
        "balancing": "external"
        if parallel.data_parallel_external_lb
        else "hybrid"
        if parallel.data_parallel_hybrid_lb
        else "internal",
        "local_ranks": list(range(first, first + count)),
        "needs_coordinator": config.needs_dp_coordinator,
        "api_server_count": served,
    }
    if namespace.headless:
        host, port = parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port
        return {**facts, "handshake_address": serve.get_tcp_uri(host, port)}
    served_count = count if parallel.local_engines_only else parallel.data_parallel_size  # MPClient.__init__
    return {**facts, "served_ranks": list(range(first, first + served_count)), **launch(config)}


def launch(config: Any) -> dict[str, Any]:
    """``launch_core_engines``, without anything that it launches."""
    seen: dict[str, Any] = {"runs_coordinator": False}

    class Coordinator:
        proc = SimpleNamespace(pid=0)

        def __init__(self, *_: Any, **__: Any) -> None:
            seen["runs_coordinator"] = True

        def get_engine_socket_addresses(self) -> tuple[str, str]:
            return "", ""

        def get_stats_publish_address(self) -> str:
            return ""

    class Manager:
        def __init__(self, **settings: Any) -> None:
            note(settings["handshake_address"], settings["client_handshake_address"])

        def __getattr__(self, _: str) -> Any:
            return lambda *_, **__: []

    def note(address: str, client_address: str | None) -> None:
        seen["handshake_address"] = None if address.startswith("ipc://") else address
        seen["greeted_twice"] = client_address is not None

    @contextlib.contextmanager
    def socket(address: str, *_: Any, **__: Any) -> Any:
        if "handshake_address" not in seen and not config.parallel_config.data_parallel_size_local:
            note(address, None)
        yield SimpleNamespace()

    def wait(_: Any, engines: list[Any], *__: Any) -> None:
        seen["greeted_ranks"] = [int.from_bytes(engine.identity, "little") for engine in engines]

    utils.DPCoordinator = Coordinator
    utils.CoreEngineProcManager = Manager
    utils.zmq_socket_ctx = socket
    utils.wait_for_engine_startup = wait
    import vllm.distributed.utils as distributed

    distributed.create_tcp_store = lambda *_, **__: SimpleNamespace(port=1)
    addresses = SimpleNamespace(inputs=[], outputs=[])
    with utils.launch_core_engines(config, None, False, addresses):
        pass
    return seen


def api_servers(strings: list[str]) -> Any:
    """How many processes of the front end ``vllm serve`` would start."""
    decided: list[Any] = []
    serve.run_headless = lambda args: decided.append(args.api_server_count)
    serve.run_multi_api_server = lambda args: decided.append(args.api_server_count)
    serve.uvloop = SimpleNamespace(run=lambda _: decided.append(1))
    serve.run_server = lambda _: None
    serve.ServeSubcommand.cmd(PARSER.parse_args(strings))
    return decided[0]


if __name__ == "__main__":
    PARSER = parser()
    questions = json.load(sys.stdin)
    result = {
        "lines": [answer(of_line, line) for line in questions["lines"]],
        "mappings": [answer(of_mapping, mapping) for mapping in questions["mappings"]],
        "topologies": [answer(of_topology, topology) for topology in questions["topologies"]],
    }
    with os.fdopen(int(sys.argv[1]), "w") as out:
        json.dump(result, out)
