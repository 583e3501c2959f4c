"""REQ: what an ADD may carry, and that the answer goes where it should."""

from __future__ import annotations

from anyengine._wire import FinishReason
from anyengine.testing.conformance.engine_link import PROMPT, EngineLink
from anyengine.testing.conformance.outcomes import CheckFailed, expect, expect_that
from anyengine.testing.conformance.registry import check

__all__: list[str] = []


@check("REQ-01", "a greedy request gets the same tokens again", "protocol.md §5")
async def repeatable(link: EngineLink) -> None:
    first = await link.generate(max_tokens=8)
    second = await link.generate(max_tokens=8)
    expect("token ids of the second answer", second.token_ids, first.token_ids)


@check("REQ-02", "a greedy request gets the same tokens in a batch as alone", "protocol.md §5")
async def batch_invariant(link: EngineLink) -> None:
    prompts = [PROMPT[: 2 + index % 5] for index in range(8)]
    alone = [(await link.generate(prompt, max_tokens=6)).token_ids for prompt in prompts]
    together = [link.add(prompt, max_tokens=6) for prompt in prompts]
    await link.finish(*together)
    expect("token ids of the batch", [tracked.token_ids for tracked in together], alone)


@check("REQ-03", "a prompt of one token is served", "protocol.md §5")
async def one_token_prompt(link: EngineLink) -> None:
    expect("tokens", len((await link.generate([7])).token_ids), 4)


@check("REQ-04", "different prompts are told apart", "protocol.md §5")
async def prompt_matters(link: EngineLink) -> None:
    prompts = [[3, 1], [8, 2, 8], [11], [4, 17, 6, 2], [9, 9, 9]]
    answers = {tuple((await link.generate(prompt, max_tokens=8)).token_ids) for prompt in prompts}
    expect_that(len(answers) > 1, "answers to five prompts", expected="at least two different ones", got=answers)


@check("REQ-05", "a prompt that leaves room for two tokens gets two, and ends with LENGTH", "protocol.md §7")
async def context_limit(link: EngineLink) -> None:
    tracked = await link.generate(link.fill(link.max_model_len - 2), max_tokens=50)
    expect("finish reason, tokens", (tracked.finish_reason, len(tracked.token_ids)), (FinishReason.LENGTH, 2))


@check("REQ-06", "a request id may be any text", "protocol.md §5")
async def odd_ids(link: EngineLink) -> None:
    for suffix in (" space\ttab\n", "-ünïcödé-中文-\N{GRINNING FACE}", "-" + "x" * 4000, "\0nul"):
        request_id = link.new_id() + suffix
        tracked = await link.generate(fields={"request_id": request_id})
        expect("tokens", len(tracked.token_ids), 4)


@check("REQ-07", "a request id may be used again when its request has finished", "interop.md §3")
async def id_again(link: EngineLink) -> None:
    request_id = link.new_id()
    for _ in range(3):
        tracked = await link.generate(fields={"request_id": request_id})
        expect("tokens", len(tracked.token_ids), 4)


@check("REQ-08", "outputs go to the client that the request names, by whatever socket it came", "protocol.md §5")
async def output_socket(link: EngineLink) -> None:
    for client, via in ((0, 0), (1, 1), (0, 1), (1, 0)):
        tracked = await link.generate(client=client, via=via)
        expect(f"output sockets of client {client}, sent by {via}", tracked.clients, {client})


@check("REQ-09", "trace headers come back with every output", "protocol.md §5")
async def trace_headers(link: EngineLink) -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    tracked = await link.generate(fields={"trace_headers": headers})
    found = [output.trace_headers for output in tracked.outputs]
    expect("trace_headers", found, [headers] * len(found))


@check("REQ-10", "abort_immediately: no output at all", "protocol.md §5", since=(0, 21, 0))
async def abort_immediately(link: EngineLink) -> None:
    tracked = link.add(fields={"abort_immediately": True})
    await link.fence()
    after = await link.generate()
    expect("outputs", len(tracked.outputs), 0)
    expect("tokens of the next request", len(after.token_ids), 4)
    tracked.aborted = True


@check("REQ-11", "priorities, cache salt and labels are taken", "protocol.md §5")
async def labels(link: EngineLink) -> None:
    fields = {"priority": 3, "cache_salt": "salt", "current_wave": 0}
    if link.release >= (0, 14, 0):
        fields["external_req_id"] = "outer"
    if link.release >= (0, 28, 0):
        fields["session_id"] = "session"
    expect("tokens", len((await link.generate(fields=fields)).token_ids), 4)


@check("REQ-12", "n, output_kind, stop strings and text options are the client's business", "protocol.md §7")
async def client_business(link: EngineLink) -> None:
    plain = await link.generate(temperature=1.0, top_k=1, max_tokens=6)
    tracked = await link.generate(
        temperature=1.0, top_k=1, max_tokens=6, n=2, output_kind=2, stop=["a", "e", "\x00"], skip_special_tokens=False
    )
    expect("token ids", tracked.token_ids, plain.token_ids)
    expect_that(len(tracked.outputs) > 1, "outputs of output_kind 2", expected="one for each step", got="one")


@check("REQ-13", "a request with neither sampling nor pooling parameters ends with ERROR", "protocol.md §12")
async def no_parameters(link: EngineLink) -> None:
    request = link.request()
    request.sampling_params = None
    tracked = link.send_add(request.request_id, link.dialect.encode_add(request))
    await link.finish(tracked)
    expect("finish reason", tracked.finish_reason, FinishReason.ERROR)


@check("REQ-14", "max_tokens nil ends with ERROR", "protocol.md §12")
async def no_max_tokens(link: EngineLink) -> None:
    tracked = await link.generate(max_tokens=None)
    expect("finish reason, tokens", (tracked.finish_reason, tracked.token_ids), (FinishReason.ERROR, []))


@check("REQ-15", "a request that ended with ERROR leaves the others alone", "protocol.md §12")
async def error_alone(link: EngineLink) -> None:
    bystander = link.add(max_tokens=16)
    await link.generate(max_tokens=None)
    await link.finish(bystander)
    expect("tokens of the other", len(bystander.token_ids), 16)


@check("REQ-16", "structured output without a backend ends with ERROR", "protocol.md §12")
async def no_backend(link: EngineLink) -> None:
    positions = link.raw_add(link.request())
    next(value for value in positions if isinstance(value, dict))["structured_outputs"] = {"regex": "a+"}
    tracked = link.send_raw_add(positions[0], positions)
    await link.finish(tracked)
    if tracked.finish_reason != FinishReason.ERROR:
        raise CheckFailed("structured_outputs without _backend", expected="ERROR", got=f"{tracked.finish_reason}")
