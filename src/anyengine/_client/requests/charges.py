"""What requests may use and have used, between the client and the limiter that it was given.

Owns the one reservation of each request, and that it is settled once, however the request ends: a charge stands in for
the session's account in the states of a request, which tell it of their end. Without a limiter there is none of this.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Final

from anyengine._client.inputs.request_fields import RequestFields, tenant_of
from anyengine._protocol import num_prompt_tokens
from anyengine._wire import EngineCoreRequest
from anyengine.exceptions import EngineError, RequestFailed, RequestTimeout
from anyengine.limiters import Limiter, TokenDemand
from anyengine.outputs import Usage

from .account import Account, RequestAccount
from .state import RequestState

__all__ = ["Charge", "Charges", "checked_limiter"]

_logger = logging.getLogger("anyengine.client")
_NOBODY: Final = 0


class Charge:
    """The reservation of one request, which its completions share; or of a search, which its steps share.

    Invariant: settled once; what ends afterwards is no more than counted.
    """

    __slots__ = (
        "_cached_tokens",
        "_charges",
        "_completion_tokens",
        "_demand",
        "_is_settled",
        "_num_open",
        "_prompt_tokens",
    )

    def __init__(self, charges: Charges, demand: TokenDemand, num_states: int) -> None:
        self._charges = charges
        self._demand = demand
        self._num_open = num_states
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cached_tokens: int | None = None
        self._is_settled = False

    def close(self, state: RequestState) -> None:
        """``state`` has ended this moment, with all its tokens; with the last one, the charge is settled."""
        self._charges.account.close(state)
        self._completion_tokens += state.num_tokens
        if _has_used_prompt(state):
            self._prompt_tokens = self._demand.prompt_tokens
        if self._cached_tokens is None:
            self._cached_tokens = state.num_cached_tokens
        self._num_open -= 1
        if self._num_open == 0:
            self.settle()

    def settle(self) -> None:
        """Nothing more will be used. Idempotent, and never raises."""
        if self._is_settled:
            return
        self._is_settled = True
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=min(self._cached_tokens or 0, self._prompt_tokens),
        )
        self._charges.settle(self._demand, usage)


class Charges:
    """See the module. Lifetime: one session."""

    def __init__(self, account: RequestAccount, limiter: Limiter | None) -> None:
        self.account: RequestAccount = account
        self._limiter = limiter
        self.refusals: int = 0
        """Requests that the limiter has refused."""
        self.failures: int = 0
        """How often the limiter has raised what it must not."""

    def open(self, request: EngineCoreRequest, fields: RequestFields, n: int = 1) -> Account:
        """Where the ``n`` states of ``request`` are counted when they end; asks the limiter. Whoever cannot send all of
        them has to settle it.

        Raises:
            EngineError: the limiter refuses the request, or has failed.
        """
        if self._limiter is None:
            return self.account
        sampling, label = request.sampling_params, request.external_req_id or ""
        max_tokens = 0 if sampling is None else (sampling.max_tokens or 0) * n
        return self._reserve(label, fields, num_prompt_tokens(request), max_tokens, n)

    def open_search(self, label: str, fields: RequestFields, prompt_tokens: int, max_tokens: int) -> Charge | None:
        """:meth:`open` for what takes many requests, each of which is told this charge; the caller settles it.

        Raises:
            RequestRejected: the tenant is no name.
            EngineError: the limiter refuses it, or has failed.
        """
        if self._limiter is None:
            return None
        return self._reserve(label, fields, prompt_tokens, max_tokens, _NOBODY)

    def _reserve(
        self, label: str, fields: RequestFields, prompt_tokens: int, max_tokens: int, num_states: int
    ) -> Charge:
        assert self._limiter is not None
        demand = TokenDemand(
            request_id=label,
            tenant=tenant_of(fields),
            prompt_tokens=prompt_tokens,
            max_completion_tokens=max_tokens,
        )
        try:
            self._limiter.reserve(demand)
        except EngineError as refusal:
            self.refusals += 1
            refusal.request_id = label
            raise
        except Exception as exc:
            self._note_failure(exc)
            name = type(self._limiter).__name__
            raise RequestFailed(
                f"the limiter, a {name}, failed at request {label!r}: {exc!r}; nothing was sent",
                code="limiter_failed",
                request_id=label,
            ) from exc
        return Charge(self, demand, num_states)

    def settle(self, demand: TokenDemand, usage: Usage) -> None:
        """For a charge. Runs in the middle of an end, which must go on whatever the limiter does."""
        assert self._limiter is not None
        try:
            self._limiter.settle(demand, usage)
        except Exception as exc:  # noqa: BLE001 - rule 5: the limiter is the user's
            self._note_failure(exc)

    def _note_failure(self, failure: Exception) -> None:
        self.failures += 1
        if self.failures > 1:
            return
        with suppress(Exception):  # rule 5: a filter of the log is the user's, too
            _logger.error("the limiter %r failed; later failures are only counted", self._limiter, exc_info=failure)


def checked_limiter(limiter: object) -> Limiter | None:
    """What a client was given.

    Raises:
        ValueError: it is no limiter.
    """
    if limiter is None:
        return None
    if isinstance(limiter, type) or not isinstance(limiter, Limiter):
        raise ValueError(
            f"limiter={limiter!r} must be an object with reserve(demand) and settle(demand, usage), or None"
        )
    for method in (limiter.reserve, limiter.settle):
        if iscoroutinefunction(method):  # it would let everybody in
            raise ValueError(f"limiter={limiter!r}: {method.__name__}() must be a plain function, not an async one")
    return limiter


def _has_used_prompt(state: RequestState) -> bool:
    """Whether its prompt was computed; or may have been, when it was ended from here. An engine that has failed before
    the first token costs the tenant nothing."""
    ended_here = state.error is None or isinstance(state.error, RequestTimeout)
    return state.prompt_was_run or (ended_here and state.attempts > 0)
