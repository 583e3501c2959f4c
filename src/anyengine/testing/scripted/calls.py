"""The utility calls of a scripted engine: what an engine that behaves would answer, and what the script says instead.

Owns the state that calls change (paused, asleep, adapters). Sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .generation import Generation
from .script import Script, UtilityRule

__all__ = ["Calls"]

_USUAL = UtilityRule(method="*")
_PICKLE = [["some.module", "Class"], msgspec.msgpack.Ext(2, b"cos\nsystem\n")]

Answer = tuple[float, Sequence[Any]]
"""After how long, and UtilityOutput: ``[call id, failure, [type info, value] or nil]``."""


class Calls:
    """See the module. ``answer`` takes a call; what it returns, and later :meth:`settled`, is to be sent."""

    def __init__(self, script: Script, generation: Generation, abort_all: Callable[[float], None]) -> None:
        self._script = script
        self._generation = generation
        self._abort_all = abort_all
        self._counts: dict[str, int] = {}
        self._pausing: list[tuple[int, UtilityRule]] = []
        self._adapters: set[int] = set()
        self.weights: str = "default"
        self._paused = False
        self._asleep = False

    def answer(self, call_id: int, method: str, args: Sequence[Any], now_s: float) -> list[Answer]:
        """The answers to one call, in order."""
        rule = self._rule(method)
        if rule.do == "never":
            return []
        if rule.do in ("usual", "twice"):
            if method in ("pause_scheduler", "pause_generation", "sleep"):
                self._pause(method, args, now_s)
                self._pausing.append((call_id, rule))
                return self.settled()
            usual = getattr(self, f"_do_{method}", None)
            if usual is None:
                failure = f"Call to {method} method failed: the scripted engine has no such method"
                return [(rule.delay_s, [call_id, failure, None])]
            return _repeated(rule, [call_id, None, [None, usual(args, now_s)]])
        return [(rule.delay_s, _told(rule, call_id, method))]

    def settled(self) -> list[Answer]:
        """The answers that waited until nothing runs, if that is so."""
        if not self._generation.is_idle and not self._generation.frozen:
            return []
        waiting, self._pausing = self._pausing, []
        return [answer for call_id, rule in waiting for answer in _repeated(rule, [call_id, None, [None, None]])]

    def _rule(self, method: str) -> UtilityRule:
        number = self._counts[method] = self._counts.get(method, 0) + 1
        for rule in self._script.utilities:
            if rule.method in (method, "*") and rule.nth in (None, number):
                return rule
        return _USUAL

    def _pause(self, method: str, args: Sequence[Any], now_s: float) -> None:
        """pause(mode, clear_cache) or sleep(level, mode); modes "abort", "wait" and "keep"."""
        if method == "sleep":
            self._asleep = True
            args = args[1:]
        mode = args[0] if args else "abort"
        self._paused = self._generation.holds_queue = True
        self._generation.frozen = mode == "keep"
        if mode == "abort":
            self._abort_all(now_s)

    def _do_resume_scheduler(self, args: Sequence[Any], now_s: float) -> None:
        self._paused = self._generation.holds_queue = self._generation.frozen = False
        self._generation.schedule(now_s)

    def _do_wake_up(self, args: Sequence[Any], now_s: float) -> bool:
        self._asleep = False
        self._do_resume_scheduler(args, now_s)
        return True

    def _do_is_sleeping(self, args: Sequence[Any], now_s: float) -> bool:
        return self._asleep

    def _do_is_scheduler_paused(self, args: Sequence[Any], now_s: float) -> bool:
        return self._paused

    def _do_get_supported_tasks(self, args: Sequence[Any], now_s: float) -> Sequence[str]:
        return self._script.tasks

    def _do_reset_prefix_cache(self, args: Sequence[Any], now_s: float) -> bool:
        return True

    def _do_add_lora(self, args: Sequence[Any], now_s: float) -> bool:
        self._adapters.add(args[0][1])
        return True

    def _do_remove_lora(self, args: Sequence[Any], now_s: float) -> bool:
        known = args[0] in self._adapters
        self._adapters.discard(args[0])
        return known

    def _do_pin_lora(self, args: Sequence[Any], now_s: float) -> bool:
        return args[0] in self._adapters

    def _do_list_loras(self, args: Sequence[Any], now_s: float) -> list[int]:
        return sorted(self._adapters)

    def _do_collective_rpc(self, args: Sequence[Any], now_s: float) -> list[None]:
        return [None]

    def _do_set_weight_version(self, args: Sequence[Any], now_s: float) -> None:
        self.weights = args[0]

    def _do_get_weight_version(self, args: Sequence[Any], now_s: float) -> str:
        return self.weights

    def _do_nothing(self, args: Sequence[Any], now_s: float) -> None:
        pass

    _do_profile = _do_reset_mm_cache = _do_reset_encoder_cache = _do_execute_dummy_batch = _do_nothing


def _repeated(rule: UtilityRule, output: Sequence[Any]) -> list[Answer]:
    return [(rule.delay_s, output)] * (2 if rule.do == "twice" else 1)


def _told(rule: UtilityRule, call_id: int, method: str) -> Sequence[Any]:
    if rule.do == "fail":
        return [call_id, f"Call to {method} method failed: {rule.message}", None]
    if rule.do == "unencodable":
        return [call_id, None, _PICKLE]
    if rule.do == "unreadable":
        return [call_id, None, "no pair"]
    return [call_id, None, [None, rule.value]]
