"""The switches of a scripted engine: frozen structs that JSON can carry.

Owns what can be asked for, and its checks. Counts begin at 1; times are in seconds.
"""

from __future__ import annotations

import signal as signal_module
from typing import Any, Literal, TypeAlias

import msgspec

__all__ = ["End", "Fault", "FaultKind", "FinishName", "RequestRule", "Script", "StartupStage", "UtilityRule"]

StageName: TypeAlias = Literal["importing", "configuring", "hello", "loading", "register", "ready"]
"""The stages of a start, in order: ``loading`` follows the client's INIT; the others begin with what they are called
after. ``hello``, ``register`` and ``ready`` are the messages."""

FinishName: TypeAlias = Literal["stop", "length", "abort", "error", "repetition"]

FaultKind: TypeAlias = Literal[
    "kill", "exit", "hang", "deaf", "mute", "sleep", "dead", "dead_exit", "close_input", "close_output",
    "garbage", "truncate", "mistype", "empty", "huge", "drop", "duplicate",
]  # fmt: skip


class End(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the engine ends by itself: with an exit code, or by a signal ("SIGKILL", "SIGSEGV").

    ``log`` goes to standard error before that. ``error`` ("RuntimeError: no such weights") is reported as the exception
    that ended it.
    """

    exit_code: int = 1
    signal: str | None = None
    error: str | None = None
    log: str = ""

    def __post_init__(self) -> None:
        _check_signal(self.signal)


class StartupStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One stage of the start: reported, then ``delay_s`` passes, then it ends or hangs there or goes on."""

    name: StageName
    delay_s: float = 0.0
    log: str = ""
    end: End | None = None
    hang: bool = False


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What happens at one message: the ``nth`` that comes ``in`` or goes ``out``; of one ``kind``, if that is given.

    In: 1 is INIT, then whatever comes over the input socket ("add", "abort", "utility", or the method of a call). Out:
    1 is HELLO, 2 the registration, 3 READY, then the outputs ("outputs", "reply"). ``when`` matters to all but the last
    row:

    - ``kill`` (``signal``), ``exit`` (``exit_code``): the end, in the middle of everything.
    - ``hang``: the process lives, and neither reads nor writes any more. ``sleep``: for ``seconds``, in one step.
    - ``deaf``: it reads no more, and goes on writing. ``mute``: it writes no more, and goes on reading.
    - ``close_input``, ``close_output``: the connection ends, and nothing else does.
    - ``dead``: sends ENGINE_CORE_DEAD, then hangs. ``dead_exit``: then exits with ``exit_code``.
    - of an outgoing message: ``garbage``, ``truncate``, ``mistype``, ``empty`` spoil it; ``drop`` and ``duplicate`` it;
      ``huge``: one of ``size_bytes`` goes before it.
    """

    do: FaultKind
    direction: Literal["in", "out"] = "out"
    nth: int = 1
    kind: str | None = None
    when: Literal["before", "after"] = "before"
    seconds: float = 0.0
    exit_code: int = 1
    signal: str = "SIGKILL"
    size_bytes: int = 1 << 24

    def __post_init__(self) -> None:
        _check_signal(self.signal)
        if self.nth < 1:
            raise ValueError(f"nth={self.nth} must be at least 1")
        if self.direction == "in" and self.do in SPOILS:
            raise ValueError(f"do={self.do!r} is done to messages that go out, not in")


SPOILS = frozenset({"garbage", "truncate", "mistype", "empty", "huge", "drop", "duplicate"})


class RequestRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How requests are answered that it fits: the ``nth`` of all, or those whose prompt begins with ``first_token``;
    without either, all. The first rule that fits holds.

    ``tokens`` replaces what would be generated (any integers; then the request ends). ``after_tokens`` ends it after
    so many, with ``finish``; ``error`` is the detail of releases from 0.33. ``silent``: it is never answered.
    """

    nth: int | None = None
    first_token: int | None = None
    tokens: tuple[int, ...] | None = None
    after_tokens: int | None = None
    finish: FinishName = "stop"
    error: dict[str, Any] | None = None
    silent: bool = False
    output: dict[int, Any] = {}
    """Positions of each of its outputs that differ from the usual ones; ``last`` those of its last one alone."""
    last: dict[int, Any] = {}


class UtilityRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How calls of ``method`` ("*": every one) are answered: all, or the ``nth``. The first rule that fits holds.

    ``never``; ``reply`` with ``value``; ``fail`` with ``message``; ``unencodable``: with what only a pickle can carry;
    ``unreadable``: with what is no reply; ``twice``: as usual, twice; ``usual``: as usual. ``delay_s`` later, while
    other things go on.
    """

    method: str
    nth: int | None = None
    do: Literal["never", "reply", "fail", "unencodable", "unreadable", "twice", "usual"] = "usual"
    delay_s: float = 0.0
    value: Any = None
    message: str = "as the script says"


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that a scripted engine can be told. The default is an engine that behaves."""

    # ------------------------------------------------------------------------------------------ start and identity
    startup: tuple[StartupStage, ...] = ()
    version: str = "0.33.0"
    """The release of vLLM that it speaks as."""
    registration: dict[str, Any] = {}
    """Fields of the registration that differ from the usual ones; ``{"max_model_len": 128}``."""
    tasks: tuple[str, ...] = ("generate",)

    # -------------------------------------------------------------------------------------------------- generation
    tokens_per_frame: int = 1
    """How many tokens of a request go into one output."""
    merge_requests: bool = True
    """Whether the outputs of one step share one message."""
    step_interval_s: float = 0.0
    """Time for each step, and so for each output of a request (TPOT). 0: as fast as it can."""
    step_s_per_request: float = 0.0
    """Added for each request that runs."""
    first_token_delay_s: float = 0.0
    """From the arrival of a request to its first output (TTFT), the queue apart."""
    prefill_s_per_token: float = 0.0
    """Added to that for each token of the prompt."""
    jitter: float = 0.0
    """Each of these times varies by this share of it, 0 to 1, as ``seed`` decides."""
    seed: int = 0
    vocab_size: int = 1000
    max_running: int = 1 << 30
    """Slots: further requests wait in the queue. The log tells when each is scheduled."""
    reports_load: bool = False
    """Whether each output message tells how many requests run and wait, as the step leaves them."""
    stray_outputs: int = 0
    """Outputs for ids that nobody has asked for, in each step."""
    requests: tuple[RequestRule, ...] = ()

    # ------------------------------------------------------------------------------------------- aborts and calls
    aborts: Literal["obey", "ignore"] = "obey"
    abort_delay_s: float = 0.0
    abort_answers: int = 0
    """Final outputs for each request that is aborted (vLLM's engine sends none)."""
    outputs_after_abort: int = 0
    """Outputs with a token that still follow for each."""
    utilities: tuple[UtilityRule, ...] = ()

    # ------------------------------------------------------------------------------------------------------ traffic
    faults: tuple[Fault, ...] = ()
    read_interval_s: float = 0.0
    """Time between two messages that it reads."""
    log_outputs: bool = False
    """Whether the log also has what it sends."""

    # ------------------------------------------------------------------------------------------------------ process
    ignore_sigterm: bool = False
    shutdown_delay_s: float = 0.0
    """From SIGTERM to the last outputs."""
    outlive_host: bool = False
    """Take no notice of the end of standard input."""
    grandchildren: int = 0
    """Processes that it starts, which ignore SIGTERM. Not in memory."""
    lock_file: str | None = None
    """Locked from before ``hello`` to its end, as a GPU is taken; if somebody else has it, the start fails."""
    shared_memory: str | None = None
    """The name of a segment that it makes before ``hello`` and removes when it ends in order; it must not exist."""
    shared_memory_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        for name in ("tokens_per_frame", "max_running", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter={self.jitter} must be from 0 to 1")


def _check_signal(name: str | None) -> None:
    if name is not None and name not in signal_module.Signals.__members__:
        raise ValueError(f"signal={name!r} must be the name of one, such as 'SIGKILL'")
