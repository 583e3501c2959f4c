"""Log-probabilities on their way to a consumer: a row for each token, at any pace, whatever an engine sends."""

from __future__ import annotations

import copy
import pickle
from array import array
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from engines import misbehaving
from hypothesis import given
from hypothesis import strategies as st
from scripted_peer import BROKEN_LOG_PROBS

from anyengine import (
    EngineClient,
    FlatLogprobs,
    Logprob,
    OutputKind,
    OutputProcessingError,
    RequestOutput,
    SamplingParams,
    Tensor,
)
from anyengine._client.requests.scores import ScoredRequestState, Scores
from anyengine._wire import EngineCoreOutput, LogprobsLists

pytestmark = pytest.mark.anyio

PROMPT = [1, 2, 3, 4]
ASKED: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": 1}
# What the peer says: token t has the log-probability -t/10 and the rank t, and 101, 102, ... come after it.
ROWS = {t: {t: (-t / 10, t), 101: (-1.0, 1), 102: (-2.0, 2)} for t in (5, 6, 7, 8)}


def plain(rows: FlatLogprobs | None) -> list[Any]:
    assert rows is not None
    return [row and {token: (pytest.approx(entry.logprob), entry.rank) for token, entry in row.items()} for row in rows]


async def outputs_of(client: EngineClient, **params: Any) -> list[RequestOutput]:
    return [out async for out in client.generate(PROMPT, SamplingParams(**{**ASKED, **params}))]


@pytest.mark.feature("R12", "R13", "O09")
@pytest.mark.parametrize("how", ["good", "together"])
@pytest.mark.parametrize("kind", list(OutputKind))
async def test_a_row_for_each_token(kind: OutputKind, how: str) -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("scores", how)) as client:
            outs = await outputs_of(client, output_kind=kind)
    assert [len(out.logprobs or ()) for out in outs] == [len(out.token_ids) for out in outs]
    if kind is OutputKind.DELTA:
        rows = [row for out in outs for row in plain(out.logprobs)]
        assert [out.prompt_logprobs for out in outs].count(None) == len(outs) - 1  # once
    else:
        rows = plain(outs[-1].logprobs)
        assert all(out.prompt_logprobs is not None for out in outs if out.token_ids)
    assert rows == [ROWS[token] for token in (5, 6, 7, 8)]
    assert [out.cumulative_logprob for out in outs][-1] == pytest.approx(-2.6)
    prompt_rows = next(out.prompt_logprobs for out in outs if out.prompt_logprobs is not None)
    assert plain(prompt_rows) == [
        None,
        {11: (-1.1, 11), 101: (-1.0, 1)},
        {12: (-1.2, 12), 101: (-1.0, 1)},
        {13: (-1.3, 13), 101: (-1.0, 1)},
    ]
    assert outs[-1].logprobs is not None and outs[-1].logprobs.chosen()[-1] == pytest.approx(-0.8)


async def test_only_who_asks_gets_them() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("scores", "good")) as client:
            outs = await outputs_of(client, logprobs=None, prompt_logprobs=None)
            chosen = await outputs_of(client, logprobs=None, prompt_logprobs=None, logprob_token_ids=[101])
    assert {(out.logprobs, out.prompt_logprobs, out.cumulative_logprob) for out in outs} == {(None, None, None)}
    assert [list(row or ()) for out in chosen for row in out.logprobs or ()] == [[t, 101] for t in (5, 6, 7, 8)]


async def test_outputs_share_nothing() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("scores", "good")) as client:
            outs = await outputs_of(client, output_kind=OutputKind.CUMULATIVE)
    seen = [copy.deepcopy(plain(out.logprobs)) for out in outs]
    assert seen[-1][: len(seen[0])] == seen[0]
    assert [len(rows) for rows in seen] == [len(out.token_ids) for out in outs]


