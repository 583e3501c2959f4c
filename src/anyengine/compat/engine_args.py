"""``AsyncEngineArgs``: vLLM's engine arguments, as far as the embedded engine has them.

Owns which of them mean something here, which mean nothing, and the refusal of all others: an argument that would change
what is computed is never ignored.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, Final

from anyengine.config import DEFAULT_MODEL, EmbeddedEngine

__all__ = ["AsyncEngineArgs"]

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

_WITHOUT_EFFECT: Final = frozenset(
    {
        "aggregate_engine_logging", "async_scheduling", "block_size", "compilation_config", "disable_cascade_attn",
        "disable_custom_all_reduce", "disable_log_requests", "disable_log_stats", "enable_chunked_prefill",
        "enable_log_requests", "enforce_eager", "gpu_memory_utilization", "max_parallel_loading_workers",
        "max_seq_len_to_capture", "optimization_level", "served_model_name", "swap_space", "trust_remote_code",
        "use_tqdm_on_load",
    }
)  # fmt: skip
"""How vLLM computes, or what it logs: nothing that an output depends on."""

_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "data_parallel_backend": ("mp",),
    "distributed_executor_backend": ("mp", "uni"),
    "generation_config": ("auto", "vllm"),
    "kv_cache_dtype": ("auto",),
    "load_format": ("auto",),
    "model_impl": ("auto", "transformers"),
    "pipeline_parallel_size": (1,),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs",),
    "task": ("auto", "generate"),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
}
"""What the embedded engine does anyway. ``None`` and ``False`` always stand for what it does anyway."""


class AsyncEngineArgs:
    """The arguments of an engine, by vLLM's names. They are attributes, too.

    ``data_parallel_size=n`` is n embedded engines behind one client.

    Raises:
        ValueError: an argument asks for what the embedded engine does not have. A vLLM engine core takes all of them:
            ``AsyncLLM(anyengine.VLLMEngine(model, args={...}))``.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **args: Any) -> None:
        self.model: str = model
        self.data_parallel_size: int = args.pop("data_parallel_size", None) or 1
        tokenizer = args.pop("tokenizer", None)
        if tokenizer not in (None, model):
            raise ValueError(f"tokenizer={tokenizer!r}: the embedded engine uses its model's own")
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
        given = {name: self._args[name] for name in _TAKEN if self._args.get(name) is not None}
        return [EmbeddedEngine(model=self.model, **given)] * self.data_parallel_size

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Give ``parser`` the options for :meth:`from_cli_args`; it."""
        parser.add_argument("--model", default=DEFAULT_MODEL)
        parser.add_argument("--data-parallel-size", type=int, default=1)
        for name, kind in _TAKEN.items():
            option = f"--{name.replace('_', '-')}"
            if kind is not None:
                parser.add_argument(option, type=kind)
        for name in ("enforce_eager", "trust_remote_code", "disable_log_stats", "enable_log_requests"):
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> AsyncEngineArgs:
        """The engine arguments among ``args``; those of the program are left alone."""
        known = {"model", "data_parallel_size", "tokenizer", *_TAKEN, *_WITHOUT_EFFECT, *_ONLY}
        return cls(**{name: value for name, value in vars(args).items() if name in known})


def _check(name: str, value: Any) -> None:
    if name in _TAKEN or name in _WITHOUT_EFFECT or value is None or value is False:
        return
    if value in _ONLY.get(name, ()):
        return
    possible = f" other than {', '.join(map(repr, _ONLY[name]))}" if name in _ONLY else ""
    raise ValueError(
        f"{name}={value!r:.200}: the embedded engine has no {name}{possible}; leave it out, or use a vLLM engine core: "
        "AsyncLLM(anyengine.VLLMEngine(model, args={...}))"
    )
