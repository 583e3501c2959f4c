"""Faults of an engine core, one at a time, as somebody else's might have them.

Tables of small changes: to what goes in, to what comes out, to the frames of it, to calls. ``mutant_engine.py`` puts
them into our engine core; the conformance suite must find each of them, and say so in the right check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import msgspec

from anyengine._wire import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    SchedulerStats,
)

Message = EngineCoreOutputs
Sent = tuple[int, Message]

INCOMING: dict[str, Callable[[bytes, Any, list[bytes]], list[bytes] | None]] = {}
OUTGOING: dict[str, Callable[[int, Message], list[Sent] | None]] = {}
FRAMES: dict[str, Callable[[list[Any]], list[Any]]] = {}
UTILITY: dict[str, Callable[[str, Sequence[Any], Any], Any]] = {}
memory: dict[str, Any] = {}
"""What a fault remembers; emptied when another one is chosen."""


def _in(name: str) -> Any:
    return lambda function: INCOMING.setdefault(name, function)


def _out(name: str) -> Any:
    return lambda function: OUTGOING.setdefault(name, function)


def _each(name: str) -> Any:
    """A fault of every request output."""

    def register(change: Callable[[EngineCoreOutput], object]) -> None:
        def mutate(client: int, message: Message) -> None:
            for output in message.outputs:
                change(output)

        OUTGOING[name] = mutate

    return register


def _utility(name: str) -> Any:
    return lambda function: UTILITY.setdefault(name, function)


def _with(message: Message, **fields: Any) -> Message:
    changed = copy(message)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _finishing(message: Message) -> list[EngineCoreOutput]:
    return [output for output in message.outputs if output.finish_reason is not None]


# ------------------------------------------------------------------------------------------------------ what comes out

FRAMES["short message"] = lambda raw: raw[:-1]
FRAMES["short output"] = lambda raw: [raw[0], [output[:-1] for output in raw[1]], *raw[2:]]


@_out("undecodable message")
def _(client: int, message: Message) -> list[Sent]:
    odd = Message(message.engine_index, [EngineCoreOutput(7, [])], timestamp=message.timestamp)  # type: ignore[arg-type]
    return [(client, message), *([(client, odd)] if message.outputs else [])]


@_out("wrong engine index")
def _(client: int, message: Message) -> None:
    message.engine_index = 3


@_out("stray output")
def _(client: int, message: Message) -> None:
    if message.outputs:
        message.outputs.append(EngineCoreOutput("nobody asked", [1]))


@_out("output after finish")
def _(client: int, message: Message) -> list[Sent]:
    finished = _finishing(message)
    return [(client, message), *([(client, _with(message, outputs=finished))] if finished else [])]


@_out("output without news")
def _(client: int, message: Message) -> list[Sent]:
    running = [copy(output) for output in message.outputs if output.finish_reason is None]
    for output in running:
        output.new_token_ids, output.prefill_stats, output.events = [], None, None
    return [*([(client, _with(message, outputs=running))] if running else []), (client, message)]


@_out("only at the end")
def _(client: int, message: Message) -> None:
    kept = memory.setdefault("tokens", {})
    for output in message.outputs:
        kept.setdefault(output.request_id, []).extend(output.new_token_ids)
    message.outputs = _finishing(message)
    for output in message.outputs:
        output.new_token_ids = kept.pop(output.request_id)


@_out("time goes back")
def _(client: int, message: Message) -> None:
    memory["time"] = memory.get("time", message.timestamp) - 0.001
    message.timestamp = memory["time"]


@_out("finish reason 9")
def _(client: int, message: Message) -> None:
    for output in [] if "reason" in memory else _finishing(message):
        memory["reason"] = output.finish_reason = 9


@_out("statistics with a reply")
def _(client: int, message: Message) -> None:
    if message.utility_output is not None:
        message.scheduler_stats = SchedulerStats()


@_out("too many running")
def _(client: int, message: Message) -> None:
    if message.scheduler_stats is not None:
        message.scheduler_stats.num_running_reqs += 700


@_out("no last statistics")
def _(client: int, message: Message) -> list[Sent] | None:
    return None if message.outputs or message.utility_output else []


@_out("negative usage")
def _(client: int, message: Message) -> None:
    if message.scheduler_stats is not None:
        message.scheduler_stats.kv_cache_usage = -0.5


@_each("prefill statistics of a longer prompt")
def _(output: EngineCoreOutput) -> None:
    if output.prefill_stats is not None:
        output.prefill_stats.num_prompt_tokens += 1


@_each("prefill statistics again")
def _(output: EngineCoreOutput) -> None:
    memory["prefill"] = output.prefill_stats = output.prefill_stats or memory.get("prefill")


@_each("events out of order")
def _(output: EngineCoreOutput) -> None:
    if output.prefill_stats is not None:
        output.events = [EngineCoreEvent(2, 1.0), EngineCoreEvent(1, 2.0)]


@_each("stop reason with length")
def _(output: EngineCoreOutput) -> None:
    if output.finish_reason == FinishReason.LENGTH:
        output.stop_reason = 5


@_each("transfer data")
def _(output: EngineCoreOutput) -> None:
    output.kv_transfer_params = {}


@_each("no trace headers")
def _(output: EngineCoreOutput) -> None:
    output.trace_headers = None


@_each("ids cut short")
def _(output: EngineCoreOutput) -> None:
    output.request_id = output.request_id[:1000]


@_each("tokens of the hour")
def _(output: EngineCoreOutput) -> None:
    memory["hour"] = memory.get("hour", 0) + 1
    output.new_token_ids = [token_id + memory["hour"] for token_id in output.new_token_ids]


@_out("tokens of the batch")
def _(client: int, message: Message) -> None:
    for output in message.outputs if len(message.outputs) > 1 else []:
        output.new_token_ids = [token_id + 1 for token_id in output.new_token_ids]


@_each("always the same tokens")
def _(output: EngineCoreOutput) -> None:
    output.new_token_ids = [7] * len(output.new_token_ids)


@_each("no stop reason")
def _(output: EngineCoreOutput) -> None:
    output.stop_reason = None


@_each("stop token left out")
def _(output: EngineCoreOutput) -> None:
    if output.finish_reason == FinishReason.STOP:
        output.new_token_ids = []


@_out("outputs to client 0")
def _(client: int, message: Message) -> list[Sent]:
    return [(0 if message.outputs else client, message)]


@_out("replies to client 0")
def _(client: int, message: Message) -> list[Sent]:
    return [(0 if message.utility_output else client, message)]


@_out("call ids of 32 bits")
def _(client: int, message: Message) -> None:
    if message.utility_output is not None and message.utility_output.call_id >= 2**53:
        message.utility_output.call_id &= 0xFFFFFFFF


@_out("replies in pairs, swapped")
def _(client: int, message: Message) -> list[Sent]:
    if message.utility_output is None:
        return [(client, message)]
    if "swap" not in memory and message.utility_output.failure_message is not None:
        memory["swap"] = (client, message)
        return []
    return [(client, message), *([memory.pop("swap")] if "swap" in memory else [])]


# -------------------------------------------------------------------------------------------------------- what goes in


def _sampling(raw: Any) -> dict[str, Any]:
    return raw[3] if isinstance(raw, list) and len(raw) > 3 and isinstance(raw[3], dict) else {}


def _drop_if(name: str, condition: Callable[[Any, list[bytes]], object]) -> None:
    INCOMING[name] = lambda kind, raw, frames: None if kind == b"\x00" and condition(raw, frames) else frames


_drop_if("wants all positions", lambda raw, frames: len(raw) < 22)
_drop_if("wants no further positions", lambda raw, frames: len(raw) > 22)
_drop_if("wants short requests", lambda raw, frames: len(raw) == 22 and "top_p" not in _sampling(raw))
_drop_if("wants known keys", lambda raw, frames: "a_future_parameter" in _sampling(raw))
_drop_if("wants floats", lambda raw, frames: type(_sampling(raw).get("temperature")) is int)
_drop_if("wants narrow forms", lambda raw, frames: frames[1][3:4] == b"\xdb")
_drop_if("wants no further frames", lambda raw, frames: len(frames) > 2)
_drop_if("no answer without parameters", lambda raw, frames: raw[3] is None)
_drop_if("no answer without max_tokens", lambda raw, frames: raw[3] and raw[3].get("max_tokens", 1) is None)
_drop_if("no prompt of one token", lambda raw, frames: len(raw[1]) == 1)


def _edit(name: str, change: Callable[[Any], object]) -> None:
    """A fault that reads an ADD otherwise than it is written."""

    def mutate(kind: bytes, raw: Any, frames: list[bytes]) -> list[bytes]:
        if kind != b"\x00":
            return frames
        change(raw)
        return [frames[0], msgspec.msgpack.encode(raw), *frames[2:]]

    INCOMING[name] = mutate


def _pop(*names: str) -> Callable[[Any], object]:
    return lambda raw: [_sampling(raw).pop(name, None) for name in names]


_edit("max_tokens is 5 by default", lambda raw: _sampling(raw).setdefault("max_tokens", 5))
_edit("written defaults differ", lambda raw: "presence_penalty" in _sampling(raw) and raw[1].append(3))
_edit("stops at a stop string", lambda raw: _sampling(raw).get("stop") and _sampling(raw).update(max_tokens=1))
_edit("no eos", _pop("_eos_token_id"))
_edit("no stop ids", _pop("stop_token_ids"))
_edit("no min_tokens", _pop("min_tokens"))
_edit("no logit_bias", _pop("logit_bias"))
_edit("no allowed_token_ids", _pop("allowed_token_ids"))
_edit("no bad words", _pop("_bad_words_token_ids"))
_edit("no seed", _pop("seed"))
_edit("no top_k", lambda raw: _sampling(raw).get("top_k") == 1 and _sampling(raw).update(top_k=0, seed=5))
_edit("aborts nothing at once", lambda raw: len(raw) > 19 and raw.__setitem__(19, False))
_edit("one token too many", lambda raw: _sampling(raw).update(max_tokens=(_sampling(raw).get("max_tokens") or 15) + 1))
_edit("structure ignored", _pop("structured_outputs"))


@_in("seeds add up")
def _(kind: bytes, raw: Any, frames: list[bytes]) -> list[bytes]:
    if kind == b"\x00" and _sampling(raw).get("seed") is not None:
        memory["seed"] = memory.get("seed", 0) + 1
        raw[3]["seed"] += memory["seed"]
        return [frames[0], msgspec.msgpack.encode(raw)]
    return frames


@_in("ids only once")
def _(kind: bytes, raw: Any, frames: list[bytes]) -> list[bytes] | None:
    known = memory.setdefault("ids", set())
    if kind == b"\x00" and raw[0] in known:
        return None
    known.add(raw[0] if kind == b"\x00" else None)
    return frames


@_in("aborts the first only")
def _(kind: bytes, raw: Any, frames: list[bytes]) -> list[bytes]:
    return [kind, msgspec.msgpack.encode(raw[:1])] if kind == b"\x01" else frames


@_in("no aborts")
def _(kind: bytes, raw: Any, frames: list[bytes]) -> list[bytes] | None:
    return None if kind == b"\x01" else frames


@_in("aborts of unknown ids are for all")
def _(kind: bytes, raw: Any, frames: list[bytes]) -> list[bytes]:
    if kind == b"\x01" and "nobody" in raw:
        raw = list(memory.get("all", []))
        return [kind, msgspec.msgpack.encode(raw)]
    if kind == b"\x00":
        memory.setdefault("all", []).append(raw[0])
    return frames


# ------------------------------------------------------------------------------------------------------------ the core


def _result(name: str, method: str, result: Any) -> None:
    """A fault of one method's result."""
    UTILITY[name] = lambda called, args, proceed: result if called == method else proceed()


_result("no tasks", "get_supported_tasks", [])
_result("always asleep", "is_sleeping", True)
_result("sleeping is 0", "is_sleeping", 0)
_result("paused is nil", "is_scheduler_paused", None)
_result("never reset", "reset_prefix_cache", False)
_result("reset says yes", "reset_mm_cache", True)
_result("never paused", "is_scheduler_paused", False)
_result("unknown is fine", "no_such_method_at_all", None)
_result("pause does nothing", "pause_scheduler", None)
_result("weights are a number", "get_weight_version", 5)
_result("weights without a name", "get_weight_version", "v1")


@_utility("arguments are cut")
def _(called: str, args: Sequence[Any], proceed: Any) -> Any:
    return proceed() if len(args) < 9 else None


@_utility("a bad pause pauses")
def _(called: str, args: Sequence[Any], proceed: Any) -> Any:
    return proceed() if called != "pause_scheduler" or args[:1] != ["sideways"] else None


@_utility("resume fails when not paused")
def _(called: str, args: Sequence[Any], proceed: Any) -> Any:
    if called == "resume_scheduler" and memory.pop("resumed", False):
        raise RuntimeError("not paused")
    memory["resumed"] = called == "resume_scheduler"
    return proceed()
