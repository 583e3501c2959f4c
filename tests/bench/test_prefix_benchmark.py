"""``anyengine bench prefix``: that the second request computes its own end alone, and that it costs less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from anyengine.cli import main

pytestmark = pytest.mark.blocking_ok  # a command of its own: nobody else is in the loop


def test_a_shared_beginning_is_computed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = make_tiny_model("llama", tmp_path / "llama", vocab_size=30_000, max_position_embeddings=2048)
    typed = ["bench", "prefix", "--model", str(model_dir), "--num-threads", "1", "--rounds", "2"]
    assert main(typed) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["prefix_tokens"], document["own_tokens"], document["rounds"]) == (1000, 16, 2)
    # 62 blocks of 16 tokens are there; what is left of the prefix fills a block with tokens that differ.
    assert document["computed_tokens"] == [1016, 1016 - 992]
    assert printed.err == "anyengine: round 1 of 2\nanyengine: round 2 of 2\n"
    assert main([*typed[:4], "--own-tokens", "0"]) == 2
