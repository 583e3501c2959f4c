"""Refusals of the low level in the words of somebody who writes parameters, not messages.

Owns the translation. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from anyengine.exceptions import EncodeError, RequestRejected

__all__ = ["in_users_words"]

_CARRIERS: Final = ("sampling_params.", "pooling_params.")
"""What stands before a parameter's name in a message."""


@contextmanager
def in_users_words(label: str) -> Iterator[None]:
    """Have what is refused inside named as the user wrote it: ``logit_bias``, the request by its label.

    Raises:
        RequestRejected: instead of an :class:`EncodeError`; or the one that was raised, renamed.
    """
    try:
        yield
    except EncodeError as exc:
        raise RequestRejected(
            f"the request cannot be sent: {_without_carrier(str(exc))}",
            parameter=None if exc.field is None else _without_carrier(exc.field),
            value=exc.type_name,
            remedy="leave it out, or use an engine of a newer release",
            request_id=label,
        ) from exc
    except RequestRejected as exc:
        exc.request_id = label
        if exc.parameter is not None and (parameter := _without_carrier(exc.parameter)) != exc.parameter:
            exc.parameter = parameter
            exc.args = (_without_carrier(str(exc)), *exc.args[1:])
        raise


def _without_carrier(text: str) -> str:
    for carrier in _CARRIERS:
        text = text.replace(carrier, "")
    return text
