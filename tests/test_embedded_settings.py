"""What an embedded engine is told is checked where it is told: parameter, value, remedy."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from anyengine import EmbeddedEngine, EngineClient
from anyengine.config import EngineLaunch
from anyengine.engine.start import runner_factory


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": ""}, "model='' must be a non-empty str: an alias"),
        ({"model": 3}, "model=3 must be"),
        ({"dtype": "fp8"}, "dtype='fp8' must be one of 'auto'"),
        ({"dtype": None}, "dtype=None must be one of"),
        ({"device": 3}, "device=3 must be"),
        ({"max_model_len": "4k"}, "max_model_len='4k' must be an int of at least 2, or None for what the model says"),
        ({"max_model_len": 1}, "max_model_len=1 must be at least 2"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs=True must be an int"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens=None must be an int of at least 1"),
        ({"kv_cache_memory_bytes": 1.5}, "kv_cache_memory_bytes=1.5 must be an int"),
        ({"max_loras": -1}, "max_loras=-1 must be at least 0"),
        ({"num_threads": 0}, "num_threads=0 must be at least 1, or None for torch's own choice"),
        ({"seed": None}, "seed=None must be an int"),
        ({"enforce_eager": 1}, "enforce_eager=1 must be True or False"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
        ({"in_process": 1}, "in_process=1 must be True or False"),
        ({"max_logprobs": -2}, "max_logprobs=-2 must be at least -1"),
        ({"profile_dir": 3}, "profile_dir=3 must be"),
        (
            {"logits_processors": "a:b"},
            "logits_processors='a:b' must be a sequence of str, each the name of an entry point",
        ),
        ({"logits_processors": None}, "logits_processors=None must be a sequence"),
        ({"logits_processors": ["a", 3]}, "logits_processors=['a', 3] must be a sequence"),
        ({"logits_processors": ["a:"]}, "logits_processors=['a:'] must be a sequence"),
        ({"logits_processors": [":a"]}, "logits_processors=[':a'] must be a sequence"),
        ({"logits_processors": [""]}, "logits_processors=[''] must be a sequence"),
        ({"logits_processors": ["a", "a"]}, "logits_processors=['a', 'a'] must have each name once"),
        (
            {"logits_processors": ["a"], "runner": "m:f"},
            "logits_processors has no meaning for runner='m:f', which samples by itself",
        ),
        ({"runner": "x"}, "runner='x' must be 'transformers', or 'module:factory'"),
        ({"runner_options": [1]}, "runner_options="),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        EmbeddedEngine(**given)


def test_a_client_of_no_model() -> None:
    with pytest.raises(ValueError, match="model='' must be a non-empty str"):
        EngineClient("")  # the present directory is none


@pytest.mark.parametrize(
    ("alias", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16"), ("auto", "auto")]
)
def test_names_of_dtypes(alias: Any, dtype: str) -> None:
    """The engine, in whatever process, is told torch's name."""
    engine = EmbeddedEngine("m", dtype=alias)
    launch = msgspec.json.encode(EngineLaunch(handshake_address="tcp://a:1", engine=engine))
    crossed = msgspec.json.decode(launch, type=EngineLaunch).engine
    assert crossed == engine
    assert (engine.model, engine.dtype) == ("m", dtype)


def test_names_of_plugins_cross() -> None:
    engine = EmbeddedEngine("m", logits_processors=["a", "b.c:d.e"])
    launch = msgspec.json.encode(EngineLaunch(handshake_address="tcp://a:1", engine=engine))
    crossed = msgspec.json.decode(launch, type=EngineLaunch).engine
    assert crossed == engine == EmbeddedEngine("m", logits_processors=("a", "b.c:d.e"))


@pytest.mark.parametrize("runner", ["no_such_module:f", "anyengine.testing.toy_runner:nothing"])
def test_a_runner_that_cannot_be_found_is_named(runner: str) -> None:
    with pytest.raises(ValueError, match=f"runner='{runner}' cannot be found"):
        runner_factory(runner)
