"""The trace context of whoever sends a request, for the engine's spans.

Owns the look at OpenTelemetry, where the program uses it: it is never imported by us for the first time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module

__all__ = ["current_trace_headers"]


def current_trace_headers() -> Mapping[str, str] | None:
    """``traceparent`` and ``tracestate`` (W3C) of the span that the calling task is in; ``None``: of none."""
    if "opentelemetry.trace" not in sys.modules:  # then nobody can have begun a span
        return None
    propagation = import_module("opentelemetry.trace.propagation.tracecontext")
    headers: dict[str, str] = {}
    propagation.TraceContextTextMapPropagator().inject(headers)
    return headers or None
