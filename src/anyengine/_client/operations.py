"""Operations on the engine as a whole: pause, sleep, caches, adapters, weights; each a typed utility call.

Owns names, arguments and results of the calls, and which of them the engine's release has. Knows nothing of how a call
travels. Names and argument order are those of vLLM's ``AsyncLLM``, without ``_async``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Literal, NoReturn, Protocol, TypeAlias, TypeVar

import anyio
import msgspec

from anyengine._rules import a_type
from anyengine._wire import lora_to_wire
from anyengine.exceptions import EngineError, UtilityError, UtilityRejected, UtilityTimeout
from anyengine.params import LoRARequest

__all__ = ["EngineOperations", "PauseMode", "refuse", "refuse_unless"]

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What becomes of running requests: ended as aborted, awaited, or kept frozen."""

T = TypeVar("T")

_logger = logging.getLogger("anyengine.client")

_RESUME_LIMIT_S = 30.0

_TAGS: Final = ("weights", "kv_cache", "scheduling")
"""What an engine sleeps by, in all releases."""

_LATER_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "pause_scheduler": ("abort", True),
    "profile": (None, None, None),
    "reset_prefix_cache": (False,),
    "sleep": ("abort",),
}
"""Arguments that not every release takes, with the value that stands for what those releases do anyway."""


class _Caller(Protocol):
    @property
    def ranks(self) -> tuple[int, ...]: ...

    async def utility_on(self, ranks: Iterable[int] | None, method: str, *args: Any) -> dict[int, Any]: ...

    def utility_arity(self, method: str) -> int | None: ...


