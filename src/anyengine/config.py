"""Frozen settings: what a user may choose about an engine and a client, and what a child process is told.

Owns no behaviour beyond checking its own values. The launch record is what crosses the child's standard input as one
line of JSON; nothing is ever pickled.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

__all__ = ["DEFAULT_MODEL", "CommandEngine", "EmbeddedEngine", "EngineLaunch", "EngineSettings", "VLLMEngine"]

DEFAULT_MODEL = "smollm2-135m"

DType = Literal["auto", "float32", "bfloat16", "float16"]
"""Weights and activations. ``"auto"``: float32 on CPU, the checkpoint's own dtype on CUDA."""


class EmbeddedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Our own engine core, made of torch and transformers, in a process of its own.

    ``model`` is an alias (``"smollm2-135m"``), a local directory, a GGUF file or a Hub id. ``max_model_len`` is in
    tokens (prompt and output together; ``None``: what the model says, at most 8192). ``max_num_seqs`` bounds the
    running batch; further requests wait in the engine. ``max_num_batched_tokens`` bounds the prompt tokens computed in
    one step.
    """

    model: str = DEFAULT_MODEL
    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    seed: int = 0
    num_threads: int | None = None
    runner: str = "transformers"
    """``"transformers"``, or ``"module:factory"`` of another model runner (tests use a torch-free toy)."""
    runner_options: dict[str, str | int | float | bool] = {}
    """Passed to the factory of a custom ``runner``."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len={self.max_model_len!r} must be at least 2 (one prompt and one output token)"
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"num_threads={self.num_threads!r} must be at least 1, or None for torch's own choice")


class CommandEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine core that another program provides: ``argv`` starts it, and it speaks the wire.

    It reads an :class:`EngineLaunch` line from its standard input as the embedded engine does, and may write status
    lines to its standard output. ``model_dir`` names the local directory with the tokenizer, when text prompts are
    wanted. ``args`` says what an engine does not tell of itself, by vLLM's names (``{"max_logprobs": 50,
    "enable_prompt_embeds": True}``): vLLM's defaults are assumed otherwise. Nothing is handed to the program.
    """

    argv: tuple[str, ...]
    model_dir: str | None = None
    args: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        argv: object = self.argv  # msgspec does not check what a constructor is given
        if not isinstance(argv, tuple | list) or not argv:
            raise ValueError(f"argv={self.argv!r} must be a non-empty sequence: the program and its arguments")


class _VLLMModel(msgspec.Struct, frozen=True):
    model: str


class VLLMEngine(_VLLMModel, frozen=True, kw_only=True):
    """An unmodified vLLM engine core, in a process of its own, run by the interpreter of an environment with vLLM.

    ``model`` and ``args`` are vLLM's: ``args`` has any of its engine arguments by vLLM's own name
    (``{"max_model_len": 4096, "speculative_config": {...}}``), as plain data, and is handed on as it is; what vLLM
    thinks of it comes back as an :class:`~anyengine.EngineStartupError`. ``python`` is an interpreter that can import
    vllm; by default the present one. ``env`` is added to the engine's environment. ``model_dir`` names the local
    directory with the tokenizer, where it is another one than vLLM uses.
    """

    args: Mapping[str, Any] = {}
    python: str = sys.executable or "python3"
    env: Mapping[str, str] = {}
    model_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "python"):
            value: object = getattr(self, name)  # msgspec does not check what a constructor is given
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name}={value!r} must be a non-empty str")
        args: object = self.args
        if not isinstance(args, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in args):
            raise ValueError(
                f"args={args!r} must be a mapping of vLLM's argument names to values: "
                '{"max_model_len": 4096} for --max-model-len 4096'
            )
        if "model" in args:
            raise ValueError(f"args['model']={args['model']!r} is given twice: it is the first parameter")
        for name, value in args.items():
            try:
                msgspec.json.encode(value)
            except (TypeError, ValueError, RecursionError) as exc:
                raise ValueError(f"args[{name!r}]={value!r} must be plain data, which JSON can carry: {exc}") from exc
        env: object = self.env
        if not isinstance(env, Mapping) or not all(isinstance(text, str) for item in env.items() for text in item):
            raise ValueError(f"the names and values of env must be str; the names are {sorted(map(str, self.env))}")


EngineSettings: TypeAlias = EmbeddedEngine | CommandEngine | VLLMEngine
"""Every kind of engine core that a client can start."""


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process reads from its standard input: one line of JSON. The pipe then stays open; its end means
    that the host is gone."""

    handshake_address: str
    rank: int = 0
    engine: EmbeddedEngine | None = None
