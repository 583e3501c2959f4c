"""Differential: requests and visible outputs of our client and of vLLM's own InputProcessor and OutputProcessor.

Hypothesis draws requests and what an engine sends: any framing, merges, stop strings over frames, characters cut at any
byte, log-probabilities, several completions, aborts. Accepted differences are in docs/differences.md, each by its name.
"""

from __future__ import annotations

import math
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import built_tokenizers
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from offline_client import OfflineClient
from text_cases import EOS, OTHER_EOS, TOKENIZERS, make_case
from tiny_models import make_tiny_model

from anyengine import BeamSearchParams, FlatLogprobs, Logprob, RequestOutput, RequestRejected
from anyengine._client.requests.beams import Beams
from anyengine._text import ModelFacts, Tokenizer
from anyengine.testing._profiles import deep_profile

MAX_MODEL_LEN = 512
BATCH = 50  # cases in one example of Hypothesis, and in one round trip
ROUNDS = 4
EXAMPLES = 1000 if deep_profile() else 25  # in each round


class VLLM:
    """The other end of ``vllm_text_child.py``."""

    def __init__(self, python: str, model: Path, files: dict[str, str]) -> None:
        child = Path(__file__).with_name("vllm_text_child.py")
        self._process = subprocess.Popen([python, str(child)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.ask({"model": str(model), "files": files}) == "ready"

    def ask(self, message: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        encoded = msgspec.msgpack.encode(message)
        stdin.write(len(encoded).to_bytes(4, "big") + encoded)
        stdin.flush()
        head = stdout.read(4)
        if len(head) < 4:
            raise RuntimeError(f"vLLM's process ended with code {self._process.wait(timeout=60)}: see its stderr")
        return msgspec.msgpack.decode(stdout.read(int.from_bytes(head, "big")), strict=False)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that vLLM takes as a model's; nobody loads its weights."""
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model("qwen2", directory, vocab_size=512, max_position_embeddings=MAX_MODEL_LEN, eos_token_id=EOS)
    built_tokenizers.built("byte_level")._backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}'
    )
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, {OTHER_EOS}]}}')
    return directory