class EngineOperations:
    """The operations. Each goes to every rank that lives, to all of them before any answer is awaited, and raises:

    * :class:`UtilityError`: an engine refused, failed, or does not have the method in its release; or several were
      asked how things stand, and their answers differ;
    * :class:`EngineDeadError`: an engine died meanwhile (the others have carried it out), or the client is closed;

    and, when cancelled, forgets the call; the engine may still carry it out. A returned call is a fence: everything
    that the engine sent before has reached its consumers.
    """

    @property
    def _caller(self) -> _Caller:
        raise NotImplementedError

    def _close_admission(self, engine_is: str, *, ends_requests: bool) -> bool:
        """No request is sent from now on, since the engine will be what ``engine_is`` says; whether any was until now.
        ``ends_requests``: it will end every request at our bidding, which is a normal end for their consumers."""
        raise NotImplementedError

    def _open_admission(self) -> bool:
        """Requests may be sent again; whether they might not until now."""
        raise NotImplementedError

    # --------------------------------------------------------------------- pauses

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling. Returns when the engine has confirmed that nothing runs (``"keep"``: that nothing moves).

        No request is sent from the call on: later ones fail with :class:`EngineAsleepError`, or wait for
        :meth:`resume_generation`, as the client's ``admission`` says; so do those that are being prepared. After a
        cancelled call the engine may be paused or not: only :meth:`resume_generation` ends the uncertainty.
        """
        if mode not in ("abort", "wait", "keep"):
            refuse("pause_generation", "mode", mode, "is no way to pause", "use 'abort', 'wait' or 'keep'")
        method = "pause_generation" if self._caller.utility_arity("pause_generation") else "pause_scheduler"
        await self._stop_requests("paused", mode, method, mode, clear_cache)

    async def _stop_requests(self, engine_is: str, mode: PauseMode, method: str, *args: Any) -> None:
        """Close admission first, then have the engines stop: nothing is sent behind it."""
        closed = self._close_admission(engine_is, ends_requests=mode == "abort")
        try:
            await self._call(method, *args)
        except UtilityError:
            if closed:  # it did not come to that
                self._open_admission()
            raise

    async def resume_generation(self) -> None:
        """Go on after :meth:`pause_generation`."""
        await self._resume(None)

    async def _resume(self, ranks: Iterable[int] | None) -> None:
        was_closed = self._open_admission()  # what is sent from now on is behind the call
        try:
            await self._call("resume_scheduler", ranks=ranks)
        except UtilityError:
            if was_closed:  # it did not come to that
                self._close_admission("paused", ends_requests=False)
            raise

    async def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return await self._agreed(bool, "is_scheduler_paused")

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "wait", *, clear_cache: bool = False) -> AsyncIterator[None]:
        """Pause for the length of a block, and resume in every case.

        Raises, besides: :class:`UtilityTimeout`: the engine has been told to resume, and has not said that it has. An
        exception of the block, cancellation included, comes first, whatever becomes of the engine.

        Cancellation: the engine is told to resume before it propagates.
        """
        try:
            await self.pause_generation(mode=mode, clear_cache=clear_cache)
            yield
        except BaseException:
            with suppress(EngineError):
                await self._resume_at_last()  # noqa: ASYNC102 - shielded and bounded inside
            raise
        await self._resume_at_last()

    async def _resume_at_last(self) -> None:
        # Shielded: an engine that stays paused hangs everybody. Bounded: a hung engine must not hang us as well.
        with anyio.move_on_after(_RESUME_LIMIT_S, shield=True) as limit:
            await self._resume(self._caller.ranks)  # one that is started again is not paused, and not waited for
        if limit.cancelled_caught:
            raise UtilityTimeout(
                f"the engine was told to resume and has not answered for {_RESUME_LIMIT_S:g} s: it may still do so, "
                "after a long step; resume_generation() waits for it",
                method="resume_scheduler",
            )

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give memory back: level 1 offloads the weights and drops the KV cache, 2 drops both, 0 only pauses. No
        request is sent from the call on, until :meth:`wake_up` has brought everything back."""
        if type(level) is not int or not 0 <= level <= 2:
            refuse("sleep", "level", level, "is no level of sleep", "use 0, 1 or 2")
        await self._stop_requests("asleep", mode, "sleep", level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Take memory back: all of it, or that of ``"weights"``, ``"kv_cache"``, ``"scheduling"``. Whether all of it is
        back, on every rank."""
        _refuse_text("wake_up", "tags", tags, '["weights"]')
        refuse_unless(Iterable, "wake_up", "tags", () if tags is None else tags, f"use some of {_TAGS}")
        named = None if tags is None else list(tags)
        if unknown := [tag for tag in named or () if tag not in _TAGS]:
            refuse("wake_up", "tags", named, f"has {unknown[0]!r}, which nothing sleeps by", f"use some of {_TAGS}")
        answers = await self._call("wake_up", named)
        awake = all(answer is not False for answer in answers.values())
        if tags is not None and None in answers.values():  # a release that does not say how much of it is back
            awake &= not any((await self._call("is_sleeping")).values())
        if awake:
            self._open_admission()
        return awake

    @asynccontextmanager
    async def sleeping(self, level: int = 1, mode: PauseMode = "abort") -> AsyncIterator[None]:
        """:meth:`sleep` for the length of a block, and wake up in every case.

        Raises, besides: :class:`UtilityTimeout`: the engine has been told to wake up, and has not said that it has. An
        exception of the block, cancellation included, comes first, whatever becomes of the engine.

        Cancellation: the engine is told to wake up before it propagates.
        """
        try:
            await self.sleep(level, mode)
            yield
        except BaseException:
            with suppress(EngineError):
                await self._wake_at_last()  # noqa: ASYNC102 - shielded and bounded inside
            raise
        await self._wake_at_last()

    async def _wake_at_last(self) -> None:
        # Shielded: an engine that stays asleep hangs everybody. Bounded: a hung engine must not hang us as well.
        with anyio.move_on_after(_RESUME_LIMIT_S, shield=True) as limit:
            was_closed = self._open_admission()  # what is sent from now on is behind the call, whoever hears its answer
            try:
                await self._call("wake_up", None, ranks=self._caller.ranks)
            except UtilityError:
                if was_closed:
                    self._close_admission("asleep", ends_requests=False)
                raise
        if limit.cancelled_caught:
            raise UtilityTimeout(
                f"the engine was told to wake up and has not answered for {_RESUME_LIMIT_S:g} s: it may still do so; "
                "wake_up() waits for it",
                method="wake_up",
            )

    async def release_kv_cache_memory(self) -> None:
        """Give the memory of the KV cache back, weights aside. Needs a pause that is complete; kept requests are
        computed again after :meth:`wake_up`."""
        await self._call("release_kv_cache_memory")

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps, or is paused."""
        return await self._agreed(bool, "is_sleeping")

    # --------------------------------------------------------------------- caches

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; whether that was possible now."""
        return await self._all_did("reset_prefix_cache", reset_running_requests, reset_connector)

    async def reset_mm_cache(self) -> None:
        """Forget processed multi-modal inputs."""
        await self._call("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        """Forget encoder outputs."""
        await self._call("reset_encoder_cache")

    # ------------------------------------------------------------------- adapters

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; whether it was."""
        refuse_unless(LoRARequest, "add_lora", "lora_request", lora_request, "use LoRARequest(...)")
        return await self._all_did("add_lora", lora_to_wire(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; whether it was there."""
        refuse_unless(int, "remove_lora", "lora_id", lora_id, "use its lora_int_id")
        return await self._all_did("remove_lora", lora_id)

    async def list_loras(self) -> set[int]:
        """The ids of the adapters that every rank has loaded. A rank that lacks one which another has is named in the
        log."""
        loaded = await self._typed(set[int], "list_loras")
        everywhere = set.intersection(*loaded.values())
        for rank, ids in loaded.items():
            if missing := set.union(*loaded.values()) - ids:
                _logger.warning("engine %d lacks adapters that others have loaded: %s", rank, sorted(missing))
        return everywhere

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded; whether it is."""
        refuse_unless(int, "pin_lora", "lora_id", lora_id, "use its lora_int_id")
        return await self._all_did("pin_lora", lora_id)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - an argument of the engine's
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Iterable[int] | None = None,
    ) -> list[Any]:
        """Call a method, by name, on every worker of every rank, or of ``ranks``; their results in the order of ranks
        and workers. ``timeout`` is in seconds.

        A result that the engine cannot encode ends a vLLM engine's output for ever: call only what returns plain data.
        """
        named: object = method
        if not isinstance(named, str):
            problem = "is no name: a callable would have to be pickled, which this client never does"
            refuse("collective_rpc", "method", method, problem, "give the name of a method that the workers have")
        _refuse_text("collective_rpc", "args", args, "[argument]")
        arguments = (method, timeout, list(args), None if kwargs is None else dict(kwargs))
        results = await self._typed(list[Any], "collective_rpc", *arguments, ranks=ranks)
        return [result for of_rank in results.values() for result in of_rank]

    async def supported_tasks(self) -> tuple[str, ...]:
        """What the engine's model can do: ``"generate"``, ``"embed"``, ..."""
        return await self._agreed(tuple[str, ...], "get_supported_tasks")

    async def execute_dummy_batch(self) -> None:
        """Run the model once on nothing: a warm-up, or an idle rank's part in a collective step."""
        await self._call("execute_dummy_batch")

    async def get_kv_cache_group_metadata(self) -> list[dict[str, Any]]:
        """What each group of the KV cache is: ``group_idx``, ``kind``, ``block_size`` (tokens), ``sliding_window``."""
        return await self._agreed(list[dict[str, Any]], "get_kv_cache_group_metadata")

    async def start_profile(
        self, profile_prefix: str | None = None, delay_iterations: int | None = None, max_iterations: int | None = None
    ) -> None:
        """Start the engine's profiler; after so many steps, and for so many."""
        await self._call("profile", True, profile_prefix, delay_iterations, max_iterations)

    async def stop_profile(self) -> None:
        """Stop the engine's profiler."""
        await self._call("profile", False)

    # ------------------------------------------------------------------ internals

    async def _call(self, method: str, *args: Any, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Call ``method`` with as many of ``args`` as its release takes; what it does not take must be a default."""
        arity = self._caller.utility_arity(method)
        if arity is None:
            raise UtilityError(
                f"the engine's release has no utility method {method!r}; nothing was sent", method=method
            )
        surplus = args[arity:]
        if surplus and surplus != _LATER_ARGUMENTS[method][-len(surplus) :]:
            raise UtilityError(
                f"the engine's release takes {arity} of the arguments {args!r:.200} of {method!r}: without the others "
                "it would do something else; nothing was sent",
                method=method,
            )
        return await self._caller.utility_on(ranks, method, *args[:arity])

    async def _typed(self, kind: type[T], method: str, *args: Any, ranks: Iterable[int] | None = None) -> dict[int, T]:
        """The results of a call by rank, each converted to ``kind``."""
        results = await self._call(method, *args, ranks=ranks)
        typed: dict[int, T] = {}
        for rank, value in results.items():
            try:
                typed[rank] = msgspec.convert(value, kind)
            except msgspec.ValidationError as exc:
                message = f"utility call {method!r} returned {value!r:.80} from engine {rank}: {exc}"
                raise UtilityError(message, method=method, rank=rank) from exc
        return typed

    async def _agreed(self, kind: type[T], method: str) -> T:
        """The one answer of all ranks."""
        answers = await self._typed(kind, method)
        first, *others = answers.values()
        if any(other != first for other in others):
            raise UtilityError(f"the engines differ in {method!r}: {answers!r:.300}", method=method)
        return first

    async def _all_did(self, method: str, *args: Any) -> bool:
        """Whether every rank did what was asked."""
        return all((await self._typed(bool, method, *args)).values())


def refuse(method: str, parameter: str, value: Any, problem: str, remedy: str) -> NoReturn:
    """Refuse an argument of ``method`` before anything is sent.

    Raises:
        UtilityRejected: always.
    """
    message = f"{parameter}={value!r:.200} {problem}"
    raise UtilityRejected(message, method=method, parameter=parameter, value=value, remedy=remedy)


def refuse_unless(kind: type, method: str, parameter: str, value: object, remedy: str) -> None:
    """Raises:
    UtilityRejected: an argument of ``method`` is of another kind; nothing was sent.
    """
    if not isinstance(value, kind):
        refuse(method, parameter, value, f"is {a_type(value)}", remedy)


def _refuse_text(method: str, parameter: str, value: object, remedy: str) -> None:
    """Refuse text where several things are expected: its letters would be sent."""
    if isinstance(value, str | bytes):
        refuse(method, parameter, value, f"is {a_type(value)}, not a sequence", f"use {remedy}")
