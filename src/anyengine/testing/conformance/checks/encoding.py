"""ENC: msgpack both ways: complete arrays out; short, long and odd but lawful forms in."""

from __future__ import annotations

from typing import Any

import msgspec

from anyengine._wire.layouts import ROWS, last_names
from anyengine.testing.conformance.engine_link import PROMPT, EngineLink
from anyengine.testing.conformance.outcomes import CheckSkipped, expect, expect_that, skip_if_refused
from anyengine.testing.conformance.registry import check

__all__: list[str] = []

_LENGTH = 1


def _known(link: EngineLink, message: str) -> int:
    return len(last_names(ROWS[message], link.dialect.since, link.dialect.until))


async def _length_of(link: EngineLink, positions: list[Any], *aux: bytes) -> None:
    """A request of these positions, for 4 tokens, must run to its end."""
    tracked = link.send_raw_add(positions[0], positions, *aux)
    await link.finish(tracked)
    expect("finish reason, tokens", (tracked.finish_reason, len(tracked.token_ids)), (_LENGTH, 4))


def _sampling(positions: list[Any]) -> dict[str, Any]:
    return next(value for value in positions if isinstance(value, dict))


@check("ENC-01", "output messages are arrays of full length", "protocol.md §7")
async def message_length(link: EngineLink) -> None:
    await link.generate()
    _expect_complete(link.evidence.outputs_lengths, _known(link, "EngineCoreOutputs"), "EngineCoreOutputs")


@check("ENC-02", "outputs of a request are arrays of full length", "protocol.md §7")
async def output_length(link: EngineLink) -> None:
    await link.generate()
    _expect_complete(link.evidence.output_lengths, _known(link, "EngineCoreOutput"), "EngineCoreOutput")


def _expect_complete(found: set[int], known: int, message: str) -> None:
    expect_that(
        bool(found) and min(found) >= known and len(found) == 1,
        f"positions of {message}",
        expected=f"{known} in every message (more, if the release is newer than known)",
        got=sorted(found),
    )


@check("ENC-03", "every message can be decoded strictly, by the types of its release", "protocol.md §6, §7")
async def decodable(link: EngineLink) -> None:
    await link.generate()
    expect("messages that cannot be decoded", link.evidence.undecodable, [])


@check("ENC-04", "every message names the engine's rank", "protocol.md §7, engine_index")
async def engine_index(link: EngineLink) -> None:
    await link.generate()
    expect(f"engine_index other than {link.rank}", link.evidence.wrong_index, [])


@check("ENC-05", "no message has a frame that its payload does not refer to", "protocol.md §6")
async def no_surplus_frames(link: EngineLink) -> None:
    await link.generate()
    expect("surplus frames", link.evidence.surplus_frames, [])


@check("ENC-06", "a request of the required positions alone is served", "protocol.md §5: 9 elements are enough")
async def short_form(link: EngineLink) -> None:
    positions = link.raw_add(link.request())
    required = 9 if link.release >= (0, 17, 0) else 10
    await _length_of(link, positions[:required])


@check("ENC-07", "a request of all positions of the release, defaults written out, is served", "protocol.md §5")
async def complete_form(link: EngineLink) -> None:
    positions = link.raw_add(link.request())
    expect_that(
        len(positions) == _known(link, "EngineCoreRequest"), "what this check sends", expected="all", got=positions
    )
    await _length_of(link, positions)


@check("ENC-08", "positions behind the last known one are ignored", "protocol.md §5, §12")
async def surplus_positions(link: EngineLink) -> None:
    await _length_of(link, [*link.raw_add(link.request()), None, {"future": [1, 2]}, "x"])


@check("ENC-09", "unknown keys of the sampling parameters are ignored", "protocol.md §12")
async def unknown_keys(link: EngineLink) -> None:
    positions = link.raw_add(link.request())
    _sampling(positions).update({"a_future_parameter": {"x": [1.5, None]}, "_and_another": True})
    await _length_of(link, positions)


