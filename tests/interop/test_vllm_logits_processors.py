"""vLLM's own logits processors: the engine argument reaches it, and so does what a request asks of them."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from vllm_engines import make_vllm_model, on_trio, one_process, tiny_vllm

from anyengine import EngineClient, SamplingParams

pytestmark = pytest.mark.anyio

FORCING = """
import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

class Forcing(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        token_id = (params.extra_args or {}).get("force")
        if token_id is None:
            return None

        def force(output_token_ids, logits):
            forced = torch.full_like(logits, -torch.inf)
            forced[token_id] = 0.0
            return forced

        return force
"""


@pytest.mark.feature("R33")
@on_trio
async def test_a_processor_changes_the_answers_of_those_who_ask(vllm_python: str, tmp_path: Path) -> None:
    (tmp_path / "forcing.py").write_text(FORCING)
    engine = tiny_vllm(
        vllm_python,
        make_vllm_model(tmp_path / "model"),
        env={**one_process, "PYTHONPATH": str(tmp_path)},
        logits_processors=["forcing:Forcing"],
    )
    answers: dict[int | None, list[int]] = {}

    async def ask(client: EngineClient, force: int | None) -> None:
        extra = None if force is None else {"force": force}
        params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, extra_args=extra)
        answers[force] = (await client.complete([5, 6, 7], params)).token_ids

    with anyio.fail_after(200):
        async with EngineClient(engine=engine, startup_timeout_s=120, shutdown_grace_s=30) as client:
            async with anyio.create_task_group() as tasks:
                for force in (None, 42, 43):
                    tasks.start_soon(ask, client, force)
    assert (answers[42], answers[43]) == ([42] * 9, [43] * 9)
    assert len(answers[None]) == 9 and not {42, 43} >= {*answers[None]}
