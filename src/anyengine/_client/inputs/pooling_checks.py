"""What pooling parameters become for this model and this engine.

Owns the choice of a task and the fields that vLLM's front end fills; its engine checks nothing, and dies of a task that
its model does not have. Mirrors vLLM 0.32.0 ``pooling_params.py`` (``PoolingParams.verify``) and
``v1/engine/input_processor.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from anyengine._protocol import EngineLimits
from anyengine._rules import reject
from anyengine._text import ModelFacts
from anyengine.params import PoolingParams

__all__ = ["POOLING_TASKS", "settle_pooling"]

POOLING_TASKS: Final = ("embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify")
_DEFAULT_TASKS: Final = ("token_embed", "token_classify", "plugin")  # in this order
_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "embed": ("dimensions", "use_activation"),
    "token_embed": ("dimensions", "use_activation"),
    "classify": ("use_activation",),
    "token_classify": ("use_activation",),
}
_STEP_PARAMETERS: Final = ("step_tag_id", "returned_token_ids")


def settle_pooling(params: PoolingParams, limits: EngineLimits, model: ModelFacts | None) -> PoolingParams:
    """``params`` with everything filled that the engine needs. ``limits`` are the engine's.

    Raises:
        RequestRejected: the engine cannot do it.
    """
    task = _task(params, limits.tasks)
    changes: dict[str, Any] = {"task": task}
    if task == "plugin" or task in _PARAMETERS:
        # From a cached prefix, its tokens would have no output.
        every_token = task not in ("embed", "classify")
        changes["skip_reading_prefix_cache"] = _either(params.skip_reading_prefix_cache, every_token)
    known = _PARAMETERS.get(task)
    if known is None:  # a plugin's parameters are its own
        return msgspec.structs.replace(params, **changes)
    if params.dimensions is not None and "dimensions" not in known:
        reject("dimensions", params.dimensions, f"means nothing for the task {task!r}", "leave it out")
    for name in known:
        changes[name] = _either(getattr(params, name), limits.pooler.get(name))
    changes["use_activation"] = _either(changes["use_activation"], True)
    _check_dimensions(changes.get("dimensions"), model)
    for name in _STEP_PARAMETERS:
        if limits.pooler.get("tok_pooling_type", limits.pooler.get("pooling_type")) == "STEP":
            changes[name] = _either(getattr(params, name), limits.pooler.get(name))
        elif (value := getattr(params, name)) is not None:
            reject(name, value, "is for models that pool steps", "leave it out")
    return msgspec.structs.replace(params, **changes)


def _either(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _task(params: PoolingParams, tasks: frozenset[str] | None) -> str:
    if tasks is None:
        reject("task", params.task, "cannot be checked: the engine does not name its tasks", "use generate()")
    possible = [task for task in POOLING_TASKS if task in tasks]
    if not possible:
        reject("task", params.task, "needs a pooling model, and this engine generates only", "use generate()")
    task = params.task or next((task for task in _DEFAULT_TASKS if task in possible), None)
    if task not in possible:
        reject("task", task, "is none of the engine's", f"use one of {', '.join(map(repr, possible))}")
    return task


def _check_dimensions(dimensions: int | None, model: ModelFacts | None) -> None:
    """A model that was not trained for it would be cut all the same, and mean nothing."""
    if dimensions is None:
        return
    sizes = () if model is None else model.embedding_sizes
    if sizes == ():
        reject("dimensions", dimensions, "is for Matryoshka embeddings, which the model's are not", "leave it out")
    if sizes and dimensions not in sizes:
        reject("dimensions", dimensions, "is none of the model's", f"use one of {', '.join(map(str, sizes))}")
    if model is not None and model.hidden_size is not None and dimensions > model.hidden_size:
        reject("dimensions", dimensions, "exceeds the embedding", f"use at most {model.hidden_size}")