@check("ENC-10", "an int is taken for a float", "protocol.md §5")
async def int_for_float(link: EngineLink) -> None:
    positions = link.raw_add(link.request())
    _sampling(positions).update({"temperature": 0, "top_p": 1, "repetition_penalty": 1})
    positions[[type(value) for value in positions].index(float)] = 1700000000
    await _length_of(link, positions)


@check("ENC-11", "integers and strings in wider forms than needed are taken", "protocol.md §6")
async def wide_forms(link: EngineLink) -> None:
    positions = link.raw_add(link.request())
    request_id, prompt = positions[0].encode(), list(PROMPT)
    payload = b"\xdc" + len(positions).to_bytes(2, "big")  # array 16
    payload += b"\xdb" + len(request_id).to_bytes(4, "big") + request_id  # str 32
    payload += b"\xdd" + len(prompt).to_bytes(4, "big")  # array 32
    payload += b"".join(b"\xd3" + token_id.to_bytes(8, "big") for token_id in prompt)  # int 64
    payload += b"".join(msgspec.msgpack.encode(value) for value in positions[2:])
    tracked = link.send_add(positions[0], [b"\x00", payload])
    await link.finish(tracked)
    expect("tokens", len(tracked.token_ids), 4)


@check("ENC-12", "parameters that are left out have vLLM's defaults", "protocol.md §5: max_tokens is 16")
async def omitted_defaults(link: EngineLink) -> None:
    positions = link.raw_add(link.request())
    sampling = _sampling(positions)
    sampling.clear()
    tracked = link.send_raw_add(positions[0], positions)
    await link.finish(tracked)
    expect("finish reason, tokens", (tracked.finish_reason, len(tracked.token_ids)), (_LENGTH, 16))


@check("ENC-13", "defaults that are written out mean the same as those left out", "protocol.md §5")
async def written_defaults(link: EngineLink) -> None:
    left_out = await link.generate()
    positions = link.raw_add(link.request())
    _sampling(positions).update(
        {
            "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "top_p": 1.0,
            "top_k": 0, "min_p": 0.0, "seed": None, "stop": [], "stop_token_ids": [], "ignore_eos": False,
            "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "detokenize": True, "bad_words": [],
            "output_kind": 0, "logit_bias": None, "allowed_token_ids": None, "skip_reading_prefix_cache": False,
        }
    )  # fmt: skip
    written = link.send_raw_add(positions[0], positions)
    await link.finish(written)
    expect("token ids", written.token_ids, left_out.token_ids)


@check("ENC-14", "frames that nothing refers to are ignored", "protocol.md §5")
async def surplus_aux_frame(link: EngineLink) -> None:
    await _length_of(link, link.raw_add(link.request()), b"x" * 1000)


@check("ENC-15", "a tensor in an auxiliary frame and one inside the payload mean the same", "protocol.md §6")
async def aux_frame(link: EngineLink) -> None:
    if link.release < (0, 32, 0):
        raise CheckSkipped("no sampling parameter of this release is a tensor")
    rows = len(PROMPT) - 1  # the last one has no next prompt token
    ids = b"".join(token_id.to_bytes(4, "little") for token_id in PROMPT[:rows])
    answers = []
    for data, aux in ((msgspec.msgpack.Ext(3, ids), ()), (1, (ids,))):
        positions = link.raw_add(link.request())
        _sampling(positions).update(
            {"prompt_logprob_token_ids": ["<i4", [rows, 1], data], "skip_reading_prefix_cache": True}
        )
        tracked = link.send_raw_add(positions[0], positions, *aux)
        await link.finish(tracked)
        skip_if_refused(tracked.finish_reason, "prompt_logprob_token_ids")
        scores = [bytes(part.data) for output in tracked.outputs if (part := output.prompt_token_id_logprobs)]
        answers.append((tracked.token_ids, scores))  # model runners that know no such scores send none
    expect("tokens and scores by auxiliary frame", answers[1], answers[0])
