"""The checks, one module for each family. Importing this package registers all of them."""

from __future__ import annotations

from . import (
    aborts,
    encoding,
    ending,
    handshake,
    load,
    logprobs,
    malformed,
    outputs,
    pausing,
    pooling,
    prefix_cache,
    requests,
    sampling,
    stopping,
    utilities,
)

__all__ = [
    "aborts",
    "encoding",
    "ending",
    "handshake",
    "load",
    "logprobs",
    "malformed",
    "outputs",
    "pausing",
    "pooling",
    "prefix_cache",
    "requests",
    "sampling",
    "stopping",
    "utilities",
]
