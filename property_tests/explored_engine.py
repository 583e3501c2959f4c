"""An engine in memory for explorers: deterministic, a token for each of its steps, and a record of what it has ended.

Speaks through the dialect's engine role and shares nothing else with the client. A request for at most
``ENDLESS_TOKENS`` tokens gets them, one for each step; of a longer one it generates two and then waits to be told. A
pooling request has its result in one step. Calls are answered at once, between two steps.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import anyio.lowlevel
import msgspec

from anyengine._process.task_child import TaskExit, TaskHost
from anyengine._transport.memory import MemoryDealer, MemoryLink, MemoryPush
from anyengine._wire import (
    NEWEST,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    Tensor,
    UtilityCall,
    UtilityOutput,
)
from anyengine.config import InMemoryEngine
from anyengine.testing.toy_runner import next_token

__all__ = ["ENDLESS_TOKENS", "ExploredEngine"]

ENDLESS_TOKENS: Final = 1_000
REGISTRATION: Final = {
    "max_model_len": 1 << 20,
    "num_gpu_blocks": 1,
    "block_size": 16,
    "dtype": "float32",
    "vllm_version": "0.33.0",
    "supports_lora": True,
    "max_loras": 4,
}
ANSWERS: Final[dict[str, Any]] = {
    "add_lora": True,
    "compute_weight_checksums": [{"w": "0"}],
    "get_kv_cache_group_metadata": [],
    "get_supported_tasks": ["generate", "embed", "classify"],
    "get_weight_version": "default",
    "is_scheduler_paused": False,
    "is_sleeping": False,
    "list_loras": [1],
    "pin_lora": True,
    "remove_lora": True,
    "reset_prefix_cache": True,
    "collective_rpc": ["ok"],
    "wake_up": True,
}


@dataclass(eq=False)
class _Running:
    """What one request still has to come."""

    tokens: list[int]
    remaining: int
    endless: bool


@dataclass(eq=False)
class ExploredEngine:
    """The record outlives the sessions. A call named "die" ends the process; "silence" is never answered."""

    finished: set[str] = field(default_factory=set)
    running: dict[str, _Running] = field(default_factory=dict)
    pooled: list[str] = field(default_factory=list)
    calls: int = 0
    paused: bool = False
    """Whether it was told to pause; it goes on all the same."""

    def settings(self) -> InMemoryEngine:
        """The engine as a client starts it."""
        return InMemoryEngine(serve=self.serve)

    async def serve(self, link: MemoryLink, rank: int, host: TaskHost) -> None:
        self.running, self.pooled, self.paused = {}, [], False
        inputs = None
        try:
            with anyio.CancelScope() as scope:
                host.on_terminate = scope.cancel
                handshake = link.connect_handshake()
                handshake.send_nowait([msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": False})])
                await handshake.drain(1)
                inputs, self._outputs, self._rank = link.connect_inputs(), link.connect_outputs(), rank
                inputs.send_nowait([msgspec.msgpack.encode(REGISTRATION)])
                handshake.send_nowait([msgspec.msgpack.encode({"status": "READY", "local": True, "headless": False})])
                await self._work(inputs)
        finally:
            for frames in inputs.drain_nowait() if inputs is not None else ():
                self._take(frames)
            if not host.terminated:
                self.finished.update(self.running, self.pooled)  # killed: nobody need abort what has died
                self.running, self.pooled = {}, []

    async def _work(self, inputs: MemoryDealer) -> None:
        while True:
            busy = self.pooled or any(one.remaining for one in self.running.values())
            for frames in inputs.drain_nowait() if busy else await inputs.drain():
                self._take(frames)
            self._step(self._outputs)
            await anyio.lowlevel.checkpoint()

    def _take(self, frames: list[Any]) -> None:
        message = NEWEST.decode_input(frames)
        if isinstance(message, AbortRequests):
            for wire_id in message.request_ids:
                self.running.pop(wire_id, None)
                if wire_id in self.pooled:
                    self.pooled.remove(wire_id)
        elif isinstance(message, UtilityCall):
            self._answer(message)
        elif message.pooling_params is not None:
            self.pooled.append(message.request_id)
        else:
            limit = message.sampling_params.max_tokens
            endless = limit > ENDLESS_TOKENS
            prompt = list(message.prompt_token_ids)
            self.running[message.request_id] = _Running(prompt, 2 if endless else limit, endless)

    def _answer(self, call: UtilityCall) -> None:
        self.calls += 1
        if call.method == "die":
            raise TaskExit(9)
        if call.method == "silence":
            return
        if call.method in ("pause_generation", "resume_scheduler"):
            self.paused = call.method == "pause_generation"
        reply = UtilityOutput(call.call_id, None, ANSWERS.get(call.method))
        self._send(utility_output=reply)

    def _step(self, outputs: MemoryPush) -> None:
        batch = []
        for wire_id, one in [*self.running.items()]:
            if not one.remaining:
                continue
            one.remaining -= 1
            token = next_token(0, one.tokens, 1000)
            one.tokens.append(token)
            ends = not one.remaining and not one.endless
            batch.append(EngineCoreOutput(wire_id, [token], finish_reason=1 if ends else None))
            if ends:
                del self.running[wire_id]
                self.finished.add(wire_id)
        for wire_id in self.pooled:
            vector = Tensor("float32", [2], struct.pack("<2f", 1.0, 2.0))
            batch.append(EngineCoreOutput(wire_id, [], pooling_output=vector, finish_reason=0))
            self.finished.add(wire_id)
        self.pooled.clear()
        if batch:
            self._send(outputs=batch)

    def _send(self, **fields: Any) -> None:
        self._outputs.send_nowait(NEWEST.encode_outputs(EngineCoreOutputs(engine_index=self._rank, **fields)))
