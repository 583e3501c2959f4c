"""Who may spend how many tokens: what a client asks before it sends a request, and a ready-made answer.

Owns the hook (:class:`Limiter`), what passes through it, and token buckets for tenants. Knows no client, no engine and
no event loop.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import msgspec

from anyengine._setting_rules import check_callable, check_count, check_text
from anyengine.exceptions import QuotaExceededError, RequestRejected
from anyengine.outputs import Usage

__all__ = ["Limiter", "TokenBuckets", "TokenDemand", "TokenQuota"]

_ROUNDING_S: Final = 0.001
"""On top of a time to wait: more than what the arithmetic of floats loses, less than anybody notices."""


class TokenDemand(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The most that one request can use, in tokens, as is known before it is sent.

    Attributes:
        request_id: the caller's label, or the one the client made; several requests may share it.
        tenant: who asks, or ``None`` if the request does not say.
        prompt_tokens: counted once, however many completions there are.
        max_completion_tokens: of all its completions, or beams, together; 0 for a request that generates nothing.
    """

    request_id: str
    tenant: str | None
    prompt_tokens: int
    max_completion_tokens: int

    @property
    def max_total_tokens(self) -> int:
        """Prompt and completions."""
        return self.prompt_tokens + self.max_completion_tokens


@runtime_checkable
class Limiter(Protocol):
    """Who may spend how much. Both methods are called in the client's event loop, between two awaits: they must neither
    wait nor call the client. Clients in one event loop may share a limiter."""

    def reserve(self, demand: TokenDemand) -> None:
        """Set aside what a request may use, which is sent as soon as this returns.

        Raises:
            QuotaExceededError: not now; ``retry_after_s`` says when. It is the request's error.
            RequestRejected: never. It is the request's error.
            Exception: anything else is a bug; it fails this request alone.
        """

    def settle(self, demand: TokenDemand, usage: Usage) -> None:
        """The request has ended, in whatever way, and has used so much: give back the rest. Called exactly once for
        each :meth:`reserve` that has returned, with the same object. What it raises is logged, and changes nothing."""


