"""What the user typed after ``anyengine check``, as frozen options.

Owns names, defaults and help of this command; values are checked by the settings that they go into. Starts nothing.
"""

from __future__ import annotations

import json
import shutil
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyengine import CommandEngine, EmbeddedEngine, VLLMEngine
from anyengine.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from anyengine.testing.conformance import EngineTarget

__all__ = ["CheckOptions", "add_check_command"]

_EXAMPLES = """examples:
  anyengine check                                      the embedded engine with its default model
  anyengine check --vllm /opt/vllm/bin/python Qwen/Qwen3-0.6B --arg max_model_len=4096 --junit report.xml
  anyengine check --attach tcp://10.0.0.1:13345        then, elsewhere: vllm serve MODEL --headless \\
      --data-parallel-address 10.0.0.1 --data-parallel-rpc-port 13345
  anyengine check --destructive -k MAL --command ./my-engine --verbose

exit codes: 0 nothing failed (known deviations are no failures), 1 a check failed, 2 wrong usage, 128 + n signal n
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of ``anyengine check``."""

    model: str | None
    vllm: list[str] | None
    arg: list[str]
    env: list[str]
    command: list[str] | None
    attach: str | None
    attach_local: bool
    only: list[str]
    destructive: bool
    vllm_deviations: bool | None
    list: bool
    junit: str | None
    json: str | None
    rank: int
    patience: float
    startup_timeout: float
    backend: str
    uvloop: bool
    quiet: bool
    traceback: bool

    def target(self) -> EngineTarget:
        """What to check.

        Raises:
            ValueError: none or several were named, or a value makes no sense.
        """
        from anyengine.testing.conformance import AttachedEngine

        named = [name for name in ("model", "vllm", "command", "attach") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"name one engine, not several: MODEL, --vllm, --command or --attach (got {named})")
        if (self.arg or self.env) and self.vllm is None:
            raise ValueError("--arg and --env are for an engine of vLLM: give --vllm PYTHON MODEL")
        if self.attach is not None:
            return AttachedEngine(self.attach, local=self.attach_local, headless=not self.attach_local)
        if self.command is not None:
            return CommandEngine(argv=tuple(self.command))
        if self.vllm is None:
            return EmbeddedEngine(model=self.model or DEFAULT_MODEL)
        python, model = self.vllm
        args = {name.replace("-", "_"): _value(text) for name, text in map(_pair, self.arg)}
        return VLLMEngine(model, python=python, args=args, env=dict(map(_pair, self.env)))

    def check(self) -> None:
        """Raises:
        ValueError: a number out of range, or a program or a directory that there is not.
        """
        if not 0 <= self.rank <= 0xFFFF:
            raise ValueError(f"--rank {self.rank} must be from 0 to {0xFFFF}")
        for option, value_s in (("--patience", self.patience), ("--startup-timeout", self.startup_timeout)):
            if not value_s > 0:
                raise ValueError(f"{option} {value_s:g} must be a number of seconds above 0")
        if self.command == []:
            raise ValueError("--command takes a program and its arguments, and stands last: --command ./my-engine")
        for option, words in (("--command", self.command), ("--vllm", self.vllm)):
            if words and not self.list and shutil.which(words[0]) is None:
                raise ValueError(f"{option} {words[0]}: there is no such program")
        for option, path in (("--junit", self.junit), ("--json", self.json)):
            if path and not Path(path).parent.is_dir():
                raise ValueError(f"{option} {path}: there is no such directory")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{text!r} must be NAME=VALUE")
    return name.lstrip("-"), value


def _value(text: str) -> Any:
    """JSON where it is JSON (numbers, true, maps), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def add_check_command(commands: Any) -> None:
    """Add ``check`` to the sub-parsers of the program."""
    check: ArgumentParser = commands.add_parser(
        "check",
        help="report how well an engine core keeps to the protocol",
        description="Start an engine core (or wait for one), run the conformance checks on it, report.",
        epilog=_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    check.set_defaults(options=CheckOptions)
    _add_engine(check)
    _add_selection(check)
    group = check.add_argument_group("report")
    group.add_argument("--junit", metavar="PATH", help="also write JUnit XML")
    group.add_argument("--json", metavar="PATH", help="also write JSON")
    group.add_argument("-q", "--quiet", action="store_true", help="only what failed, and the summary")
    group.add_argument("--traceback", action="store_true", help="show where an error was raised")


def _add_engine(check: ArgumentParser) -> None:
    group = check.add_argument_group("engine (one of these)")
    group.add_argument("model", nargs="?", metavar="MODEL", help="the embedded engine with this model")
    group.add_argument("--vllm", nargs=2, metavar=("PYTHON", "MODEL"), help="vLLM's engine core, run by that python")
    group.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", help="an engine argument of vLLM; may be repeated"
    )
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of vLLM's process; may be repeated"
    )
    group.add_argument(
        "--attach", metavar="tcp://HOST:PORT", help="listen here, and wait for an engine that somebody else starts"
    )
    group.add_argument(
        "--attach-local", action="store_true", help="the engine that attaches says local, not headless, of itself"
    )
    group.add_argument(
        "--command",
        nargs=REMAINDER,
        metavar="ARGV",
        help="a program that speaks the protocol; takes the rest",
    )
    group = check.add_argument_group("start")
    group.add_argument("--rank", type=int, default=0, metavar="N", help="its data-parallel index (default: 0)")
    group.add_argument(
        "--startup-timeout", type=float, default=600.0, metavar="S", help="for the start (default: %(default)g s)"
    )
    group.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio", help="event loop of the checker")
    group.add_argument("--uvloop", action="store_true", help="run asyncio on uvloop")


def _add_selection(check: ArgumentParser) -> None:
    group = check.add_argument_group("checks")
    group.add_argument(
        "-k", dest="only", action="append", default=[], metavar="PATTERN",
        help="only checks with this in their id or title, or whose id fits this shell pattern; may be repeated",
    )  # fmt: skip
    group.add_argument("--list", action="store_true", help="list the checks and stop")
    group.add_argument(
        "--destructive", action="store_true", help="also those that may break the engine: malformed input, its end"
    )
    group.add_argument(
        "--vllm-deviations", action="store_true", default=None,
        help="what is known of vLLM's releases is no failure (the default with --vllm)",
    )  # fmt: skip
    group.add_argument(
        "--patience", type=float, default=20.0, metavar="S",
        help="for what a check waits for: one message, or the end of a request (default: %(default)g s)",
    )  # fmt: skip
