"""``AsyncEngineArgs``: vLLM's engine arguments, as far as the embedded engine has them.

Owns which of them mean something here, which mean nothing, and the refusal of all others: an argument that would change
what is computed is never ignored.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, Final, TypedDict, cast

from anyengine.config import DEFAULT_MODEL, EmbeddedEngine

__all__ = ["AsyncEngineArgs", "QueueLimits"]

_TAKEN: Final[dict[str, Any]] = {
    "dtype": str,
    "max_logprobs": int,
    "max_model_len": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "kv_cache_memory_bytes": int,
    "enable_prefix_caching": None,
    "seed": int,
}
"""Handed on to the embedded engine by the same names; with the type of a value on the command line."""

_OURS: Final = ("device", "num_threads", "profile_dir", "in_process")
"""Handed on, too, and not vLLM's: on the command line they are the program's."""

_WITHOUT_EFFECT: Final = frozenset(
    {
        "aggregate_engine_logging", "async_scheduling", "block_size", "compilation_config", "disable_cascade_attn",
        "disable_custom_all_reduce", "disable_log_requests", "disable_log_stats", "enable_chunked_prefill",
        "enable_log_requests", "enforce_eager", "gpu_memory_utilization", "max_cpu_loras", "max_lora_rank",
        "max_parallel_loading_workers", "max_seq_len_to_capture", "optimization_level", "served_model_name",
        "swap_space", "trust_remote_code", "use_tqdm_on_load",
    }
)  # fmt: skip
"""How vLLM computes, or what it logs: nothing that an output depends on."""

_LORA: Final = {"enable_lora", "max_loras"}
_LIMITS: Final = ("max_num_queued_reqs", "max_num_queued_tokens")

_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "api_server_count": (1,),
    "cpu_offload_gb": (0,),
    "data_parallel_backend": ("mp",),
    "distributed_executor_backend": ("mp", "uni"),
    "generation_config": ("auto", "vllm"),
    "kv_cache_dtype": ("auto",),
    "load_format": ("auto",),
    "lora_dtype": ("auto",),
    "model_impl": ("auto", "transformers"),
    "pipeline_parallel_size": (1,),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs", "priority"),  # requests without a priority have the same one
    "task": ("auto", "generate"),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
}
"""What the embedded engine does anyway. ``None``, ``False`` and what is empty always stand for what it does anyway."""


class QueueLimits(TypedDict, total=False):
    """What of the arguments is the client's."""

    max_num_queued_reqs: int
    max_num_queued_tokens: int


class AsyncEngineArgs:
    """The arguments of an engine, by vLLM's names. They are attributes, too.

    ``data_parallel_size=n`` is n embedded engines behind one client.

    Raises:
        ValueError: an argument has a wrong value, or asks for what the embedded engine does not do. A vLLM engine core
            takes all of them: ``AsyncLLM(anyengine.VLLMEngine(model, args={...}))``.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **args: Any) -> None:
        self.model: str = model
        self.data_parallel_size: int = _size(args.pop("data_parallel_size", None))
        tokenizer = args.pop("tokenizer", None)
        if tokenizer not in (None, model):
            raise ValueError(f"tokenizer={tokenizer!r}: the embedded engine uses its model's own; leave it out")
        for name, value in args.items():
            _check(name, value)
        self._args = args

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_args"][name]
        except KeyError:
            raise AttributeError(f"engine argument {name!r} was not given") from None

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self._args.items())
        return f"AsyncEngineArgs(model={self.model!r}{given})"

    def engines(self) -> Sequence[EmbeddedEngine]:
        """The embedded engines that these arguments describe, one for each data-parallel rank.

        Raises:
            ValueError: a value that the embedded engine does not take.
        """
        given = {name: self._args[name] for name in (*_TAKEN, *_OURS) if self._args.get(name) is not None}
        if self._args.get("enable_lora"):
            given["max_loras"] = self._args.get("max_loras") or 1  # vLLM's default
        return [EmbeddedEngine(model=self.model, **given)] * self.data_parallel_size

    def queue_limits(self) -> QueueLimits:
        """The limits that the client keeps, of those that were given."""
        limits: Any = {name: self._args[name] for name in _LIMITS if self._args.get(name) is not None}
        return cast("QueueLimits", limits)

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Give ``parser`` the options for :meth:`from_cli_args`; it."""
        parser.add_argument("--model", default=DEFAULT_MODEL)
        parser.add_argument("--data-parallel-size", type=int, default=1)
        for name, kind in _TAKEN.items():
            option = f"--{name.replace('_', '-')}"
            if kind is not None:
                parser.add_argument(option, type=kind)
        for name in ("max_loras", *_LIMITS):
            parser.add_argument(f"--{name.replace('_', '-')}", type=int)
        for name in ("enable_lora", "enforce_eager", "trust_remote_code", "disable_log_stats", "enable_log_requests"):
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> AsyncEngineArgs:
        """The engine arguments among ``args``; those of the program are left alone."""
        known = {"model", "data_parallel_size", "tokenizer", *_TAKEN, *_LORA, *_LIMITS, *_WITHOUT_EFFECT, *_ONLY}
        return cls(**{name: value for name, value in vars(args).items() if name in known})


def _size(value: Any) -> int:
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"data_parallel_size={value!r:.200} must be an int of at least 1: the number of engines")
    return value


def _check(name: str, value: Any) -> None:
    if any(name in known for known in (_TAKEN, _OURS, _LORA, _LIMITS, _WITHOUT_EFFECT)):
        return
    if value is None or value is False or value in ({}, [], (), *_ONLY.get(name, ())):
        return
    possible = f", but for {', '.join(map(repr, _ONLY[name]))}" if name in _ONLY else ""
    raise ValueError(
        f"{name}={value!r:.200}: compat does not hand on {name}{possible}: leave it out, or use a vLLM engine core, "
        "which takes all of vLLM's arguments: AsyncLLM(anyengine.VLLMEngine(model, args={...}))"
    )
