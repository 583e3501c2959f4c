"""Real vLLM engine cores on tiny models, and what one of them holds of the operating system."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from tiny_models import make_tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anyengine import VLLMEngine

__all__ = [
    "MAX_MODEL_LEN",
    "MAX_NUM_SEQS",
    "VLLM_ENV",
    "Holdings",
    "make_vllm_model",
    "on_asyncio",
    "on_trio",
    "one_process",
    "tiny_vllm",
    "vllm_args",
]

MAX_MODEL_LEN = 8192
"""In tokens: a request can be so long that it is not over before something has happened to it."""
MAX_NUM_SEQS = 64

_GEOMETRY = {
    "hidden_size": 128,  # vLLM's attention on CPUs wants heads of 64
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_MODEL_LEN,
}
_ARGS = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": MAX_NUM_SEQS}
VLLM_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}

on_asyncio = pytest.mark.parametrize("anyio_backend", [("asyncio", {})], ids=["asyncio"], scope="module")
on_trio = pytest.mark.parametrize("anyio_backend", [("trio", {})], ids=["trio"], scope="module")
"""For what is the same on every loop: it is the engine that is asked, and each start of one takes 10 s of CPU time."""

one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Part of an engine's ``env``: without a worker process it starts in half the time."""


def make_vllm_model(directory: Path) -> Path:
    """A model of random weights that vLLM and transformers both run, with a tokenizer of bytes."""
    make_tiny_model("qwen2", directory, **_GEOMETRY)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


def tiny_vllm(python: str, model: Path | str, *, env: dict[str, str] | None = None, **args: Any) -> VLLMEngine:
    """A small engine of vLLM for ``model``; ``args`` are vLLM's."""
    return VLLMEngine(str(model), python=python, env={**VLLM_ENV, **(env or {})}, args={**_ARGS, **args})


def vllm_args(model: Path | str) -> dict[str, Any]:
    """The engine arguments of :func:`tiny_vllm`, all of them: for vLLM's own front end."""
    return {"model": str(model), **_ARGS}


def _maps_of(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):  # one of those that come and go while it loads
        return ""


class Holdings(NamedTuple):
    """What the processes of one engine hold: taken while it runs, asked for when it has ended."""

    processes: list[psutil.Process]
    shared_memory: frozenset[str]

    @classmethod
    def of(cls, pid: int) -> Holdings:
        leader = psutil.Process(pid)
        processes = [leader, *leader.children(recursive=True)]
        maps = "".join(map(_maps_of, processes))
        return cls(processes, frozenset(re.findall(r"/dev/shm/psm_\w+", maps)))

    @property
    def workers(self) -> list[psutil.Process]:
        """vLLM's worker processes: children that do its work, unlike multiprocessing's resource tracker."""
        return [process for process in self.processes[1:] if "resource_tracker" not in " ".join(process.cmdline())]

    def left(self) -> list[str]:
        """What is still there: processes that run, segments of shared memory."""
        running = [p for p in self.processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        return [*map(str, running), *(name for name in self.shared_memory if Path(name).exists())]