@pytest.mark.parametrize("what", BROKEN_LOG_PROBS)
async def test_broken_rows_are_one_requests_error(what: str) -> None:
    """What came before them is delivered, tokens and rows; another request goes on."""
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("scores", what)) as client:
            got: list[int] = []
            with pytest.raises(OutputProcessingError) as caught:
                async for out in client.generate(PROMPT, SamplingParams(**ASKED)):
                    got += out.token_ids
            partial = caught.value.partial
            assert got == partial.token_ids == [5]
            assert plain(partial.logprobs) == [ROWS[5]]
            assert pickle.loads(pickle.dumps(partial)).logprobs == partial.logprobs
            assert client.statistics()["requests_in_flight"] == 0
            others = [out async for out in client.generate(PROMPT, SamplingParams())]
            assert [token for out in others for token in out.token_ids] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("asked", "hint"), [({"prompt_logprob_token_ids": [[1], [2], [3]]}, "V2 model runner"), ({}, "not 6")]
)
async def test_what_an_engine_leaves_out_is_missed(asked: dict[str, Any], hint: str) -> None:
    prompt = PROMPT if asked else [1] * 7
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("scores", "good")) as client:
            with pytest.raises(OutputProcessingError, match=hint):
                async for _ in client.generate(prompt, SamplingParams(**{**ASKED, **asked})):
                    pass


CHUNKS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12)


@pytest.mark.feature("O09")
@given(chunks=CHUNKS, columns=st.integers(1, 5))
def test_any_pace_gives_the_same_rows(chunks: list[tuple[int, bool]], columns: int) -> None:
    """Outputs of 0 to 3 tokens, taken or left to be merged, in any order: deltas add up to what is cumulative."""
    params = SamplingParams(logprobs=2)
    state = ScoredRequestState("wire", "label", SimpleNamespace(wake=lambda: None), params, 1)  # type: ignore[arg-type]
    scores, tokens, deltas = Scores(params, lambda token, context: f"{list(context)}>{token}"), 0, []
    for count, taken in [*chunks, (0, True)]:
        ids = list(range(tokens, tokens + count))
        tokens += count
        rows = np.array([[token, *range(100, 99 + columns)] for token in ids], np.int32).reshape(count, columns)
        log_probs = LogprobsLists(
            Tensor.from_array(rows),
            Tensor.from_array(-rows.astype(np.float32)),
            Tensor.from_array(np.array(ids, np.int64)),
        )
        state.push(EngineCoreOutput("wire", ids, new_logprobs=log_probs if ids else None))
        if taken:
            scores.take(state)
            deltas += list(scores.fields(everything=False)["logprobs"])
    whole = scores.fields(everything=True)
    assert deltas == list(whole["logprobs"]) and len(deltas) == tokens
    assert [next(iter(row)) for row in deltas] == list(range(tokens))
    assert whole["cumulative_logprob"] == -sum(range(tokens))
    flat = whole["logprobs"]  # a few objects, however many rows
    assert all(isinstance(column, array) for column in (flat.ends, flat.token_ids, flat.logprobs, flat.ranks))


# ------------------------------------------------------------------ the record itself


def flat(**options: Any) -> FlatLogprobs:
    return FlatLogprobs([0, 2, 3], [7, 9, 8], [-0.5, -0.25, -1.0], [0, 2, 5], **options)


@pytest.mark.feature("R16")
def test_columns_read_like_a_list_of_dicts() -> None:
    rows = [None, {7: Logprob(-0.5, 2), 9: Logprob(-0.25, 1)}, {8: Logprob(-1.0, 5)}]
    record = flat()
    assert record == rows == list(record) and rows == record
    assert record[-1] == rows[-1] and record[1:] == rows[1:] and len(record) == 3
    assert record.chosen() == [None, -0.5, -1.0]
    assert record != rows[:2] and record != 5
    assert repr(rows[1]) in repr(record)
    with pytest.raises(IndexError):
        record[3]


def test_a_token_among_the_likeliest_stands_once() -> None:
    row = FlatLogprobs([3], [7, 9, 7], [-0.5, -0.25, -0.5], [2])[0]
    assert row == {7: Logprob(-0.5, 2), 9: Logprob(-0.25, 1)} and row is not None and list(row) == [7, 9]


@pytest.mark.feature("O13")
def test_texts_are_made_when_they_are_read() -> None:
    calls: list[tuple[int, list[int]]] = []

    def decode(token_id: int, context: Any) -> str:
        calls.append((token_id, list(context)))
        return f"<{token_id}>"

    record = flat(decode=decode, preceding=(1, 2, 3, 4))
    assert record.chosen() and not calls
    assert record[2] == {8: Logprob(-1.0, 5, "<8>")}
    assert calls == [(8, [3, 4, 7])]  # at most four before it: two positions of its own, one of them without a token
    twin = pickle.loads(pickle.dumps(record))
    assert twin == record and twin[1][9].decoded_token == "<9>"
