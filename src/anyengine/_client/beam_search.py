"""Beam search: many requests of one token each, and one output of the best answers.

Owns the loop. Which beams are kept is :mod:`.requests.beams`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from anyengine._rules import reject
from anyengine.outputs import RequestFacts, RequestOutput
from anyengine.params import BeamSearchParams, SamplingParams

from .inputs.multimodal import continued_by
from .inputs.prompts import Embeddings, Prompt
from .inputs.request_builder import RequestBuilder
from .inputs.request_fields import RequestFields
from .requests.beams import Beam, Beams
from .requests.desk import RequestDesk
from .requests.many import RequestGroup
from .requests.scores import LogprobColumns

__all__ = ["search_beams"]


async def search_beams(
    find_desk: Callable[[], RequestDesk],
    prompt: Prompt,
    params: BeamSearchParams,
    label: str | None,
    fields: RequestFields,
) -> RequestOutput:
    """See :meth:`EngineClient.beam_search`."""
    desk = find_desk()
    builder = desk.builder
    prepared = await builder.encode(prompt, None, fields.get("tokenization_kwargs"))
    if isinstance(prepared, Embeddings):
        reject("prompt", "embeddings", "cannot be continued token by token", "give text or token ids")
    label, _ = builder.next_ids(label)
    beams = Beams(params, prepared, builder.eos_token_id)
    room = builder.limits.max_model_len - len(prepared)
    num_steps = min(params.max_tokens, max(room, 1))  # of a prompt without room, the first step says so
    step = SamplingParams(
        logprobs=2 * params.beam_width, max_tokens=1, temperature=params.temperature, detokenize=False
    )
    others: Any = {name: value for name, value in fields.items() if name not in ("tokenization_kwargs", "prompt_text")}
    whole: Any = {"limits_s": {}, "ordered": False, "concurrency": None, "on_error": "raise"}
    request = partial(RequestGroup, find_desk, params=step, label=label, fields=others, **whole)
    charge = desk.charges.open_search(label, fields, len(prepared), params.beam_width * num_steps)
    try:
        await _extend(beams, num_steps, prepared, partial(request, charge=charge))
    finally:
        if charge is not None:
            charge.settle()
    text = getattr(prepared, "text", None)
    facts = RequestFacts(
        prompt=fields.get("prompt_text") if text is None else text,
        prompt_token_ids=tuple(prepared),
        num_prompt_tokens=len(prepared),
    )
    best = enumerate(beams.best())
    first, *rest = [_output(builder, params, label, facts, index, beam, num_steps) for index, beam in best]
    return replace(first, others=tuple(rest))


async def _extend(
    beams: Beams,
    num_steps: int,
    prompt: Sequence[int],
    request: Callable[[list[list[int]]], RequestGroup[RequestOutput]],
) -> None:
    """Add up to ``num_steps`` tokens to the beams, with one ``request`` of many prompts for each step."""
    for _ in range(num_steps):
        prompts = [continued_by(prompt, beam.token_ids) for beam in beams.running]
        rows: list[Any] = [None] * len(prompts)
        async with request(prompts) as group:
            async for index, output in group:
                assert output.logprobs is not None
                rows[index] = output.logprobs[0] if output.logprobs else None
        if None in rows:  # aborted, all in one go: what there is so far
            return
        beams.extend(rows)
        if not beams.running:
            return


def _output(
    builder: RequestBuilder,
    params: BeamSearchParams,
    label: str,
    facts: RequestFacts,
    index: int,
    beam: Beam,
    num_steps: int,
) -> RequestOutput:
    shown = beam.token_ids[:-1] if beam.ends_with_eos else beam.token_ids
    finished = beam.has_ended or len(beam.token_ids) >= num_steps
    return RequestOutput(
        request_id=label,
        index=index,
        text=builder.decode(shown, skip_special_tokens=params.skip_special_tokens),
        token_ids=list(beam.token_ids),
        finish_reason="stop" if beam.has_ended else "length" if finished else "abort",
        stop_reason=builder.eos_token_id if beam.has_ended else None,
        num_prompt_tokens=facts.num_prompt_tokens,
        num_output_tokens=len(beam.token_ids),
        logprobs=_columns(beam.rows).frozen(builder.token_texts),
        cumulative_logprob=beam.cumulative_logprob,
        facts=facts,
    )


def _columns(rows: Sequence[Any]) -> LogprobColumns:
    columns = LogprobColumns()
    for row in rows:
        columns.token_ids.extend(row)
        columns.logprobs.extend(entry.logprob for entry in row.values())
        columns.ranks.append(next(iter(row.values())).rank or 0)
        columns.ends.append(len(columns.token_ids))
    return columns
