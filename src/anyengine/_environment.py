"""The environment variables of vLLM that stand in for settings of our own which nobody has made.

Owns the table: name, meaning, default, what is a value. Each is read where it is used; an explicit argument wins.
Variables that concern the engine alone are not here: it inherits them (docs/vllm.md has the list).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

__all__ = [
    "ALLOW_INSECURE_SERIALIZATION",
    "ENGINE_READY_TIMEOUT_S",
    "MAX_NUM_BAD_WORDS",
    "MAX_N_SEQUENCES",
    "RPC_BASE_PATH",
    "VARIABLES",
    "WORKER_SHUTDOWN_TIMEOUT_S",
    "Variable",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable. ``parse`` raises ``ValueError`` for what is no value of it."""

    name: str
    sets: str
    default: T
    parse: Callable[[str], T]
    expected: str

    def value(self, environment: Mapping[str, str] | None = None) -> T:
        """What the variable says in ``environment`` (by default that of this process); empty is as good as not set.

        Raises:
            ValueError: it says nothing that makes sense.
        """
        text = (os.environ if environment is None else environment).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"the environment variable {self.name}={text!r} must be {self.expected}") from None


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError
    return count


def _switch(text: str) -> bool:
    return bool(int(text))


def _directory(text: str) -> str:
    if not Path(text).is_dir():
        raise ValueError
    return text


_SECONDS: Final = "a number of seconds above 0"
_COUNT: Final = "a whole number of at least 1"

ENGINE_READY_TIMEOUT_S: Final = Variable(
    "VLLM_ENGINE_READY_TIMEOUT_S", "startup_timeout_s of a client", 600.0, _seconds, _SECONDS
)
RPC_BASE_PATH: Final = Variable[str | None](
    "VLLM_RPC_BASE_PATH",
    "where the private directories of a client and its engines are made",
    None,
    _directory,
    "a directory that exists",
)
WORKER_SHUTDOWN_TIMEOUT_S: Final = Variable(
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
    "how long the workers of a vLLM engine may take to end, after it or with it",
    5.0,
    _seconds,
    _SECONDS,
)
MAX_N_SEQUENCES: Final = Variable("VLLM_MAX_N_SEQUENCES", "the largest n of SamplingParams", 16384, _count, _COUNT)
MAX_NUM_BAD_WORDS: Final = Variable(
    "VLLM_MAX_NUM_BAD_WORDS", "the most bad_words of SamplingParams", 128, _count, _COUNT
)
ALLOW_INSECURE_SERIALIZATION: Final = Variable(
    "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "nothing: a client never unpickles, and warns once",
    False,
    _switch,
    "0 or 1",
)

VARIABLES: Final = (
    ENGINE_READY_TIMEOUT_S,
    RPC_BASE_PATH,
    WORKER_SHUTDOWN_TIMEOUT_S,
    MAX_N_SEQUENCES,
    MAX_NUM_BAD_WORDS,
    ALLOW_INSECURE_SERIALIZATION,
)
