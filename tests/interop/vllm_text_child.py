"""vLLM's own InputProcessor and OutputProcessor, without an engine: cases in, what a user of AsyncLLM would see out.

Runs inside vLLM's environment and imports nothing of ours. Each message is 4 bytes of length (big endian) and msgpack.
The first one has the model directory and the tokenizer files; each further one is a list of cases, or a beam search.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.logprobs import Logprob
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

logging.disable(logging.ERROR)
TEXT_SIDE = {
    "stop", "bad_words", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind", "n",
    "include_stop_str_in_output", "output_text_buffer_length", "stream_interval", "flat_logprobs", "skip_clone",
}  # fmt: skip


class _Tokenizer(PreTrainedTokenizerFast):
    max_token_id = 1 << 30


class Processors:
    """One model for requests; several tokenizers for outputs."""

    def __init__(self, model: str, files: dict[str, str]) -> None:
        config = EngineArgs(model=model, dtype="float32", max_logprobs=20).create_engine_config()
        self.inputs = InputProcessor(config)
        self.tokenizers = {
            name: _Tokenizer(tokenizer_file=file, clean_up_tokenization_spaces=False) for name, file in files.items()
        }

    def answer(self, case: dict[str, Any]) -> dict[str, Any]:
        kind = RequestOutputKind(case["params"].pop("output_kind"))
        try:
            request = self.inputs.process_inputs(
                "label", case["prompt"], SamplingParams(**case["params"], output_kind=kind), ("generate",)
            )
        except Exception as exc:  # noqa: BLE001 - whatever it refuses, the other side must refuse
            return {"refused": f"{type(exc).__name__}: {exc}"}
        self.inputs.assign_request_id(request)
        children = children_of(request)
        return {
            "differences": [d for pair in zip(children, case["sent"], strict=True) for d in unequal(*pair)],
            "prompt_token_ids": request.prompt_token_ids,
            "seen": Consumer(self.tokenizers[case["tokenizer"]], children, kind).run(case),
        }


def children_of(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    params = request.sampling_params
    if params.n == 1:
        return [request]
    parent = ParentRequest(request)
    children = []
    for index in range(params.n):
        child_id, child_params = parent.get_child_info(index)
        child = msgspec.structs.replace(request, request_id=child_id, sampling_params=child_params)
        children.append(child)
    children[0].trace_headers = None
    PARENTS[id(children[0])] = parent
    return children


PARENTS: dict[int, ParentRequest] = {}
DECODER = MsgpackDecoder(EngineCoreRequest)


def plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct) or hasattr(value, "__dataclass_fields__"):
        names = getattr(value, "__struct_fields__", None) or list(value.__dataclass_fields__)
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def unequal(theirs: EngineCoreRequest, sent: list[bytes]) -> list[str]:
    """Where an engine gets something else from the two front ends. vLLM's own request takes the same way."""
    ours = plain(DECODER.decode(sent))
    via_wire = plain(DECODER.decode([bytes(frame) for frame in MsgpackEncoder().encode(theirs)]))
    found = []
    for name in via_wire:
        if name in ("request_id", "arrival_time", "client_index", "trace_headers"):
            continue
        a, b = ours[name], via_wire[name]
        if name == "sampling_params":
            if a["watermarking"] is None and not b["watermarking"]:
                b["watermarking"] = None  # accepted difference "watermarking": it is left to an engine without one
            found += [
                f"{key}: {a[key]!r} for vLLM's {b[key]!r}"
                for key in b
                if key not in TEXT_SIDE and in_any_order(key, a[key]) != in_any_order(key, b[key])
            ]
        elif a != b:
            found.append(f"{name}: {a!r} for vLLM's {b!r}")
    prefix = theirs.request_id.split("label")[0]
    if not ours["request_id"].startswith(f"{prefix}label-"):
        found.append(f"request_id: {ours['request_id']}")
    return found


def in_any_order(key: str, value: Any) -> Any:
    return sorted(value) if key == "stop_token_ids" and value else value


