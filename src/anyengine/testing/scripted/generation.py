"""The requests of a scripted engine: queue, slots, steps, ends.

Owns what is generated and when. Time comes in as an argument; what goes out is returned, in the order of sending.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .messages import changed, next_token, pooled, prompt_hash, token_output
from .script import RequestRule, Script

__all__ = ["Generation"]

_PLAIN = RequestRule()


@dataclass(slots=True)
class _Live:
    request_id: str
    num_prompt_tokens: int
    crc: int
    limit: int
    finish: str
    rule: RequestRule
    sent: int = 0
    due_s: float = 0.0
    is_pooling: bool = False


class Generation:
    """See the module. Requests stay in order of arrival; ``on_scheduled`` is told when one leaves the queue."""

    def __init__(self, script: Script, max_model_len: int, on_scheduled: Callable[[str], None]) -> None:
        self._script = script
        self._max_model_len = max_model_len
        self._on_scheduled = on_scheduled
        self._random = random.Random(script.seed)  # noqa: S311 - jitter
        self._running: dict[str, _Live] = {}
        self._waiting: dict[str, _Live] = {}
        self._sessions: dict[str, deque[Sequence[Any]]] = {}
        self._added = 0
        self._next_step_s = -math.inf
        self.holds_queue = False
        """A pause: what waits goes on waiting."""
        self.frozen = False
        """A pause that keeps requests: nothing steps."""

    @property
    def live(self) -> list[str]:
        """The ids of all requests that it has, those that run first, those that wait for a part last."""
        return list(dict.fromkeys((*self._running, *self._waiting, *self._sessions)))

    @property
    def waiting(self) -> list[str]:
        """The ids in the queue."""
        return list(self._waiting)

    def load(self) -> dict[str, Any] | None:
        """The scheduler's statistics, if the script wants them told."""
        if not self._script.reports_load:
            return None
        running, waiting = len(self._running), len(self._waiting)
        return {
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "kv_cache_usage": min(0.01 * (running + waiting), 1.0),
        }

    @property
    def is_idle(self) -> bool:
        """Nothing runs."""
        return not self._running

    def add(self, message: Sequence[Any], now_s: float) -> None:
        """EngineCoreRequest, by position."""
        if self._is_part(message):
            return
        request_id, prompt, _, sampling, pooling = message[:5]
        prompt = prompt or []
        self._added += 1
        rule = next((rule for rule in self._script.requests if _fits(rule, self._added, prompt)), _PLAIN)
        room = max(1, self._max_model_len - len(prompt))
        limit, finish = min((sampling or {}).get("max_tokens") or 16, room), "length"
        if rule.tokens is not None:
            limit, finish = len(rule.tokens), rule.finish
        elif rule.after_tokens is not None and rule.after_tokens <= limit:
            limit, finish = rule.after_tokens, rule.finish
        self._waiting[request_id] = _Live(
            request_id,
            len(prompt),
            prompt_hash(prompt, self._script.seed),
            limit,
            finish,
            rule,
            is_pooling=pooling is not None,
        )
        self._schedule(now_s)

    def _is_part(self, message: Sequence[Any]) -> bool:
        """Whether it continues a request whose prompt comes in parts, and has nothing to do now."""
        request_id, resumable = message[0], len(message) > 15 and message[15]
        parts = self._sessions.get(request_id)
        if parts is None:
            if resumable:
                self._sessions[request_id] = deque()
            return False
        busy = request_id in self._running or request_id in self._waiting
        if busy:
            parts.append(message)
        elif not resumable:
            del self._sessions[request_id]
        return busy or not resumable

    def _next_part(self, request_id: str, now_s: float) -> None:
        parts = self._sessions.get(request_id)
        if parts:
            self.add(parts.popleft(), now_s)

    def remove(self, request_ids: Iterable[str], now_s: float) -> list[str]:
        """Forget these; those that were there."""
        found = []
        for one in request_ids:
            waits_for_a_part = self._sessions.pop(one, None) is not None
            if self._running.pop(one, None) or self._waiting.pop(one, None) or waits_for_a_part:
                found.append(one)
        self._schedule(now_s)
        return found

    def due_s(self) -> float:
        """When the next step is due; infinite: not before something changes."""
        if self.frozen or not self._running:
            return math.inf
        return max(self._next_step_s, min(live.due_s for live in self._running.values()))

    def step(self, now_s: float) -> list[Any]:
        """The outputs of one step, if one is due."""
        if self.due_s() > now_s:
            return []
        running = [live for live in self._running.values() if live.due_s <= now_s]
        outputs = [self._advance(live) for live in running]
        for live in running:
            if live.request_id not in self._running:
                self._next_part(live.request_id, now_s)
        interval_s = self._script.step_interval_s + self._script.step_s_per_request * len(running)
        self._next_step_s = now_s + self._varied(interval_s)
        self._schedule(now_s)
        return outputs

    def schedule(self, now_s: float) -> None:
        """Look at the queue again: a pause has ended."""
        self._schedule(now_s)

    def _advance(self, live: _Live) -> list[Any]:
        if live.is_pooling:
            del self._running[live.request_id]
            return changed(pooled(live.request_id, [1.0, 2.0, 3.0]), live.rule.output)
        count = min(self._script.tokens_per_frame, live.limit - live.sent)
        rule, numbers = live.rule, range(live.sent, live.sent + count)
        if rule.tokens is not None:
            tokens = [rule.tokens[number] for number in numbers]
        else:
            tokens = [next_token(live.crc, number, self._script.vocab_size) for number in numbers]
        live.sent += count
        if live.sent < live.limit:
            return changed(token_output(live.request_id, tokens), rule.output)
        del self._running[live.request_id]
        return changed(token_output(live.request_id, tokens, live.finish, rule.error), rule.output | rule.last)

    def _schedule(self, now_s: float) -> None:
        while self._waiting and not self.holds_queue and len(self._running) < self._script.max_running:
            live = self._waiting.pop(next(iter(self._waiting)))
            prefill_s = self._script.first_token_delay_s + self._script.prefill_s_per_token * live.num_prompt_tokens
            live.due_s = math.inf if live.rule.silent else now_s + self._varied(prefill_s)
            self._running[live.request_id] = live
            self._on_scheduled(live.request_id)

    def _varied(self, seconds: float) -> float:
        jitter = self._script.jitter
        return seconds * (1 + self._random.uniform(-jitter, jitter)) if jitter else seconds


def _fits(rule: RequestRule, number: int, prompt: Sequence[int]) -> bool:
    if rule.nth is not None and rule.nth != number:
        return False
    return rule.first_token is None or list(prompt[:1]) == [rule.first_token]
