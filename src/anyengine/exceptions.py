"""Every error that anyengine raises on purpose.

Owns the public error taxonomy and nothing else: it imports only the standard library, so that every layer can raise
from it. Errors carry their facts as attributes (never only in the text), survive pickling, and can be handed to many
waiters: each waiter gets a fresh instance whose ``__cause__`` is the first failure (:meth:`EngineError.for_waiter`).
"""

from __future__ import annotations

import copy
import re
from typing import Any, Final, Self

__all__ = [
    "ClientClosedError",
    "ClientFailedError",
    "DecodeError",
    "DrainTimeout",
    "EncodeError",
    "EngineAsleepError",
    "EngineDeadError",
    "EngineError",
    "EngineStartupError",
    "EngineUnresponsiveError",
    "LocalProtocolError",
    "OutputProcessingError",
    "OverloadedError",
    "ProtocolError",
    "QuotaExceededError",
    "RemoteProtocolError",
    "RequestError",
    "RequestFailed",
    "RequestRejected",
    "RequestTimeout",
    "StartupTimeout",
    "UtilityError",
    "UtilityRejected",
    "UtilityTimeout",
    "WrongLoopError",
]


_SHOWN_LINES: Final = 8
"""Of an engine's last words in the text of an error: it is logged once for each request that was in flight."""
_STATUS_OF_CODES: Final = {"validation_error": 400}
"""Of an engine's own codes, what its being retryable does not tell already."""
_RAISED: Final = re.compile(r"(?:^|[\]:] )((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): \S.*")
"""A line in which a traceback ends, behind whatever a logger puts before it."""


def _with_remedy(message: str, remedy: str | None) -> str:
    """Logs and tracebacks show the text of an error alone: it ends with what to do."""
    return message if remedy is None or remedy in message else f"{message}: {remedy}"


class EngineError(Exception):
    """Base class of every error of this package.

    Each says the same things of itself: ``code`` is a stable name for programs, ``status`` the HTTP status that stands
    for it, ``retryable`` whether the same request may succeed if it is made once more. ``rank`` and ``request_id`` say
    where, and are ``None`` where that is not known. ``outcomes`` is set by a call on several ranks: the result of each,
    or its error. ``prompt_index`` is set by a call with many prompts: whose error it is.
    """

    code: str = "engine_error"
    status: int = 500
    retryable: bool = False
    rank: int | None = None
    request_id: str | None = None
    outcomes: dict[int, Any] | None = None
    prompt_index: int | None = None

    def for_waiter(self) -> Self:
        """A fresh instance with the same facts, for one more waiter; its ``__cause__`` is this error.

        Raising one instance in several tasks would grow one shared traceback; a copy each keeps them apart.
        """
        twin = copy.copy(self)
        twin.__cause__ = self
        return twin


