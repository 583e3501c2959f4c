"""What the user sees: the answer on standard output, start-up progress on standard error, errors in readable lines.

Owns the formats. Pure but for :class:`StartupProgress`, which writes to the stream that it is given.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from anyengine import RequestOutput, Status

__all__ = ["Answer", "JsonAnswer", "StartupProgress", "TextAnswer", "error_lines"]


class Answer(Protocol):
    """Turns the outputs of one request into what is written for each."""

    def add(self, output: RequestOutput) -> str:
        """What to write for ``output``."""


class TextAnswer:
    """The text as it comes, and an end of line behind it if it has none."""

    def __init__(self) -> None:
        self._at_line_start = True

    def add(self, output: RequestOutput) -> str:
        text = output.text
        if text:
            self._at_line_start = text.endswith("\n")
        if output.finished and not self._at_line_start:
            text += "\n"
        return text


class JsonAnswer:
    """One object a line for each output; a last one with the usage."""

    def add(self, output: RequestOutput) -> str:
        item = {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        line = json.dumps(item, ensure_ascii=False) + "\n"
        return line + self._usage(output) if output.finished else line

    def _usage(self, output: RequestOutput) -> str:
        usage = {
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": output.num_output_tokens,
            "total_tokens": output.num_prompt_tokens + output.num_output_tokens,
            "cached_tokens": output.num_cached_tokens,
        }
        return json.dumps({"usage": usage}) + "\n"


_STAGES = {
    "spawned": "starting the engine",
    "importing": "starting the engine",
    "resolving": "looking for the model",
    "downloading": "downloading the model",
    "loading": "loading the model",
    "handshake": "connecting to the engine",
}
_BAR_WIDTH = 20


class StartupProgress:
    """Start-up stages: on a terminal one line with a bar, rewritten and erased at the end; elsewhere a line a stage."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._last = ""

    def report(self, status: Status) -> None:
        """Show ``status``. A failure is left to the error that follows it."""
        if status.stage in ("ready", "failed"):
            self.close()
            return
        line = _STAGES.get(status.stage, status.stage)
        if status.detail:
            line += f": {status.detail}"
        if self._terminal:
            self._rewrite(line, status.fraction)
        elif line != self._last:
            self._last = line
            print(f"anyengine: {line}", file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was found. Idempotent."""
        if self._terminal and self._last:
            self._last = ""
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _rewrite(self, line: str, fraction: float | None) -> None:
        bar = ""
        if fraction is not None:
            done = round(max(0.0, min(1.0, fraction)) * _BAR_WIDTH)
            bar = f" [{'#' * done}{'.' * (_BAR_WIDTH - done)}] {max(0.0, min(1.0, fraction)):4.0%}"
        room = shutil.get_terminal_size().columns - len(bar) - 1  # a full last column would wrap
        line = line if len(line) <= room else line[: max(0, room - 1)] + "…"
        if line + bar != self._last:
            self._last = line + bar
            print(f"\r\x1b[K{self._last}", end="", file=self._stream, flush=True)


def error_lines(error: BaseException) -> str:
    """``error`` for a person: what is wrong, and what to do about it where the error knows, in a line of its own."""
    text = str(error) or type(error).__name__
    remedy = getattr(error, "remedy", None)
    if remedy:
        text = text.removesuffix(f": {remedy}")
    return f"error: {text}\n" + (f"  try: {remedy}\n" if remedy and remedy not in text else "")
