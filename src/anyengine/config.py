"""Frozen settings: what a user may choose about an engine and a client, and what a child process is told.

Owns no behaviour beyond checking its own values. The launch record is what crosses the child's standard input as one
line of JSON; nothing is ever pickled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import msgspec

from anyengine._setting_rules import (
    MAX_RANK,
    check_address,
    check_count,
    check_plugin_names,
    check_rank_count,
    check_text,
    check_vllm_args,
)

if TYPE_CHECKING:
    from anyengine.vllm.arguments import UnderstoodArguments

__all__ = [
    "DEFAULT_MODEL",
    "AttachedEngine",
    "CommandEngine",
    "EmbeddedEngine",
    "EngineLaunch",
    "EngineSettings",
    "InMemoryEngine",
    "InheritedEngine",
    "LaunchedEngine",
    "RemoteEngine",
    "RunningEngine",
    "VLLMEngine",
    "engine_ranks",
]

DEFAULT_MODEL = "smollm2-135m"

DType = Literal["auto", "float32", "bfloat16", "float16", "float", "half"]
"""Weights and activations. ``"auto"``: float32 on CPU, the checkpoint's own dtype on CUDA. ``"float"`` and ``"half"``
are vLLM's other names for float32 and float16."""


class _EmbeddedModel(msgspec.Struct, frozen=True):
    model: str = DEFAULT_MODEL


class EmbeddedEngine(_EmbeddedModel, frozen=True, kw_only=True):
    """Our own engine core, made of torch and transformers, in a process of its own (or a thread: ``in_process``).

    ``model`` is an alias (``"smollm2-135m"``), a local directory, a GGUF file or a Hub id. ``max_model_len`` is in
    tokens (prompt and output together; ``None``: what the model says, at most 8192). ``max_num_seqs`` bounds the
    running batch; further requests wait in the engine. ``max_num_batched_tokens`` bounds the tokens, of prompts and
    answers together, computed in one step. ``kv_cache_memory_bytes`` is what keys and values may take (``None``: what
    the largest batch could need, at most a quarter of the free memory of a CPU, or most of a GPU's);
    ``enforce_eager``: compute with torch's operations alone, one by one: no kernels are compiled for the processor, no
    CUDA graphs are recorded.
    ``enable_prefix_caching`` lets requests use again what others have computed of the same beginning. ``max_loras``
    LoRA adapters (PEFT's format) are kept loaded at most; 0: requests with an adapter are refused. ``max_logprobs``
    is how many log-probabilities a request may ask for at each position; -1: the whole vocabulary. ``profile_dir`` is
    where ``start_profile`` has its traces written; ``None``: there is no profiler. ``logits_processors`` names code to
    load, which changes the logits of requests that ask for it (``SamplingParams(extra_args=...)``), in this order:
    entry points of the group ``anyengine.logits_processors``, or ``"module:attribute"``.
    """

    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    max_loras: int = 0
    max_logprobs: int = 20
    profile_dir: str | None = None
    logits_processors: Sequence[str] = ()
    seed: int = 0
    num_threads: int | None = None
    runner: str = "transformers"
    """``"transformers"``, or ``"module:factory"`` of another model runner (tests use a torch-free toy)."""
    runner_options: dict[str, str | int | float | bool] = {}
    """Passed to the factory of a custom ``runner``."""
    in_process: bool = False
    """Whether the engine core runs in a thread of this process, for tests and notebooks: no interpreter to start, no
    isolation. A thread cannot be killed: leaving the client waits until the present step, or the loading of the model,
    is done."""

    def __post_init__(self) -> None:
        for name, remedy in _TEXTS.items():
            check_text(name, getattr(self, name), remedy)
        for name, (low, none) in _COUNTS.items():
            check_count(name, getattr(self, name), low, none)
        for name in ("enable_prefix_caching", "enforce_eager", "in_process"):
            if type(value := getattr(self, name)) is not bool:
                raise ValueError(f"{name}={value!r} must be True or False")
        if self.profile_dir is not None:
            check_text("profile_dir", self.profile_dir, "a directory, or None for no profiler")
        if self.dtype not in get_args(DType):
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(map(repr, get_args(DType)))}")
        msgspec.structs.force_setattr(self, "dtype", _DTYPE_ALIASES.get(self.dtype, self.dtype))
        module, _, factory = self.runner.partition(":")
        if self.runner != "transformers" and not (module and factory):
            raise ValueError(f"runner={self.runner!r} must be 'transformers', or 'module:factory' of a model runner")
        check_plugin_names("logits_processors", self.logits_processors)
        msgspec.structs.force_setattr(self, "logits_processors", tuple(self.logits_processors))
        if self.logits_processors and self.runner != "transformers":
            raise ValueError(f"logits_processors has no meaning for runner={self.runner!r}, which samples by itself")
        options: object = self.runner_options
        if not isinstance(options, dict) or not all(isinstance(one, str | int | float) for one in options.values()):
            raise ValueError(f"runner_options={options!r} must be a dict of names to str, int, float or bool")


