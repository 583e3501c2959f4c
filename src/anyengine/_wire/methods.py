"""Utility methods by release: which an engine has, and how many arguments each takes at most.

Owns data only. A surplus argument is a failure reply, and an unknown method too: a client asks here before it sends.
Adding a release means adding rows. What must not be called at all stands here too, with the reason: an engine looks a
name up among all its attributes. Mirrors the public methods of vLLM's ``EngineCore``, ``EngineCoreProc`` and
``DPEngineCoreProc`` (``v1/engine/core.py``) that its own client calls; engines have more attributes than these.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from .layouts import Release

__all__ = ["HARMFUL", "HARMFUL_IN_WORKERS", "METHODS", "OTHER_METHODS", "PROBES", "Arity", "arity_at"]

Arity: TypeAlias = int | None
"""How many arguments at most; ``None``: there is no such method."""

_ALWAYS: Final[Release] = (0, 12, 0)

METHODS: Final[dict[str, tuple[tuple[Release, Arity], ...]]] = {
    "add_lora": ((_ALWAYS, 1),),
    "barrier": (((0, 21, 0), 0),),
    "collective_rpc": ((_ALWAYS, 4),),
    "commit_prepared_elastic_ep": (((0, 27, 0), 0),),
    "compute_weight_checksums": (((0, 32, 0), 0),),
    "eep_handle_engine_core_notification": (((0, 17, 0), 1), ((0, 27, 0), None)),
    "execute_dummy_batch": ((_ALWAYS, 0),),
    "get_kv_cache_group_metadata": (((0, 22, 0), 0), ((0, 30, 0), None), ((0, 31, 0), 0)),
    "get_supported_tasks": ((_ALWAYS, 0),),
    "get_weight_version": (((0, 27, 0), 0),),
    "handle_fault_tolerance": (((0, 27, 0), 1),),
    "is_scheduler_paused": (((0, 17, 0), 0),),
    "is_sleeping": ((_ALWAYS, 0),),
    "list_loras": ((_ALWAYS, 0),),
    "pause_generation": (((0, 33, 0), 2),),
    "pause_scheduler": (((0, 16, 0), 0), ((0, 17, 0), 2)),
    "pin_lora": ((_ALWAYS, 1),),
    "profile": ((_ALWAYS, 1), ((0, 17, 0), 2), ((0, 32, 0), 4), ((0, 33, 0), 5)),
    "reinitialize_distributed": ((_ALWAYS, 1),),
    "release_kv_cache_memory": (((0, 31, 0), 0),),
    "remove_lora": ((_ALWAYS, 1),),
    "reset_encoder_cache": (((0, 16, 0), 0),),
    "reset_mm_cache": ((_ALWAYS, 0),),
    "reset_prefix_cache": ((_ALWAYS, 1), ((0, 13, 0), 2)),
    "resume_scheduler": (((0, 16, 0), 0),),
    "save_sharded_state": ((_ALWAYS, 3),),
    "set_weight_version": (((0, 27, 0), 1),),
    "sleep": ((_ALWAYS, 1), ((0, 17, 0), 2)),
    "wake_up": ((_ALWAYS, 1),),
}

OTHER_METHODS: Final = frozenset(("get_engine_statistics",))
"""Of this project's own engine core, beside vLLM's."""

HARMFUL: Final[dict[str, str]] = {
    "shutdown": "it ends the engine; leave the client's block instead",
    "run_busy_loop": "it never returns, and the engine with it",
    "run_engine_core": "it never returns, and the engine with it",
    "process_input_sockets": "it never returns, and the engine with it",
    "process_output_sockets": "it never returns, and the engine with it",
    "step": "its result cannot be encoded, and what it computed is lost to the requests",
    "step_fn": "its result cannot be encoded, and what it computed is lost to the requests",
    "step_with_batch_queue": "its result cannot be encoded, and what it computed is lost to the requests",
    "post_step": "it is a part of the engine's own loop",
    "capture_iteration_details": "its result cannot be encoded",
    "log_error_detail": "its result cannot be encoded",
    "startup_handshake": "the handshake is over",
    "request_block_hasher": "it is a part of the engine's own loop",
    "add_request": "requests are sent, with add",
    "preprocess_add_request": "requests are sent, with add",
    "abort_requests": "requests are aborted with abort, which the client must know of",
}
"""Attributes that vLLM's engine objects have and that a call would find, in any release, and why not."""

HARMFUL_IN_WORKERS: Final[dict[str, str]] = {
    "get_kv_cache_spec": "its result cannot be encoded; get_kv_cache_group_metadata tells most of it",
    "get_kv_connector_handshake_metadata": "its result cannot be encoded",
    "get_model": "a model cannot be encoded; get_model_inspection describes it",
    "get_draft_model": "a model cannot be encoded",
    "apply_model": "it takes a function, which would have to be pickled",
    "sleep_mode_backend": "its result cannot be encoded",
    "execute_model": "it is a part of the engine's own loop",
    "sample_tokens": "it is a part of the engine's own loop",
    "take_draft_token_ids": "it is a part of the engine's own loop",
    "init_worker": "it is a part of the engine's start",
    "init_device": "it is a part of the engine's start",
    "load_model": "it is a part of the engine's start; reload_weights loads weights anew",
    "determine_available_memory": "it is a part of the engine's start",
    "initialize_from_config": "it is a part of the engine's start",
    "initialize_cache": "it is a part of the engine's start",
    "compile_or_warm_up_model": "it is a part of the engine's start",
    "shutdown": "it ends the workers, and the engine with them",
    "wait_for_comm": "it is a part of the engine's own loop",
}
"""Methods of vLLM's workers that collective_rpc would find, in any release, and why not. A result that cannot be
encoded ends the engine's output thread: it lives on, mute for everybody."""

PROBES: Final = ("is_scheduler_paused",)
"""Methods without arguments and without effect, whose existence tells releases apart that say nothing of themselves."""


def arity_at(method: str, release: Release) -> Arity:
    """How many arguments ``method`` takes in ``release``; ``None`` if it has no such method (or none that is known)."""
    found: Arity = None
    for since, arity in METHODS.get(method, ()):
        if since <= release:
            found = arity
    return found