class _ProcessError(EngineError):
    """An engine process (or the link to it) is at fault; says which one and how it ended."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        pid: int | None = None,
        exit_code: int | None = None,
        signal: str | None = None,
        stderr_tail: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.exit_code = exit_code
        self.signal = signal
        self.stderr_tail = stderr_tail

    def __str__(self) -> str:
        text = super().__str__()
        if not self.stderr_tail:
            return text
        earlier: list[str] = []
        heading = "last lines of the engine's stderr"
        shown = self.stderr_tail[-_SHOWN_LINES:]
        if hidden := len(self.stderr_tail) - len(shown):
            heading += f" ({hidden} more in stderr_tail)"
            # Of several failures, the first caused the others: a worker's, then that of the engine which waited for it.
            cause = next((line for line in self.stderr_tail[:hidden] if _RAISED.search(line)), None)
            earlier = [] if cause is None else ["  first exception there:", f"    {cause}"]
        return "\n".join([text, *earlier, f"  {heading}:", *(f"    {line}" for line in shown)])


class EngineStartupError(_ProcessError):
    """An engine did not become ready.

    Attributes: ``rank``, ``pid``, ``exit_code``, ``signal`` (name, such as ``"SIGKILL"``), ``stderr_tail``, ``stage``
    (the last start-up stage reached) and ``child_exception`` (type and text of the exception that ended the child).
    """

    code = "startup_failed"
    status = 503

    def __init__(
        self, message: str, *, stage: str | None = None, child_exception: str | None = None, **process: Any
    ) -> None:
        super().__init__(message, **process)
        self.stage = stage
        self.child_exception = child_exception

    def __str__(self) -> str:
        # The child's own exception says it all, and the tail, which is there too, would only repeat it; unless it is
        # vLLM's, when a worker process failed: "... See root cause above."
        told = self.child_exception is not None and "root cause" not in self.child_exception
        return Exception.__str__(self) if told else super().__str__()


class StartupTimeout(EngineStartupError, TimeoutError):
    """Start-up exceeded its deadline. ``stage_seconds`` maps each stage reached to the seconds spent in it, of the rank
    that the error names; ``stage_seconds_by_rank`` of all."""

    code = "startup_timeout"
    status = 504

    def __init__(self, message: str, *, stage_seconds: dict[str, float] | None = None, **startup: Any) -> None:
        super().__init__(message, **startup)
        self.stage_seconds: dict[str, float] = stage_seconds or {}
        self.stage_seconds_by_rank: dict[int, dict[str, float]] = {}


class EngineDeadError(_ProcessError):
    """An engine that was ready has died, or the link to it is gone.

    Given to a request, it has the request's ``request_id`` and, in ``partial``, the output so far. ``history`` has the
    earlier failures of an engine that was started again until its :class:`~anyengine.RestartPolicy` gave it up.
    """

    code = "engine_dead"
    status = 503
    retryable = True
    partial: Any = None
    history: tuple[EngineError, ...] = ()


class EngineUnresponsiveError(EngineDeadError):
    """The engine process lives, but its main loop does not answer. ``silent_s``: seconds since its last sign of
    life."""

    code = "engine_unresponsive"
    silent_s: float | None = None


class ClientFailedError(EngineDeadError):
    """One of the client's own tasks failed: a bug in anyengine. ``__cause__`` has it."""

    code = "client_failed"
    status = 500
    retryable = False


class ClientClosedError(EngineDeadError):
    """The client was closed or cancelled; no engine is at fault."""

    code = "client_closed"
    retryable = False