_DTYPE_ALIASES: Final[dict[str, DType]] = {"float": "float32", "half": "float16"}
_TEXTS: Final = {
    "model": "an alias, a local directory, a GGUF file or a Hub id",
    "device": "'auto', 'cpu', 'cuda' or 'cuda:1'",
    "runner": "'transformers', or 'module:factory' of a model runner",
}
_COUNTS: Final[dict[str, tuple[int | None, str]]] = {
    "max_num_seqs": (1, ""),
    "max_num_batched_tokens": (1, ""),
    "max_loras": (0, ""),
    "max_logprobs": (-1, ""),
    "max_model_len": (2, "for what the model says"),
    "kv_cache_memory_bytes": (1, "to size it by the free memory"),
    "num_threads": (1, "for torch's own choice"),
    "seed": (None, ""),
}
"""The least value of each, and what ``None`` stands for, if it may be that."""


class _Described(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that knows its arguments from somebody else: ``args`` repeats them, as far as a user can tell."""

    args: Mapping[str, Any] = {}

    @property
    def understood(self) -> UnderstoodArguments | None:
        """What the client understands of ``args``; ``None``: nothing is said."""
        if not self.args:
            return None
        from anyengine.vllm.arguments import understand_arguments  # not loaded for other engines

        return understand_arguments(self.args)

    def _check_args(self) -> None:
        """Refuse what cannot be right.

        Raises:
            ValueError: it is no mapping of names, or an argument that is understood has an impossible value.
        """
        args: object = self.args  # msgspec does not check what a constructor is given
        if not isinstance(args, Mapping) or not all(isinstance(name, str) for name in args):
            raise ValueError(
                f'args must be a mapping of vLLM\'s argument names to values ({{"max_logprobs": 50}}), not a '
                f"{type(args).__name__}"
            )
        _ = self.understood


class CommandEngine(_Described, frozen=True, kw_only=True):
    """An engine core that another program provides: ``argv`` starts it, and it speaks the wire.

    It reads an :class:`EngineLaunch` line from its standard input as the embedded engine does, and may write status
    lines to its standard output. ``model_dir`` names the local directory with the tokenizer, when text prompts are
    wanted. ``args`` says what an engine does not tell of itself, by vLLM's names (``{"max_logprobs": 50,
    "enable_prompt_embeds": True}``): vLLM's defaults are assumed otherwise. Nothing is handed to the program.
    """

    argv: tuple[str, ...]
    model_dir: str | None = None

    def __post_init__(self) -> None:
        self._check_args()
        argv: object = self.argv  # msgspec does not check what a constructor is given
        if not isinstance(argv, tuple | list) or not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError(f"argv={self.argv!r} must be a tuple of the program and its arguments, each a str")


class _VLLMModel(msgspec.Struct, frozen=True):
    model: str


class VLLMEngine(_VLLMModel, frozen=True, kw_only=True):
    """An unmodified vLLM engine core, in a process of its own, run by the interpreter of an environment with vLLM.

    ``model`` and ``args`` are vLLM's: ``args`` has any of its engine arguments, either by vLLM's own name
    (``{"max_model_len": 4096, "speculative_config": {...}}``), as plain data, or as the strings of its command line
    (``["--max-model-len", "4096", "--enforce-eager"]``), and is handed on as it is; what vLLM thinks of it comes back
    as an :class:`~anyengine.EngineStartupError`. With ``data_parallel_size=n`` it stands for n engine cores, the ranks
    of one client. ``python`` is an interpreter that can import vllm; by default the present one. ``env`` is added to
    the engine's environment. ``model_dir`` names the local directory with the tokenizer, where it is another one than
    vLLM uses.
    """

    args: Mapping[str, Any] | Sequence[str] = {}
    python: str = sys.executable or "python3"
    env: Mapping[str, str] = {}
    model_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "python"):
            value: object = getattr(self, name)  # msgspec does not check what a constructor is given
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name}={value!r} must be a non-empty str")
        check_vllm_args(self.args)
        from anyengine.vllm.topology import check_launchable  # not loaded for other engines

        check_launchable(self.understood)
        env: object = self.env
        if not isinstance(env, Mapping) or not all(isinstance(text, str) for item in env.items() for text in item):
            raise ValueError(f"the names and values of env must be str; the names are {sorted(map(str, self.env))}")

    def __repr__(self) -> str:
        # Settings end up in logs and in error texts; what is in an environment may be a secret.
        env = dict.fromkeys(self.env, "...")
        return (
            f"VLLMEngine({self.model!r}, args={self.args!r}, python={self.python!r}, env={env}, "
            f"model_dir={self.model_dir!r})"
        )

    @property
    def understood(self) -> UnderstoodArguments:
        """What the client understands of ``model`` and ``args``."""
        from anyengine.vllm.arguments import understand_arguments

        return msgspec.structs.replace(understand_arguments(self.args), model=self.model)


class RemoteEngine(_Described, frozen=True, kw_only=True):
    """Engine cores that someone else starts and stops, ``vllm serve --headless`` for one; the client waits for them.

    The client listens at ``handshake`` (``"tcp://10.0.0.5:29550"``, or an ``ipc://`` path) for ``ranks`` engine cores,
    whose ranks are 0 to ``ranks - 1``. Their requests and outputs go over two more sockets, ``inputs`` and ``outputs``:
    by default on free ports of the same interface, or in a private directory beside an ``ipc://`` handshake; fixed
    addresses let a later client find the engines again (:class:`RunningEngine`). A port may be ``*``: the system
    chooses, and ``on_progress`` is told (stage ``listening``). Where an address listens on every interface
    (``tcp://0.0.0.0:29550``), ``advertise_host`` is the name or address of this host for the engines; by default the
    environment's ``VLLM_HOST_IP``. ``model_dir`` names the local directory with the tokenizer, when text prompts are
    wanted. ``args`` says what the engines were started with, as far as they do not tell it themselves: see
    :class:`CommandEngine`.

    Nothing on these sockets is encrypted or authenticated: listen on networks that you trust.
    """

    handshake: str
    ranks: int = 1
    inputs: str | None = None
    outputs: str | None = None
    advertise_host: str | None = None
    model_dir: str | None = None

    def __post_init__(self) -> None:
        self._check_args()
        check_address("handshake", self.handshake)
        check_rank_count("ranks", self.ranks)
        for name in ("inputs", "outputs"):
            if getattr(self, name) is not None:
                check_address(name, getattr(self, name))
        if (everywhere := self._listens_everywhere()) and self.advertised_host is None:
            raise ValueError(
                f"{everywhere}={getattr(self, everywhere)!r} listens on every interface, and does not say where "
                "engines find this host: give advertise_host, or set VLLM_HOST_IP"
            )

    @property
    def advertised_host(self) -> str | None:
        """What replaces the host in the addresses that engines are told, if anything does."""
        if self.advertise_host is None and self._listens_everywhere():
            return os.environ.get("VLLM_HOST_IP") or None
        return self.advertise_host

    def _listens_everywhere(self) -> str | None:
        """The name of the first address that does."""
        everywhere = ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:")
        names = ("handshake", "inputs", "outputs")
        return next((name for name in names if (getattr(self, name) or "").startswith(everywhere)), None)


class RunningEngine(_Described, frozen=True, kw_only=True):
    """Engine cores that run already, for a client that is gone: taken over without a handshake.

    ``inputs`` and ``outputs`` are the addresses that the engines were told (the former client's ``RemoteEngine`` fixed
    them): the engines connect again by themselves. ``registrations`` is what each rank said of itself when it became
    ready, ``None`` where its release says nothing. The former client knows all of it: ``client.core.running_engine``,
    to be kept as ``msgspec.json.encode(...)`` and read by ``msgspec.json.decode(..., type=RunningEngine)``. ``args`` as
    in :class:`RemoteEngine`.

    What the engines had buffered for the former client is dropped; requests of its that still run go on until they
    end, or until ``pause_generation(mode="abort")``.
    """

    inputs: str
    outputs: str
    registrations: Mapping[int, Mapping[str, Any] | None]
    model_dir: str | None = None

    def __post_init__(self) -> None:
        self._check_args()
        check_address("inputs", self.inputs)
        check_address("outputs", self.outputs)
        registrations: object = self.registrations
        if not isinstance(registrations, Mapping) or not registrations:
            raise ValueError(f"registrations={registrations!r} must map each rank to what it said of itself")
        for rank, registration in registrations.items():
            if type(rank) is not int or not 0 <= rank <= MAX_RANK:
                raise ValueError(f"registrations: rank {rank!r} must be an int from 0 to {MAX_RANK}")
            described = isinstance(registration, Mapping) and "max_model_len" in registration
            if registration is not None and not described:
                raise ValueError(
                    f"registrations[{rank}]={registration!r} must be a mapping with max_model_len, or None"
                )


class InheritedEngine(_Described, frozen=True, kw_only=True):
    """Engine cores whose parent gives this process two listening sockets and answers the handshake itself, as
    ``vllm serve`` does for an external front end.

    ``input_fd`` and ``output_fd`` are descriptors of bound, listening sockets (tcp or unix); they become the client's,
    which closes them: this is good for one block. Ranks are ``start_rank`` to ``start_rank + ranks - 1``. ``args`` as
    in :class:`RemoteEngine`.
    """

    input_fd: int
    output_fd: int
    ranks: int = 1
    start_rank: int = 0
    model_dir: str | None = None

    def __post_init__(self) -> None:
        self._check_args()
        check_rank_count("ranks", self.ranks)
        for name in ("input_fd", "output_fd", "start_rank"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}={value!r} must be an int of at least 0")


class InMemoryEngine(_Described, frozen=True, kw_only=True):
    """An engine core that runs as a task of the client, in the same event loop: no process, no ZeroMQ.

    ``serve`` is called with a :class:`~anyengine._transport.memory.MemoryLink`, its rank and a
    :class:`~anyengine._process.task_child.TaskHost`. ``model_dir`` and ``args`` as in :class:`CommandEngine`.
    """

    serve: Callable[[Any, int, Any], Awaitable[None]]
    model_dir: str | None = None

    def __post_init__(self) -> None:
        self._check_args()
        serve: object = self.serve
        if not callable(serve):
            raise ValueError(f"serve={serve!r} must be an async function of (link, rank, host)")


LaunchedEngine: TypeAlias = EmbeddedEngine | CommandEngine | VLLMEngine
"""Every kind of engine core that a client can start."""

AttachedEngine: TypeAlias = RemoteEngine | RunningEngine | InheritedEngine
"""Every kind of engine core that someone else starts, and a client joins."""

EngineSettings: TypeAlias = LaunchedEngine | AttachedEngine | InMemoryEngine
"""Every kind of engine core behind a client."""


def engine_ranks(engines: Sequence[EngineSettings]) -> tuple[int, ...]:
    """The ranks that ``engines`` stand for: one each for those that are started, in order; or those of the one that is
    joined."""
    first = engines[0]
    if isinstance(first, RunningEngine):
        return tuple(sorted(first.registrations))
    if isinstance(first, InheritedEngine):
        return tuple(range(first.start_rank, first.start_rank + first.ranks))
    return tuple(range(first.ranks if isinstance(first, RemoteEngine) else len(engines)))


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process reads from its standard input: one line of JSON. The pipe then stays open; its end means
    that the host is gone."""

    handshake_address: str
    rank: int = 0
    engine: EmbeddedEngine | None = None
