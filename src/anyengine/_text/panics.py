"""What a panic of the Rust code in ``tokenizers`` becomes: an ordinary error.

Owns one conversion. PyO3 raises a panic as a ``BaseException``, which nobody's ``except Exception`` sees: one request's
strange text, or a strange tokenizer file, would end everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["calling_rust"]

P = ParamSpec("P")
R = TypeVar("R")


def calling_rust(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """``function(*args, **kwargs)``.

    Raises:
        ValueError: it panicked.
    """
    try:
        return function(*args, **kwargs)
    except BaseException as exc:
        if type(exc).__name__ == "PanicException":
            raise ValueError(f"the tokenizers package panicked: {exc}") from exc  # noqa: ASYNC104 - no cancellation
        raise
