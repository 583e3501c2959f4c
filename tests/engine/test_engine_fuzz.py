"""Whatever comes over the wire, the engine lives: mutated messages of every kind, sampling parameters of any value."""

from __future__ import annotations

import math
import random
from array import array
from pathlib import Path
from typing import Any

from foreign_frontend import ForeignFrontend, pack, request
from tiny_models import VOCAB_SIZE, advance, make_tiny_model, open_runner

from anyengine._wire import EngineCoreRequest, Tensor, WireSamplingParams
from anyengine.engine.core.validation import check_request
from anyengine.engine.interfaces import SequenceState
from anyengine.testing.toy_runner import expected_tokens

PROMPT = [3, 1, 4, 1, 5]
NUM_MESSAGES = 4000

TEMPLATES: list[list[bytes]] = [
    [b"\x00", pack([*request("fuzz", PROMPT, max_tokens=3), 0, 0, {"a": "b"}, False, "x", None, None, False, None])],
    [b"\x00", pack(request("params", PROMPT, logit_bias={1: 2.0}, stop_token_ids=[1], logprobs=2))],
    [b"\x00", pack(request("grammar", PROMPT, structured_outputs={"regex": "a"}))],
    [b"\x00", pack([*request("embeds", PROMPT)[:9], ["float32", [2, 2], 1]]), b"\0" * 16],
    [b"\x01", pack(["fuzz", "params"])],
    [b"\x02", pack([1, 0])],
    [b"\x03", pack([0, 1007, "pause_scheduler", ["keep", True]])],
    [b"\x03", pack([0, 1008, "resume_scheduler", []])],
    [b"\x03", pack([0, 1009, "collective_rpc", ["check_health", None, [], {}]])],
    [b"\x04", b""],
    [b"\x05", pack(None)],
]  # fmt: skip
# Lengths that promise more than there is, deep nesting, reserved bytes, numbers beyond every type.
SNIPPETS = [
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 2000,
    b"\xc1", b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xd3\x80\0\0\0\0\0\0\0", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xc0",
    b"", b"\xc8\xff\xff\x01", b"\xd6\xff\0\0\0\0",
]  # fmt: skip


def mutate(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    frames = list(frames)
    for _ in range(rng.choice((1, 1, 2, 5))):
        index = rng.randrange(len(frames))
        frame = bytearray(frames[index])
        position = rng.randrange(len(frame) + 1)
        match rng.randrange(6):
            case 0 if frame:
                frame[position % len(frame)] = rng.randrange(256)
            case 1:
                frame[position:] = b""
            case 2:
                frame[position:position] = rng.choice(SNIPPETS)
            case 3:
                frame[position : position + 4] = rng.choice(SNIPPETS)
            case 4:
                frames.insert(index, rng.randbytes(rng.randrange(4)))
            case _:
                frame += rng.randbytes(3)
        if index < len(frames):
            frames[index] = bytes(frame)
    return frames


def test_mutated_messages_do_no_harm(tmp_path: Path) -> None:
    rng = random.Random(11)
    with ForeignFrontend(tmp_path) as frontend:
        process = frontend.start().process
        assert process is not None
        for number in range(1, NUM_MESSAGES + 1):
            frontend.send(*mutate(rng, rng.choice(TEMPLATES)))
            if number % 500 == 0:
                # What it has been told to do, it has done; then it is asked to go on.
                frontend.call("resume_scheduler")
                assert frontend.generate(f"after {number}", PROMPT, max_tokens=3) == expected_tokens(PROMPT, 3)
                assert process.poll() is None, frontend.stderr
        counts = frontend.statistics()
        assert counts["malformed_messages"] > NUM_MESSAGES / 4
        assert counts["requests_failed"] > 0
        assert len(frontend.stderr.splitlines()) < 100


NUMBERS = [0.0, 1e-6, 1.1e-5, 5e-324, 0.5, 1.0, 2.0, -2.0, 3.4e38, 1e308, math.inf, -math.inf, math.nan]
CHOICES: dict[str, list[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), NUMBERS),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), NUMBERS),
    "logit_bias": [{0: number, VOCAB_SIZE - 1: -number} for number in NUMBERS],
    "allowed_token_ids": [[], [1], [1, 1, 2], list(range(VOCAB_SIZE))],
    "top_k": [-1, 0, 1, VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**62],
    "logprobs": [-1, 0, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**62],
    "prompt_logprobs": [-1, 0, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**62],
    "prompt_logprob_token_ids": [
        Tensor("<i4", (rows, width), array("i", [value] * rows * width).tobytes())
        for rows in (0, len(PROMPT) - 3, len(PROMPT) - 1)
        for width in (0, 1, 40)
        for value in (-2, -1, 0, VOCAB_SIZE)
    ],
    "prompt_logprob_start": [-1, 0, 2, len(PROMPT), 2**62],
    "logprob_token_ids": [[], [1], [1, 1, 2], [VOCAB_SIZE - 1] * 500],
    "seed": [0, -1, 2**63 - 1, -(2**63)],
    "min_tokens": [0, 1, 5],
    "bad_words_token_ids": [[], [[1]], [[1, 2]], [[token] for token in range(VOCAB_SIZE)]],
    "all_stop_token_ids": [{1, 2, -5, 10**9}],
    "stop_token_ids": [[], [1, -4, 2**40]],
    "eos_token_id": [0, -1, 2**40],
}


def test_no_sampling_parameters_fail_a_step(tmp_path: Path) -> None:
    """They are refused at the start, or yield tokens of the vocabulary: a step belongs to everybody."""
    runner = open_runner(make_tiny_model("qwen2", tmp_path / "model"))
    rng, num_served = random.Random(1), 0
    for number in range(250):
        names = rng.sample(list(CHOICES), rng.randrange(1, 7))
        sampling = WireSamplingParams(max_tokens=8, **{name: rng.choice(CHOICES[name]) for name in names})
        request_ = EngineCoreRequest("a", PROMPT, sampling_params=sampling)
        if isinstance(check_request(request_, vocab_size=VOCAB_SIZE, max_model_len=512), str):
            continue
        seq = SequenceState(str(number), PROMPT, sampling)
        try:
            runner.start(seq)
        except ValueError:
            continue
        num_served += 1
        for _ in range(3):
            advance(runner, [seq])
        assert all(0 <= token < VOCAB_SIZE for token in seq.output_token_ids), sampling
        runner.finish(seq.request_id)
    assert num_served > 40
