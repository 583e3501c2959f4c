"""Which dialect an engine speaks, from what it says of itself when it registers.

Owns the choice; must not know what a dialect does.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

from anyengine.exceptions import RemoteProtocolError

from .dialect import DIALECTS, NEWEST, Dialect, dialect_between
from .layouts import OLDEST, ROWS, Release
from .ready import EngineCoreReadyResponse

__all__ = ["dialect_for", "newer_than_known", "select_dialect"]

_VERSION: Final = r"v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?"


def dialect_for(version: str | None) -> Dialect:
    """The dialect for a version string; the newest for ``None``, for later releases and for builds without a release
    number.

    Raises:
        RemoteProtocolError: the release is older than any dialect.
    """
    release = _release_of(version)
    if release is None:
        return NEWEST
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise RemoteProtocolError(f"the engine runs vLLM {version}; this client speaks {oldest} and later")
    return [dialect for dialect in DIALECTS if dialect.since <= release][-1]


def select_dialect(ready: EngineCoreReadyResponse | None, *, version: str | None = None) -> Dialect:
    """The dialect of the engine that registered with ``ready`` (``None``: an empty frame).

    ``version`` is what the caller knows from elsewhere; it counts only if the engine does not say. An engine that says
    nothing is one of the releases that say nothing: see :attr:`Dialect.probe` and :meth:`Dialect.narrowed`.

    Raises:
        RemoteProtocolError: the release is older than any dialect.
    """
    stated = (ready.vllm_version if ready is not None else None) or version
    if stated is not None:
        return dialect_for(stated)
    keys = frozenset(ready.received) if ready is not None else frozenset()
    rows = ROWS["EngineCoreReadyResponse"]
    for (since, names), (until, _) in pairwise(rows):
        if keys == frozenset(names) and "vllm_version" not in names:
            return dialect_between(since, until)
    return NEWEST  # someone else's engine core: no release of vLLM sends these keys


def newer_than_known(ready: EngineCoreReadyResponse | None) -> str | None:
    """The warning that an engine's release is newer than the newest dialect; ``None`` if it is not."""
    version = ready.vllm_version if ready is not None else None
    release = _release_of(version)
    if release is None or release[:2] <= NEWEST.since[:2]:
        return None
    known = ".".join(map(str, NEWEST.since[:2]))
    return (
        f"the engine runs vLLM {version}, newer than {known}, the newest release that this client knows: it is spoken"
        f" to as {known}, and what it says beyond that is ignored"
    )


def _release_of(version: str | None) -> Release | None:
    match = re.match(_VERSION, version or "")
    if not match or version is None:
        return None
    release = (int(match[1]), int(match[2]), int(match[3] or 0))
    # A build from a checkout without tags calls itself 0.1.dev1.
    return None if release < OLDEST and "dev" in version else release