class Consumer:
    """One stream of outputs, as AsyncLLM.generate() yields them."""

    def __init__(self, tokenizer: Any, children: list[EngineCoreRequest], kind: RequestOutputKind) -> None:
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        self.collector = RequestOutputCollector(kind, "label")
        self.ids = [child.request_id for child in children]
        parent = PARENTS.pop(id(children[0]), None)
        for index, child in enumerate(children):
            self.processor.add_request(child, None, parent, index, self.collector)

    def run(self, case: dict[str, Any]) -> list[Any]:
        """What is seen at each take: completions, ids to abort so far."""
        seen: list[Any] = []
        aborts: list[str] = []
        for event in case["events"]:
            if event["do"] == "take":
                seen.append([self.take(), [self.ids.index(one) for one in aborts]])
            elif event["do"] == "abort":
                aborts += self.processor.abort_requests(["label"], internal=False)
            else:
                outputs = [self.output(*row) for row in event["outputs"]]
                aborts += self.processor.process_outputs(outputs).reqs_to_abort
        return seen

    def output(self, index: int, token_ids: list[int], reason: Any, stop: Any, rows: Any, prompt: Any) -> Any:
        return EngineCoreOutput(
            request_id=self.ids[index],
            new_token_ids=list(token_ids),
            new_logprobs=None if rows is None else LogprobsLists(*arrays(rows)),
            new_prompt_logprobs_tensors=None if prompt is None else LogprobsTensors(*map(torch.tensor, arrays(prompt))),
            finish_reason=None if reason is None else FinishReason(reason),
            stop_reason=stop,
        )

    def take(self) -> Any:
        output = self.collector.get_nowait()
        if output is None:
            return None
        completions = [
            [
                one.index, one.text, list(one.token_ids), one.finish_reason, one.stop_reason,
                rows_of(one.logprobs), one.cumulative_logprob,
            ]
            for one in output.outputs
        ]  # fmt: skip
        return [completions, output.finished, rows_of(output.prompt_logprobs)]


def arrays(rows: Any) -> list[Any]:
    token_ids, logprobs, ranks = rows
    return [np.array(token_ids, np.int64), np.array(logprobs, np.float32), np.array(ranks, np.int64)]


class BeamEngine:
    """What vLLM's beam search calls: a model whose distributions follow from the prompt alone."""

    def __init__(self) -> None:
        self.input_processor = SimpleNamespace(resolve_watermarking=lambda params: None)

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str, **_: Any) -> Any:
        row = {
            token: Logprob(logprob, rank) for rank, (token, logprob) in enumerate(likeliest(prompt, params.logprobs), 1)
        }
        completion = CompletionOutput(0, "", [next(iter(row))], None, [row], finish_reason="length")
        yield RequestOutput(request_id, None, None, None, [completion], True)


def likeliest(prompt: dict[str, Any], count: int) -> list[tuple[int, float]]:
    """Of twelve tokens; written once more in ``test_text_differential.py``."""
    seed = b"".join(token.to_bytes(4, "big") for token in prompt["prompt_token_ids"])
    weights = [1 + zlib.crc32(bytes([token]), zlib.crc32(seed)) % 997 + token / 100 for token in range(12)]  # no ties
    total = sum(weights)
    ranked = sorted(range(12), key=lambda token: (-weights[token], token))[:count]
    return [(token, math.log(weights[token] / total)) for token in ranked]


def beams_of(case: dict[str, Any]) -> list[Any]:
    """What vLLM finds: tokens, log-probability and finish reason of each answer."""
    search = BeamSearchOnlineMixin()
    search.engine_client = BeamEngine()
    tokenizer = SimpleNamespace(eos_token_id=case["eos"], decode=lambda *_, **__: "")
    search.renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)

    async def run() -> list[Any]:
        prompt = {"type": "token", "prompt_token_ids": case["prompt"]}
        params = BeamSearchParams(**case["params"])
        (output,) = [output async for output in search.beam_search(prompt, "label", params)]
        return [[one.token_ids, one.cumulative_logprob, one.finish_reason] for one in output.outputs]

    return asyncio.run(run())


def rows_of(rows: Any) -> Any:
    if rows is None:
        return None
    return [None if row is None else [[t, p.logprob, p.rank, p.decoded_token] for t, p in row.items()] for row in rows]


def read(stream: BinaryIO) -> Any:
    head = stream.read(4)
    return msgspec.msgpack.decode(stream.read(int.from_bytes(head, "big"))) if len(head) == 4 else None


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever vLLM prints must not look like an answer
    processors: Processors | None = None
    while (message := read(sys.stdin.buffer)) is not None:
        if processors is None:
            processors, reply = Processors(**message), "ready"
        elif isinstance(message, dict):
            reply = beams_of(message)
        else:
            reply = [processors.answer(case) for case in message]
        encoded = msgspec.msgpack.encode(reply)
        answers.write(len(encoded).to_bytes(4, "big") + encoded)
        answers.flush()


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    main()