@pytest.fixture(scope="module")
def vllm(vllm_python: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    directory = tmp_path_factory.mktemp("tokenizers")
    files = {name: str(directory / f"{name}.json") for name in TOKENIZERS}
    for name, file in files.items():
        built_tokenizers.built(name)._backend.save(file)
    reference = VLLM(vllm_python, model, files)
    yield reference
    reference.close()


@pytest.fixture(scope="module")
def tokenizers(model: Path) -> dict[str, Tokenizer]:
    facts = ModelFacts.read(model)
    return {name: Tokenizer(built_tokenizers.built(name)._backend, facts) for name in TOKENIZERS}


@pytest.mark.feature("R01", "R07", "R09", "R20", "R21", "O09", "O12", "O04")
@pytest.mark.case("K46", "K48", "K49", "K50")
@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.timeout(0 if deep_profile() else 300)
def test_requests_and_outputs_are_vllms(vllm: VLLM, tokenizers: dict[str, Tokenizer], number: int) -> None:
    @seed(number)
    @settings(max_examples=EXAMPLES, phases=[Phase.generate])  # shrinking is ours: it takes minutes for a batch
    @given(st.lists(st.binary(min_size=24, max_size=150), min_size=BATCH, max_size=BATCH))
    def run(drawn: list[bytes]) -> None:
        failing.extend(failures(vllm, tokenizers, drawn))

    failing: list[tuple[bytes, str]] = []
    run()
    if failing:
        story = shrunk(vllm, tokenizers, failing)
        pytest.fail(f"{len(failing)} of {BATCH * EXAMPLES} cases differ; the smallest:\n{story}", pytrace=False)


def failures(vllm: VLLM, tokenizers: dict[str, Tokenizer], drawn: list[bytes]) -> list[tuple[bytes, str]]:
    cases = [make_case(data) for data in drawn]
    ours = anyio.run(run_all, tokenizers, cases)
    theirs = vllm.ask([case | {"sent": sent} for case, (sent, _) in zip(cases, ours, strict=True)])
    found = []
    for data, case, (_, seen), answer in zip(drawn, cases, ours, theirs, strict=True):
        try:
            compare(case, seen, answer)
        except AssertionError as difference:
            found.append((data, str(difference)))
    return found


def shrunk(vllm: VLLM, tokenizers: dict[str, Tokenizer], failing: list[tuple[bytes, str]]) -> str:
    """The story of the smallest case that still fails: cut at the end, then with bytes set to zero."""
    smallest, story = min(failing, key=lambda item: len(item[0]))
    while shorter := failures(vllm, tokenizers, [smallest[:count] for count in range(len(smallest))]):
        smallest, story = shorter[0]
    for position in range(len(smallest)):
        if smallest[position]:
            changed = smallest[:position] + b"\0" + smallest[position + 1 :]
            for smallest, story in failures(vllm, tokenizers, [changed]):  # noqa: B007
                pass
    return f"{smallest!r}\n{story}"


async def run_all(tokenizers: dict[str, Tokenizer], cases: list[dict[str, Any]]) -> list[tuple[list[Any], Any]]:
    """The frames of each case, and what was seen; in a loop, since a stream belongs to one."""
    clients = {name: OfflineClient(tokenizer, MAX_MODEL_LEN) for name, tokenizer in tokenizers.items()}
    try:
        return [run_one(clients[case["tokenizer"]], case) for case in cases]
    finally:
        for client in clients.values():
            client.close()


def run_one(client: OfflineClient, case: dict[str, Any]) -> tuple[list[Any], Any]:
    try:
        seen = client.run(case)
    except RequestRejected as refusal:
        return [], refusal
    return list(client.sent.values()), seen


def compare(case: dict[str, Any], seen: Any, answer: dict[str, Any]) -> None:
    if isinstance(seen, RequestRejected) or "refused" in answer:
        assert isinstance(seen, RequestRejected) and "refused" in answer, (case["params"], seen, answer)
        return
    assert answer["differences"] == [], (case["params"], answer["differences"])
    texts: dict[int, list[str]] = {}
    for (ours, our_aborts), (theirs, their_aborts) in zip(seen, answer["seen"], strict=True):
        assert sorted(our_aborts) == sorted(their_aborts), (case, our_aborts, their_aborts)
        compare_items(case, ours, theirs, texts)


def compare_items(case: dict[str, Any], ours: list[RequestOutput], theirs: Any, texts: dict[int, list[str]]) -> None:
    """What one take gives: completions may come as several items of ours and as one of vLLM's."""
    mine = {one.index: one for item in ours for one in item.outputs}
    completions, finished, prompt_rows = theirs or ([], False, None)
    context = (case, ours, theirs)
    assert sorted(mine) == sorted(one[0] for one in completions), context
    assert (bool(ours) and ours[-1].finished) == finished, context
    cumulative = case["params"]["output_kind"] != 1
    for index, text, ids, finish_reason, stop_reason, rows, cumulative_logprob in completions:
        one = mine[index]
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (ids, finish_reason, stop_reason), context
        assert (rows_of(one.logprobs), one.cumulative_logprob) == (rows, cumulative_logprob), context
        so_far = texts.setdefault(index, ["", ""])
        both = (one.text, text)
        texts[index] = list(both) if cumulative else [before + new for before, new in zip(so_far, both, strict=True)]
        compare_texts(case, *texts[index], finished=finish_reason is not None)
    if len(mine) == 1 and case["params"]["n"] == 1:
        assert rows_of(ours[0].prompt_logprobs) == (prompt_rows or None), context  # vLLM: [] after the first delta


def compare_texts(case: dict[str, Any], ours: str, theirs: str, *, finished: bool) -> None:
    """What has been given so far, of one completion."""
    context = (ours, theirs, case)
    if finished:
        # unfinished-character: vLLM drops the bytes of a character that is not complete at the end; in a run of byte
        # tokens they spoil all of the run, which vLLM has given.
        whole, broken, _ = ours.partition("\ufffd")
        assert ours == theirs or (broken and theirs.startswith(whole)), context
    elif case["tokenizer"] == "byte_fallback":
        # byte-runs: until a run of byte tokens has ended, its text is not certain; vLLM gives it and may be wrong.
        assert theirs.startswith(ours), context
    else:
        assert ours == theirs, context


def rows_of(rows: FlatLogprobs | None) -> Any:
    if rows is None:
        return None
    return [None if row is None else [[t, p.logprob, p.rank, p.decoded_token] for t, p in row.items()] for row in rows]


@pytest.mark.feature("C43", "R34")
@settings(max_examples=1000 if deep_profile() else 60, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    prompt=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    width=st.integers(1, 6),
    length=st.integers(1, 5),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    ignore_eos=st.booleans(),
    shown=st.booleans(),
)
def test_beams_are_vllms(
    vllm: VLLM, prompt: list[int], width: int, length: int, penalty: float, ignore_eos: bool, shown: bool
) -> None:
    eos = 3
    params: dict[str, Any] = {
        "beam_width": width, "max_tokens": length, "length_penalty": penalty, "ignore_eos": ignore_eos,
        "include_stop_str_in_output": shown,
    }  # fmt: skip
    theirs = vllm.ask({"prompt": prompt, "eos": eos, "params": params})
    beams = Beams(BeamSearchParams(**params), prompt, eos)
    for _ in range(length):
        if beams.running:
            beams.extend([likeliest([*prompt, *beam.token_ids], 2 * width) for beam in beams.running])
    ours = [[list(b.token_ids), b.cumulative_logprob, "stop" if b.has_ended else "length"] for b in beams.best()]
    assert [one[1] for one in ours] == pytest.approx([one[1] for one in theirs])
    assert ours == [[ids, pytest.approx(logprob), reason] for ids, logprob, reason in theirs]


def likeliest(prompt: list[int], count: int) -> dict[int, Logprob]:
    """The distribution behind ``prompt``: the model of ``vllm_text_child.py``."""
    seed = b"".join(token.to_bytes(4, "big") for token in prompt)
    weights = [1 + zlib.crc32(bytes([token]), zlib.crc32(seed)) % 997 + token / 100 for token in range(12)]  # no ties
    total = sum(weights)
    ranked = sorted(range(12), key=lambda token: (-weights[token], token))[:count]
    return {token: Logprob(math.log(weights[token] / total), rank) for rank, token in enumerate(ranked, 1)}