class TokenQuota(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant may use: ``capacity_tokens`` at once, and ``refill_tokens_per_s`` as time goes by (0: never, it
    is a budget for good). ``max_total_tokens`` bounds a single request, prompt and completions together; ``None``: by
    the capacity.

    Raises:
        ValueError: a value out of range.
    """

    capacity_tokens: int
    refill_tokens_per_s: float
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        check_count("capacity_tokens", self.capacity_tokens, 1)
        check_count("max_total_tokens", self.max_total_tokens, 1, none="for the capacity")
        rate: object = self.refill_tokens_per_s
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise ValueError(f"refill_tokens_per_s={rate!r} must be a number of at least 0")


class _Bucket:
    """What is left of one tenant's quota. Invariant: never more than its capacity; less than nothing, if requests have
    used more than they had reserved."""

    __slots__ = ("_filled_s", "_quota", "level", "num_open")

    def __init__(self, quota: TokenQuota, now_s: float) -> None:
        self._quota = quota
        self._filled_s = now_s
        self.level: float = quota.capacity_tokens
        self.num_open: int = 0

    def refill(self, now_s: float) -> None:
        """Add what has flowed in; a clock that goes backwards adds nothing."""
        if now_s > self._filled_s:
            self.add((now_s - self._filled_s) * self._quota.refill_tokens_per_s)
            self._filled_s = now_s

    def add(self, num_tokens: float) -> None:
        self.level = min(self.level + num_tokens, self._quota.capacity_tokens)


class TokenBuckets:
    """A :class:`Limiter` with a token bucket for each tenant. A request reserves the most that it can use; what it has
    not used flows back when it ends. Requests without a tenant share one bucket. Not for several threads.

    Tokens used never exceed the capacity by more than what has flowed in, over any time. Buckets are remembered of all
    tenants with a quota of their own or requests in flight, and of ``max_tenants`` others: those used last. Who is
    forgotten begins with a full bucket: where names are the callers' to invent, ``default`` limits nobody for long.

    Args:
        default: the quota of each tenant that has none of its own. ``None``: no limit.
        tenants: quotas by tenant.
        max_tenants: how many others are remembered.
        clock: seconds that never go backwards.

    Raises:
        ValueError: a value makes no sense.
    """

    def __init__(
        self,
        default: TokenQuota | None = None,
        tenants: Mapping[str, TokenQuota] = MappingProxyType({}),
        *,
        max_tenants: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_count("max_tenants", max_tenants, 1)
        check_callable("clock", clock)
        if default is not None and not isinstance(default, TokenQuota):
            raise ValueError(f"default={default!r} must be a TokenQuota, or None for no limit")
        if not isinstance(tenants, Mapping):
            raise ValueError(f"tenants={tenants!r} must be a mapping of names to TokenQuota")
        self._quotas: dict[str | None, TokenQuota] = {}
        for name, quota in tenants.items():
            check_text("tenants", name, "the name of a tenant")
            if not isinstance(quota, TokenQuota):
                raise ValueError(f"tenants[{name!r}]={quota!r} must be a TokenQuota")
            self._quotas[name] = quota
        self._default = default
        self._max_tenants = max_tenants
        self._clock = clock
        self._busy: dict[str | None, _Bucket] = {}  # with requests in flight, or a quota of their own
        self._idle: OrderedDict[str | None, _Bucket] = OrderedDict()  # used last at the end

    def quota(self, tenant: str | None) -> TokenQuota | None:
        """What ``tenant`` may use; ``None``: no limit."""
        return self._quotas.get(tenant, self._default)

    def available_tokens(self, tenant: str | None) -> float:
        """What ``tenant`` could reserve now; infinite without a limit."""
        quota = self.quota(tenant)
        if quota is None:
            return math.inf
        bucket = self._find(tenant)
        if bucket is None:
            return quota.capacity_tokens
        bucket.refill(self._clock())
        return bucket.level

    def reserve(self, demand: TokenDemand) -> None:
        """See :class:`Limiter`.

        Raises:
            QuotaExceededError: the tenant's bucket has not enough.
            RequestRejected: it is more than the tenant's bucket can hold, or than ``max_total_tokens``.
        """
        tenant, total = demand.tenant, demand.max_total_tokens
        quota = self.quota(tenant)
        if quota is None:
            return
        _check_ever(demand, quota)
        now_s = self._clock()
        bucket = self._find(tenant) or _Bucket(quota, now_s)  # a full one is not kept if it has been refused
        bucket.refill(now_s)
        if bucket.level < total:
            raise _refusal(demand, quota, bucket)
        bucket.level -= total
        bucket.num_open += 1
        self._idle.pop(tenant, None)
        self._busy[tenant] = bucket

    def settle(self, demand: TokenDemand, usage: Usage) -> None:
        """See :class:`Limiter`.

        Raises:
            ValueError: nothing is reserved for this tenant.
        """
        tenant = demand.tenant
        if self.quota(tenant) is None:
            return
        bucket = self._busy.get(tenant)
        if bucket is None or not bucket.num_open:
            raise ValueError(f"settle() for request {demand.request_id!r}: {_named(tenant)} has nothing reserved")
        bucket.refill(self._clock())
        bucket.add(demand.max_total_tokens - usage.total_tokens)
        bucket.num_open -= 1
        if not bucket.num_open and tenant not in self._quotas:
            del self._busy[tenant]
            self._idle[tenant] = bucket
            if len(self._idle) > self._max_tenants:
                self._idle.popitem(last=False)

    def _find(self, tenant: str | None) -> _Bucket | None:
        return self._busy.get(tenant) or self._idle.get(tenant)


def _named(tenant: str | None) -> str:
    return "the requests that name no tenant" if tenant is None else f"tenant {tenant!r}"


def _asked(demand: TokenDemand) -> str:
    return (
        f"{demand.max_total_tokens} tokens ({demand.prompt_tokens} of prompt, up to {demand.max_completion_tokens} of "
        "output)"
    )


def _check_ever(demand: TokenDemand, quota: TokenQuota) -> None:
    """Refuse what no waiting can help.

    Raises:
        RequestRejected: it is too large.
    """
    limit, which = quota.capacity_tokens, "capacity_tokens"
    if quota.max_total_tokens is not None and quota.max_total_tokens < limit:
        limit, which = quota.max_total_tokens, "max_total_tokens"
    if demand.max_total_tokens <= limit:
        return
    has_room = demand.prompt_tokens < limit and demand.max_completion_tokens > 0
    raise RequestRejected(
        f"{_asked(demand)} are more than one request of {_named(demand.tenant)} may use ({which}={limit}); waiting "
        "does not help",
        parameter="max_tokens" if has_room else "prompt",
        value=demand.max_completion_tokens if has_room else demand.prompt_tokens,
        remedy="ask for less output (max_tokens, n)" if has_room else "shorten the prompt",
        request_id=demand.request_id,
    )


def _refusal(demand: TokenDemand, quota: TokenQuota, bucket: _Bucket) -> QuotaExceededError:
    rate, missing = quota.refill_tokens_per_s, demand.max_total_tokens - bucket.level
    retry_after_s = missing / rate + _ROUNDING_S if rate else None
    if retry_after_s is not None:
        when = f"{rate:g} tokens flow in each second: try again in {retry_after_s:.3f} s"
    elif bucket.num_open:
        when = f"none flow in; what its {bucket.num_open} requests in flight do not use comes back as they end"
    else:
        when = "none flow in: its budget is used up"
    error = QuotaExceededError(
        f"the quota of {_named(demand.tenant)} has not enough left: the request asks for {_asked(demand)}, and "
        f"{math.floor(bucket.level)} of {quota.capacity_tokens} are left; {when}; nothing was sent",
        tenant=demand.tenant,
        retry_after_s=retry_after_s,
        request_id=demand.request_id,
    )
    error.retryable = retry_after_s is not None or bucket.num_open > 0
    return error
