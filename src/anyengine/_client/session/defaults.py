"""What a client chooses where its user has not, by the engines that it starts.

Owns what follows from an engine's own arguments and environment. Reads nothing else.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache

from anyengine._environment import ALLOW_INSECURE_SERIALIZATION, WORKER_SHUTDOWN_TIMEOUT_S
from anyengine.config import EngineSettings, VLLMEngine

__all__ = ["default_grace_s", "warn_of_pickles"]

_logger = logging.getLogger("anyengine.client")

_GRACE_S = 5.0
_VLLM_TEARDOWN_S = 15.0  # besides its workers; twice what was seen


def default_grace_s(engines: Iterable[EngineSettings]) -> float:
    """How long the slowest of ``engines`` may take to stop in order.

    Raises:
        ValueError: an environment variable of theirs makes no sense.
    """
    return max(_GRACE_S if not isinstance(engine, VLLMEngine) else _vllm_grace_s(engine) for engine in engines)


def _vllm_grace_s(engine: VLLMEngine) -> float:
    workers_s = WORKER_SHUTDOWN_TIMEOUT_S.value({**os.environ, **engine.env})
    return _VLLM_TEARDOWN_S + workers_s + engine.understood.shutdown_timeout


def warn_of_pickles(engines: Iterable[EngineSettings]) -> None:
    """Warn, once in a process, if an engine is told that it may send pickles.

    Raises:
        ValueError: the environment variable that says so makes no sense.
    """
    added = (engine.env for engine in engines if isinstance(engine, VLLMEngine))
    if any(ALLOW_INSECURE_SERIALIZATION.value({**os.environ, **env}) for env in (*added, {})):
        _warn_once(ALLOW_INSECURE_SERIALIZATION.name)


@cache
def _warn_once(name: str) -> None:
    _logger.warning(
        "%s is set, and this client never unpickles: an answer of an engine that contains a pickle is refused", name
    )
