"""What a scripted engine says and hears, by position: docs/protocol.md written out by hand.

Independent of the client and of the package's own wire module, so that it can judge both. Knows no script.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

__all__ = [
    "ENGINE_CORE_DEAD",
    "FINISH",
    "changed",
    "expected_tokens",
    "next_token",
    "pack",
    "pooled",
    "prompt_hash",
    "registration",
    "reply",
    "token_output",
    "unpack",
]

pack: Callable[[Any], bytes] = msgspec.msgpack.encode
unpack: Callable[[bytes], Any] = msgspec.msgpack.decode

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
FINISH = {"stop": 0, "length": 1, "abort": 2, "error": 3, "repetition": 4}

_TAIL: list[Any] = [None, None, None, None, None, None, 0, None, None, None, None]  # positions 7 to 17
_REGISTRATION: dict[str, Any] = {
    "max_model_len": 2048,
    "num_gpu_blocks": 128,
    "block_size": 16,
    "dp_stats_address": None,
    "dtype": "float32",
    "vllm_version": "0.33.0",
    "world_size": 1,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_rank": 0,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "instance_id": "scripted",
    "supports_lora": False,
    "max_loras": 0,
    "mamba_block_size": None,
    "kv_cache_size_tokens": 2048,
    "kv_cache_max_concurrency": 1.0,
    "kv_events_config": None,
    "weight_transfer_backend": None,
    "enable_sleep_mode": True,
    "supports_draft_weight_updates": False,
    "effective_attention_block_size": None,
}


def registration(version: str, rank: int, changes: dict[str, Any]) -> dict[str, Any]:
    """The first message on the input socket (§4)."""
    return {**_REGISTRATION, "vllm_version": version, "data_parallel_rank": rank, **changes}


def token_output(
    request_id: str, token_ids: Sequence[int], finish: str | None = None, error: dict[str, Any] | None = None
) -> list[Any]:
    """EngineCoreOutput (§7): all positions, and the 19th, of 0.33, where there is an error."""
    output = [request_id, token_ids, None, None, None, FINISH[finish] if finish else None, None, *_TAIL]
    return output if error is None else [*output, error]


def changed(output: list[Any], changes: dict[int, Any]) -> list[Any]:
    """``output`` with other values at these positions, the last of which may be beyond its end."""
    if changes:
        output += [None] * (max(changes) + 1 - len(output))
        for position, value in changes.items():
            output[position] = value
    return output


def pooled(request_id: str, values: Sequence[float]) -> list[Any]:
    """EngineCoreOutput with a vector, [num_values], float32."""
    data = msgspec.msgpack.Ext(3, struct.pack(f"<{len(values)}f", *values))
    return [request_id, [], None, None, ["float32", [len(values)], data], 0, None, *_TAIL]


def batch(
    rank: int, outputs: Sequence[Any], at_s: float, load: dict[str, Any] | None = None, weights: str = "default"
) -> bytes:
    """EngineCoreOutputs (§7) with outputs; ``load`` are the scheduler's statistics."""
    return pack([rank, outputs, load, at_s, None, None, None, None, weights])


def reply(rank: int, output: Sequence[Any], at_s: float) -> bytes:
    """EngineCoreOutputs with the reply to a call: ``[call id, failure, [type info, value] or nil]``."""
    return pack([rank, [], None, at_s, output, None, None, None, None])


def prompt_hash(prompt: Sequence[int], seed: int) -> int:
    """What the tokens after ``prompt`` depend on."""
    return zlib.crc32(array("q", prompt).tobytes(), seed & 0xFFFFFFFF)


def next_token(prompt_crc: int, index: int, vocab_size: int) -> int:
    """Token ``index`` (from 0) after a prompt of this hash."""
    return zlib.crc32(index.to_bytes(8, "little"), prompt_crc) % vocab_size


def expected_tokens(
    prompt: Sequence[int], n: int, *, seed: int = 0, vocab_size: int = 1000, start: int = 0
) -> list[int]:
    """The ``n`` tokens that a scripted engine generates after ``prompt``, from number ``start`` on, if its script says
    nothing else."""
    crc = prompt_hash(prompt, seed)
    return [next_token(crc, index, vocab_size) for index in range(start, start + n)]
