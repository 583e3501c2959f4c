"""The arguments of vLLM that a client understands, out of some 260: what they are called, their defaults, their values.

Owns the table. Everything else is left alone, for vLLM to take or to refuse. Must not know what a client does with
them. Pure.

Mirrors vLLM 0.32.0: ``EngineArgs``, and ``--headless`` and ``--api-server-count`` of ``vllm serve``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

__all__ = ["UnderstoodArguments", "understand_arguments"]


class UnderstoodArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What a client knows of an engine's arguments: vLLM's names, and vLLM's defaults where nothing was given.

    Configurations (``*_config``) have only the keys that were given.
    """

    # The model and its tokenizer.
    model: str = "Qwen/Qwen3-0.6B"
    served_model_name: str | list[str] | None = None
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    tokenizer_revision: str | None = None
    revision: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    hf_config_path: str | None = None
    hf_overrides: dict[str, Any] | str = {}
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = {}
    runner: str = "auto"
    convert: str = "auto"

    # Which engine cores there are, and where.
    data_parallel_size: int = 1
    data_parallel_size_local: int | None = None
    data_parallel_rank: int | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_address: str | None = None
    data_parallel_rpc_port: int | None = None
    data_parallel_hybrid_lb: bool = False
    data_parallel_external_lb: bool = False
    data_parallel_multi_port_external_lb: bool = False
    data_parallel_backend: str = "mp"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    enable_elastic_ep: bool = False
    api_server_count: int | None = None
    headless: bool = False

    # What requests may ask for, and how they are scheduled.
    max_logprobs: int = 20
    enable_prompt_embeds: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    structured_outputs_config: dict[str, Any] = {}
    reasoning_parser: str = ""
    reasoning_config: dict[str, Any] | None = None
    pooler_config: dict[str, Any] | None = None
    enable_trace_replay: bool = False
    enable_fault_tolerance: bool = False
    scheduling_policy: str = "fcfs"
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    stream_interval: int = 1
    mm_processor_cache_gb: float = 4.0
    mm_processor_cache_type: str = "lru"
    shutdown_timeout: int = 0
    """In seconds: how long running requests may take to end when the engine is asked to stop."""

    # What is logged and measured.
    disable_log_stats: bool = False
    aggregate_engine_logging: bool = False
    enable_log_requests: bool = False
    otlp_traces_endpoint: str | None = None
    collect_detailed_traces: list[str] | None = None

    @property
    def structured_outputs_backend(self) -> str:
        """``"auto"``, or the backend that was chosen for structured outputs."""
        return str(self.structured_outputs_config.get("backend", "auto"))

    @property
    def keeps_mm_items(self) -> bool:
        """Whether an engine keeps multi-modal items, so that they need no data when they come again
        (``multimodal/cache/factories.py``: not where several ranks share a front end)."""
        alone = self.data_parallel_size == 1 or self.data_parallel_external_lb or self.data_parallel_rank is not None
        return self.mm_processor_cache_gb > 0 and self.mm_processor_cache_type == "lru" and alone

    @property
    def reasons(self) -> bool:
        """Whether the engine tells a model's reasoning from its answer."""
        return bool(
            self.reasoning_parser or self.reasoning_config or self.structured_outputs_config.get("reasoning_parser")
        )


_NAMES: Final = UnderstoodArguments.__struct_fields__


def understand_arguments(args: Mapping[str, Any] | Sequence[str]) -> UnderstoodArguments:
    """Read ``args``: a mapping of names to plain data, or command-line strings. What is not understood is left out.

    Raises:
        ValueError: an argument that is understood has a value that it cannot have (the message names it), a flag stands
            without one, or the strings refer to a file of arguments.
    """
    given = args if isinstance(args, Mapping) else _of_command_line(args)
    # Through JSON, as they travel: tuples become lists, and nothing that a caller may change is shared.
    known = {name: given[name] for name in _NAMES if given.get(name) is not None}  # None: not given
    plain = msgspec.json.decode(msgspec.json.encode(known))
    try:
        return msgspec.convert(plain, UnderstoodArguments)
    except msgspec.ValidationError as exc:
        problem, _, path = str(exc).partition(" - at `$.")
        name = re.split(r"\W", path, maxsplit=1)[0]
        raise ValueError(f"vLLM's argument {name}={plain.get(name)!r} cannot be right: {problem}") from None


def _of_command_line(strings: Sequence[str]) -> dict[str, Any]:
    from .command_line import parse_command_line  # and argparse, which takes as long to import as all the rest

    return parse_command_line(strings, UnderstoodArguments.__annotations__)
