"""Token buckets against a naive re-computation: every level from all that has ever happened."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyengine import (
    Limiter,
    OverloadedError,
    QuotaExceededError,
    RequestRejected,
    TokenBuckets,
    TokenDemand,
    TokenQuota,
    Usage,
)

TENANTS = ("a", "b", None)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def demand(tenant: str | None = "a", prompt: int = 10, completion: int = 0) -> TokenDemand:
    return TokenDemand(request_id="r", tenant=tenant, prompt_tokens=prompt, max_completion_tokens=completion)


def used(tokens: int) -> Usage:
    return Usage(prompt_tokens=tokens, completion_tokens=0, cached_tokens=0)


def refusal_of(buckets: TokenBuckets, asked: TokenDemand) -> QuotaExceededError | None:
    try:
        buckets.reserve(asked)
    except QuotaExceededError as refusal:
        return refusal
    return None


def level_after(quota: TokenQuota, history: list[tuple[float, int]], now_s: float) -> float:
    """What is left at ``now_s``, from every change since the beginning. Exact: all its numbers are dyadic."""
    level, at_s = float(quota.capacity_tokens), 1000.0
    for when_s, change in [*history, (now_s, 0)]:
        level = min(level + (when_s - at_s) * quota.refill_tokens_per_s, quota.capacity_tokens)
        level, at_s = min(level + change, quota.capacity_tokens), when_s
    return level


quotas = st.builds(
    TokenQuota, capacity_tokens=st.integers(1, 200), refill_tokens_per_s=st.integers(0, 64).map(lambda n: n / 8)
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 400)),
        st.tuples(st.just("reserve"), st.sampled_from(TENANTS), st.integers(1, 120), st.integers(0, 120)),
        st.tuples(st.just("settle"), st.integers(0, 10), st.integers(0, 100)),
    ),
    max_size=60,
)


@pytest.mark.feature("R58")
@settings(max_examples=300, deadline=None)
@given(default=quotas, own=quotas, steps=steps)
def test_buckets_are_what_a_naive_computation_says(default: TokenQuota, own: TokenQuota, steps: list[Any]) -> None:
    clock = Clock()
    buckets = TokenBuckets(default, {"b": own}, clock=clock)
    history: dict[str | None, list[tuple[float, int]]] = {tenant: [] for tenant in TENANTS}
    spent: dict[str | None, int] = dict.fromkeys(TENANTS, 0)
    running: list[TokenDemand] = []
    for step in steps:
        if step[0] == "wait":
            clock.now_s += step[1] / 8
        elif step[0] == "reserve":
            asked = demand(*step[1:])
            quota = own if asked.tenant == "b" else default
            level = level_after(quota, history[asked.tenant], clock.now_s)
            if asked.max_total_tokens > quota.capacity_tokens:
                with pytest.raises(RequestRejected):
                    buckets.reserve(asked)
                continue
            refusal = refusal_of(buckets, asked)
            assert (refusal is not None) == (level < asked.max_total_tokens)
            if refusal is not None:
                assert (refusal.retry_after_s is None) == (quota.refill_tokens_per_s == 0)
                continue
            history[asked.tenant].append((clock.now_s, -asked.max_total_tokens))
            running.append(asked)
        elif running:
            ended = running.pop(step[1] % len(running))
            tokens = ended.max_total_tokens * step[2] // 100
            buckets.settle(ended, used(tokens))
            spent[ended.tenant] += tokens
            history[ended.tenant].append((clock.now_s, ended.max_total_tokens - tokens))
        for tenant in TENANTS:
            quota = own if tenant == "b" else default
            assert buckets.available_tokens(tenant) == level_after(quota, history[tenant], clock.now_s)
            reserved = sum(one.max_total_tokens for one in running if one.tenant == tenant)
            flowed_in = (clock.now_s - 1000.0) * quota.refill_tokens_per_s
            assert spent[tenant] + reserved <= quota.capacity_tokens + flowed_in


@pytest.mark.feature("R58")
@settings(max_examples=300, deadline=None)
@given(
    capacity=st.integers(1, 10**9),
    rate=st.floats(1e-3, 1e6),
    shares=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
    start_s=st.floats(0, 1e7),
)
def test_the_time_to_wait_is_enough_and_not_too_long(
    capacity: int, rate: float, shares: tuple[float, float], start_s: float
) -> None:
    clock = Clock()
    clock.now_s = start_s
    buckets = TokenBuckets(TokenQuota(capacity_tokens=capacity, refill_tokens_per_s=rate), clock=clock)
    first, second = (max(1, int(capacity * share)) for share in shares)
    buckets.reserve(demand(prompt=first))
    refusal = refusal_of(buckets, demand(prompt=second))
    assert (refusal is None) == (first + second <= capacity)
    if refusal is not None:
        assert refusal.retry_after_s is not None
        clock.now_s = start_s + refusal.retry_after_s - 0.002
        assert clock.now_s <= start_s or refusal_of(buckets, demand(prompt=second)) is not None
        clock.now_s = start_s + refusal.retry_after_s
        assert refusal_of(buckets, demand(prompt=second)) is None


@pytest.mark.feature("R58")
def test_a_refusal_says_who_how_much_and_when() -> None:
    clock = Clock()
    buckets = TokenBuckets(TokenQuota(capacity_tokens=1000, refill_tokens_per_s=10), clock=clock)
    buckets.reserve(demand("acme", 700, 180))
    with pytest.raises(QuotaExceededError) as caught:
        buckets.reserve(demand("acme", 100, 200))
    error = caught.value
    assert (error.status, error.retryable, error.reason, error.tenant) == (429, True, "quota", "acme")
    assert error.retry_after_s == pytest.approx(18.001)
    assert isinstance(error, OverloadedError) and error.request_id == "r"
    assert str(error) == (
        "the quota of tenant 'acme' has not enough left: the request asks for 300 tokens (100 of prompt, up to 200 of "
        "output), and 120 of 1000 are left; 10 tokens flow in each second: try again in 18.001 s; nothing was sent"
    )
    buckets.reserve(demand("other", 1000))
    buckets.reserve(demand(None, 1000))
    with pytest.raises(QuotaExceededError, match="of the requests that name no tenant has not enough"):
        buckets.reserve(demand(None, 1))


@pytest.mark.feature("R58")
@pytest.mark.parametrize(
    ("limit", "prompt", "completion", "parameter", "remedy"),
    [
        ({"capacity_tokens": 100}, 50, 51, "max_tokens", "ask for less output"),
        ({"capacity_tokens": 100}, 100, 1, "prompt", "shorten the prompt"),
        ({"capacity_tokens": 100}, 101, 0, "prompt", "shorten the prompt"),
        ({"capacity_tokens": 100, "max_total_tokens": 40}, 30, 11, "max_tokens", r"\(max_total_tokens=40\)"),
        ({"capacity_tokens": 30, "max_total_tokens": 40}, 30, 1, "prompt", r"\(capacity_tokens=30\)"),
    ],
)
def test_what_never_fits_is_rejected(
    limit: dict[str, int], prompt: int, completion: int, parameter: str, remedy: str
) -> None:
    quota = TokenQuota(refill_tokens_per_s=1, **limit)  # type: ignore[arg-type]
    buckets = TokenBuckets(None, {"a": quota})
    with pytest.raises(RequestRejected, match=remedy) as caught:
        buckets.reserve(demand("a", prompt, completion))
    assert (caught.value.parameter, caught.value.status) == (parameter, 400)
    assert buckets.available_tokens("a") == quota.capacity_tokens
    buckets.reserve(demand("b", prompt, completion))  # who has no quota has no limit
    buckets.settle(demand("b", prompt, completion), used(1))
    assert buckets.available_tokens("b") == math.inf


def test_a_budget_that_is_used_up_is_not_worth_a_retry() -> None:
    buckets = TokenBuckets(TokenQuota(capacity_tokens=10, refill_tokens_per_s=0))
    whole = demand(prompt=10)
    buckets.reserve(whole)
    with pytest.raises(QuotaExceededError, match="its 1 requests in flight") as caught:
        buckets.reserve(demand(prompt=1))
    assert (caught.value.retry_after_s, caught.value.retryable) == (None, True)
    buckets.settle(whole, used(10))
    with pytest.raises(QuotaExceededError, match="its budget is used up") as caught:
        buckets.reserve(demand(prompt=1))
    assert (caught.value.retry_after_s, caught.value.retryable) == (None, False)


def test_what_was_used_beyond_the_reservation_is_owed() -> None:
    clock = Clock()
    buckets = TokenBuckets(TokenQuota(capacity_tokens=10, refill_tokens_per_s=1), clock=clock)
    buckets.reserve(demand(prompt=10))
    buckets.settle(demand(prompt=10), used(15))
    clock.now_s += 10
    assert buckets.available_tokens("a") == 5
    clock.now_s -= 100  # a clock that goes backwards
    assert buckets.available_tokens("a") == 5


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=80))
def test_no_more_tenants_are_remembered_than_are_busy_or_used_last(steps: list[tuple[int, bool]]) -> None:
    buckets = TokenBuckets(TokenQuota(capacity_tokens=10, refill_tokens_per_s=0), max_tenants=3)
    running: list[str] = []
    idle: list[str] = []
    for number, settles in steps:
        tenant = str(number)
        if settles and tenant in running:
            buckets.settle(demand(tenant, 1), used(1))
            running.remove(tenant)
            if tenant not in running:
                idle = [*idle, tenant][-3:]
        elif not settles:
            if refusal_of(buckets, demand(tenant, 1)) is not None:
                continue
            running.append(tenant)
            if tenant in idle:
                idle.remove(tenant)
        assert set(buckets._busy) == set(running) and list(buckets._idle) == idle
        assert all(buckets.available_tokens(str(n)) == 10 for n in range(10) if str(n) not in {*running, *idle})


def test_a_quota_of_its_own_is_never_forgotten() -> None:
    """However many strangers come: a budget without refill stays spent."""
    budget = TokenQuota(capacity_tokens=10, refill_tokens_per_s=0)
    buckets = TokenBuckets(budget, {"acme": budget}, max_tenants=2)
    for tenant in ("acme", *"abcdef"):
        buckets.reserve(demand(tenant, 10))
        buckets.settle(demand(tenant, 10), used(10))
    assert buckets.available_tokens("acme") == 0
    assert buckets.available_tokens("a") == 10
    with pytest.raises(ValueError, match="nothing reserved"):
        buckets.settle(demand("acme", 1), used(1))


def test_a_refused_stranger_is_not_remembered() -> None:
    buckets = TokenBuckets(TokenQuota(capacity_tokens=10, refill_tokens_per_s=0))
    with pytest.raises(RequestRejected):
        buckets.reserve(demand("stranger", 11))
    assert not buckets._busy and not buckets._idle
    with pytest.raises(ValueError, match="tenant 'stranger' has nothing reserved"):
        buckets.settle(demand("stranger"), used(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity_tokens": 0}, {"capacity_tokens": 1.5}, {"capacity_tokens": True}, {"refill_tokens_per_s": -1},
        {"refill_tokens_per_s": math.inf}, {"refill_tokens_per_s": math.nan}, {"refill_tokens_per_s": "1"},
        {"refill_tokens_per_s": True}, {"max_total_tokens": 0},
    ],
)  # fmt: skip
def test_a_quota_that_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TokenQuota(**{"capacity_tokens": 1, "refill_tokens_per_s": 1, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"default": 1000}, {"tenants": {"a": 5}}, {"tenants": {"": None}}, {"tenants": ["a"]}, {"max_tenants": 0},
        {"clock": 1.0},
    ],
)  # fmt: skip
def test_buckets_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TokenBuckets(**wrong)
    assert isinstance(TokenBuckets(), Limiter)


def test_a_refusal_travels() -> None:
    error = QuotaExceededError("no", tenant="acme", retry_after_s=2.5, request_id="r")
    for twin in (pickle.loads(pickle.dumps(error)), error.for_waiter()):
        assert (twin.tenant, twin.retry_after_s, twin.reason, twin.request_id) == ("acme", 2.5, "quota", "r")