class RequestError(EngineError):
    """One request's trouble. ``request_id`` is the caller's label, or ``None`` before one was given. ``partial`` holds
    whatever output had been produced when the error was raised (an output object, or ``None``).
    """

    code = "request_error"

    def __init__(self, message: str, *, request_id: str | None = None, partial: Any = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.partial = partial


class RequestRejected(RequestError, ValueError):
    """Bad input, refused before anything was sent. ``parameter``, ``value`` and ``remedy`` say what to change."""

    code = "request_rejected"
    status = 400

    def __init__(
        self,
        message: str,
        *,
        parameter: str | None = None,
        value: Any = None,
        remedy: str | None = None,
        **request: Any,
    ) -> None:
        super().__init__(_with_remedy(message, remedy), **request)
        self.parameter = parameter
        self.value = value
        self.remedy = remedy


class RequestFailed(RequestError):
    """The engine ended the request with an error. ``code`` and ``retryable`` are the engine's, when it gave them, and
    ``status`` follows from these. ``missing_hashes``: the multi-modal items that were not in the engine's cache."""

    code: str = "request_failed"
    status: int = 500
    missing_hashes: tuple[str, ...] = ()

    def __init__(self, message: str, *, code: str | None = None, retryable: bool = False, **request: Any) -> None:
        super().__init__(message, **request)
        self.code = code or type(self).code
        self.retryable = retryable
        self.status = _STATUS_OF_CODES.get(self.code, 503 if retryable else 500)


class RequestTimeout(RequestError, TimeoutError):
    """A per-request deadline passed; ``partial`` has the tokens so far, ``limit`` the name of the argument."""

    code = "request_timeout"
    status = 504

    def __init__(self, message: str, *, limit: str | None = None, **request: Any) -> None:
        super().__init__(message, **request)
        self.limit = limit


class OutputProcessingError(RequestError):
    """Our own processing of one request's output failed; ``__cause__`` has it. Other requests go on."""

    code = "output_processing_failed"


class EngineAsleepError(RequestError):
    """The engine is paused or asleep and takes no requests."""

    code = "engine_asleep"
    status = 503
    retryable = True


class OverloadedError(RequestError):
    """An admission limit is reached: ``reason`` is ``"requests"``, ``"tokens"`` (of prompts that wait),
    ``"bytes"`` (that the engine has not read) or ``"restarting"`` (every engine is). ``retry_after_s`` is a hint in
    seconds, or ``None``."""

    code = "overloaded"
    status = 429
    retryable = True

    def __init__(
        self, message: str, *, reason: str | None = None, retry_after_s: float | None = None, **request: Any
    ) -> None:
        super().__init__(message, **request)
        self.reason = reason
        self.retry_after_s = retry_after_s


class QuotaExceededError(OverloadedError):
    """A limiter has refused the request before it was sent: ``tenant`` (``None``: none was named) has used too many
    tokens. ``retry_after_s``: when it has enough again, if it asks for nothing else; ``None``: time does not help."""

    code = "quota_exceeded"

    def __init__(self, message: str, *, tenant: str | None = None, **overload: Any) -> None:
        super().__init__(message, **{"reason": "quota", **overload})
        self.tenant = tenant


class UtilityError(EngineError):
    """A utility call failed in the engine. Attributes: ``method``, ``call_id``, ``rank``."""

    code = "utility_failed"

    def __init__(
        self, message: str, *, method: str | None = None, call_id: int | None = None, rank: int | None = None
    ) -> None:
        super().__init__(message)
        self.method = method
        self.call_id = call_id
        self.rank = rank


class UtilityRejected(UtilityError, ValueError):
    """A call that would hurt the engine, or that it does not have: refused before anything was sent. ``parameter``,
    ``value`` and ``remedy`` say what to change."""

    code = "utility_rejected"
    status = 400

    def __init__(
        self,
        message: str,
        *,
        parameter: str | None = None,
        value: Any = None,
        remedy: str | None = None,
        **utility: Any,
    ) -> None:
        super().__init__(_with_remedy(message, remedy), **utility)
        self.parameter = parameter
        self.value = value
        self.remedy = remedy


class UtilityTimeout(UtilityError, TimeoutError):
    """A utility call was not answered within its time limit."""

    code = "utility_timeout"
    status = 504


class EncodeError(UtilityError):
    """A value cannot be put on the wire; nothing was sent. ``field`` is its path, ``type_name`` its type."""

    code = "encode_failed"
    status = 400

    def __init__(self, message: str, *, field: str | None = None, type_name: str | None = None, **utility: Any) -> None:
        super().__init__(message, **utility)
        self.field = field
        self.type_name = type_name


class DrainTimeout(EngineError, TimeoutError):
    """Some ranks did not confirm in time: ``ranks``."""

    code = "drain_timeout"
    status = 504

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class WrongLoopError(EngineError, RuntimeError):
    """A client was used from another event loop, thread or backend than the one that entered it."""

    code = "wrong_loop"


class ProtocolError(EngineError):
    """The wire protocol was violated."""

    code = "protocol_error"


class LocalProtocolError(ProtocolError):
    """By us: a command that is not allowed in the present state. Nothing was sent."""

    code = "local_protocol_error"


class RemoteProtocolError(ProtocolError):
    """By the peer: a message that must not arrive in the present state."""

    code = "remote_protocol_error"
    status = 502


class DecodeError(RemoteProtocolError):
    """By the peer: bytes that cannot be decoded.

    ``message_type`` says what they should have been, ``path`` where in it the trouble is (``"$[1][0]"``: position 0 of
    position 1), ``size_bytes`` how long the payload was; each is ``None`` where it does not apply.
    """

    code = "decode_failed"

    def __init__(
        self, message: str, *, message_type: str | None = None, path: str | None = None, size_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.message_type = message_type
        self.path = path
        self.size_bytes = size_bytes
