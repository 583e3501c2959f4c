"""What several ranks say of themselves, as if one engine had said it.

Owns the rules: which numbers add up, which one is the least, what all have to agree on. Pure.
Mirrors vLLM 0.32.0 ``MPClient._apply_ready_response`` for lengths and blocks; it does not add up the caches' tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from anyengine._wire import EngineCoreReadyResponse

__all__ = ["merge_registrations"]

_LEAST = "max_model_len"  # whichever rank a request goes to, it fits
_SUMS = frozenset({"num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"})
_MUST_AGREE = ("block_size", "dtype")


def merge_registrations(
    registrations: Iterable[EngineCoreReadyResponse | None],
) -> tuple[EngineCoreReadyResponse | None, str | None]:
    """All ranks as one, and a warning if they are not alike; ``None`` if none of them said anything.

    The least ``max_model_len``; the sums of the caches' sizes, unless one is not known; of anything else, known to this
    client or not (``received``), what all that said anything agree on, or else the default.
    """
    ranks = list(registrations)
    said = [ready for ready in ranks if ready is not None]
    if not said:
        return None, None
    merged = msgspec.structs.replace(said[0])
    for field in msgspec.structs.fields(EngineCoreReadyResponse):
        name = field.name
        values = [getattr(ready, name) for ready in said]
        if name == _LEAST:
            value: Any = min(values)
        elif name in _SUMS:
            value = None if len(said) < len(ranks) or None in values else sum(values)
        else:
            value = _agreed(values, field.default)
        setattr(merged, name, value)
    received = {
        key: _agreed([ready.received.get(key) for ready in said], None) for ready in said for key in ready.received
    }
    known = {key: getattr(merged, key) for key in received if key in merged.__struct_fields__}
    merged.__dict__["received_map"] = received | known
    differing = [
        f"{name} ({', '.join(str(getattr(ready, name)) for ready in said)})"
        for name in _MUST_AGREE
        if any(getattr(ready, name) != getattr(said[0], name) for ready in said)
    ]
    return merged, f"the ranks of one client differ in {' and '.join(differing)}" if differing else None


def _agreed(values: list[Any], default: Any) -> Any:
    return values[0] if all(value == values[0] for value in values) else default
