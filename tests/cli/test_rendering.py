"""Answers, progress and errors as the user reads them."""

from __future__ import annotations

import io
import json

import pytest

from anyengine import EngineDeadError, EngineStartupError, RequestOutput, RequestRejected, Status
from anyengine.cli.rendering import JsonAnswer, StartupProgress, TextAnswer, error_lines
from anyengine.outputs import PrefillUsage, RequestFacts


def output(text: str, finish_reason: str | None = None) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        text=text,
        token_ids=[7],
        finish_reason=finish_reason,
        num_prompt_tokens=3,
        num_output_tokens=2,
        facts=RequestFacts(prefill=PrefillUsage(num_cached_tokens=1)),
    )


@pytest.mark.parametrize(
    ("texts", "written"),
    [
        (["Par", "is"], "Paris\n"),
        (["Paris.\n", ""], "Paris.\n"),
        (["Paris", ""], "Paris\n"),
        ([""], ""),
    ],
)
def test_a_text_answer_ends_its_line_once(texts: list[str], written: str) -> None:
    answer = TextAnswer()
    outputs = [output(text) for text in texts[:-1]] + [output(texts[-1], "stop")]
    assert "".join(answer.add(item) for item in outputs) == written


def test_a_json_answer_is_one_object_a_line_and_the_usage_last() -> None:
    answer = JsonAnswer()
    lines = (answer.add(output("Par")) + answer.add(output("é\n", "stop"))).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": "Par", "token_ids": [7], "finish_reason": None, "stop_reason": None},
        {"text": "é\n", "token_ids": [7], "finish_reason": "stop", "stop_reason": None},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 1}},
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STAGES = [
    Status("importing"),
    Status("resolving", detail="smollm2-135m"),
    Status("downloading", detail="model.gguf", fraction=0.0),
    Status("downloading", detail="model.gguf", fraction=0.5),
    Status("downloading", detail="model.gguf", fraction=1.0),
    Status("unheard-of"),
    Status("ready"),
]


def test_progress_in_a_log_is_a_line_a_stage() -> None:
    stream = io.StringIO()
    progress = StartupProgress(stream)
    for status in STAGES:
        progress.report(status)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "anyengine: starting the engine",
        "anyengine: looking for the model: smollm2-135m",
        "anyengine: downloading the model: model.gguf",
        "anyengine: unheard-of",
    ]


def test_progress_on_a_terminal_is_one_line_that_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    progress = StartupProgress(stream)
    progress.report(Status("downloading", detail="model.gguf", fraction=0.5))
    assert stream.getvalue() == "\r\x1b[Kdownloading the model: model.g… [##########..........]  50%"
    written = len(stream.getvalue())
    progress.report(Status("downloading", detail="model.gguf", fraction=0.5))
    assert len(stream.getvalue()) == written  # nothing new, nothing written
    progress.report(Status("ready"))
    progress.close()
    assert stream.getvalue()[written:] == "\r\x1b[K"
    assert "\n" not in stream.getvalue()


def test_an_error_is_a_line_and_its_remedy() -> None:
    rejected = RequestRejected("top_p=7 is out of range", parameter="top_p", value=7, remedy="use at most 1")
    assert error_lines(rejected) == "error: top_p=7 is out of range\n  try: use at most 1\n"
    assert error_lines(RequestRejected("n=0: use 1", remedy="use 1")) == "error: n=0\n  try: use 1\n"  # said once
    assert error_lines(RuntimeError()) == "error: RuntimeError\n"


def test_a_failed_start_shows_the_last_lines_of_the_engine() -> None:
    text = error_lines(EngineStartupError("no such model", stderr_tail=("first", "second")))
    assert text.startswith("error: no such model\n")
    assert "second" in text


def test_a_long_log_is_cut_but_for_the_first_exception_in_it() -> None:
    cause = "(Worker pid=7) ERROR 11-29 18:32:40 [executor.py:953] torch.OutOfMemoryError: CUDA out of memory."
    tail = (*["INFO early"] * 20, cause, *["INFO late"] * 20, "RuntimeError: Engine core initialization failed.")
    text = str(EngineDeadError("engine 0 is gone", stderr_tail=tail))
    assert text.splitlines()[1:4] == [
        "  first exception there:",
        f"    {cause}",
        "  last lines of the engine's stderr (34 more in stderr_tail):",
    ]
    assert text.endswith("\n    RuntimeError: Engine core initialization failed.")
    assert "early" not in text
    assert "first exception" not in str(EngineDeadError("gone", stderr_tail=("INFO a: b",) * 50))
