"""``anyengine mock``: a scripted engine behind somebody else's front end, steered by hand.

Owns the options, and the way from them to a script. It needs no model, no torch and no event loop.
"""

from __future__ import annotations

import re
import sys
from argparse import RawDescriptionHelpFormatter
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from anyengine._wire.methods import METHODS, OTHER_METHODS
from anyengine.testing.scripted import Fault, Script
from anyengine.testing.scripted.script import FaultKind

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

__all__ = ["MockOptions", "add_mock_command", "parse_fault", "serve_mock"]

_EXAMPLES = """examples:
  vllm serve MODEL --data-parallel-size-local 0 --data-parallel-rpc-port 29550
  anyengine mock --handshake tcp://127.0.0.1:29550 --ttft 0.2 --tpot 0.02 --jitter 0.3

  an engine that dies as it gets the third request, one that hangs after 100 messages, one that garbles a reply:
  anyengine mock --handshake ADDRESS --fault kill@add:3
  anyengine mock --handshake ADDRESS --fault hang@outputs:100
  anyengine mock --handshake ADDRESS --fault garbage@reply:2

  everything else (stages of a start, rules for single requests and calls): a script, the JSON of
  anyengine.testing.scripted.Script, in a file
  anyengine mock --handshake ADDRESS --script script.json --log received.jsonl
"""

_NAMES = {"die": "kill", "slow": "sleep", "malformed": "garbage"}
_OUTGOING = ("out", "hello", "registration", "ready", "outputs", "reply")  # the rest comes in: add, abort, a method ...
_INCOMING = ("in", "init", "add", "abort", "utility")
_MESSAGES = frozenset((*_OUTGOING, *_INCOMING, *METHODS, *OTHER_METHODS))
_FAULT = re.compile(r"(?P<do>[a-z_]+)(=(?P<value>[^@]+))?@((?P<kind>[a-z_]+):)?(?P<nth>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MockOptions:
    """The options of ``anyengine mock``. ``None``: not given, so the script's value holds, or its default."""

    handshake: str
    rank: int
    headless: bool
    script: Path | None
    log: Path | None
    ttft: float | None
    tpot: float | None
    jitter: float | None
    seed: int | None
    tokens_per_frame: int | None
    max_running: int | None
    max_model_len: int | None
    vocab_size: int | None
    release: str | None
    late_outputs: int | None
    fault: list[str]
    quiet: bool
    traceback: bool

    def make_script(self) -> Script:
        """Raises:
        ValueError: a value is out of range, or the file cannot be read, or is no script.
        """
        script = Script()
        if self.script is not None:
            try:
                script = msgspec.json.decode(self.script.read_bytes(), type=Script)
            except OSError as error:
                raise ValueError(f"--script {self.script} cannot be read: {error.strerror}") from error
            except msgspec.DecodeError as error:
                raise ValueError(f"--script {self.script} is no script: {error}") from error
        changes = {
            "first_token_delay_s": self.ttft,
            "step_interval_s": self.tpot,
            "jitter": self.jitter,
            "seed": self.seed,
            "tokens_per_frame": self.tokens_per_frame,
            "max_running": self.max_running,
            "vocab_size": self.vocab_size,
            "version": self.release,
            "outputs_after_abort": self.late_outputs,
        }
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        if self.max_model_len is not None:
            given["registration"] = {**script.registration, "max_model_len": self.max_model_len}
        given["faults"] = (*script.faults, *map(parse_fault, self.fault))
        return msgspec.structs.replace(script, **given)


def parse_fault(text: str) -> Fault:
    """``KIND[=VALUE]@[MESSAGE:]N``: the fault at the N-th message (of those that go out, if no message is named).

    Raises:
        ValueError: it is none.
    """
    found = _FAULT.fullmatch(text)
    if found is None:
        raise ValueError(f"fault={text!r} must be KIND[=VALUE]@[MESSAGE:]N, such as kill@add:3 or sleep=5@outputs:10")
    do, value, kind = _NAMES.get(found["do"], found["do"]), found["value"], found["kind"]
    fields: dict[str, Any] = {"do": do, "nth": int(found["nth"])}
    if kind is not None and kind not in ("in", "out"):
        fields["kind"] = kind
    if kind is not None and kind not in _MESSAGES:
        close = get_close_matches(kind, _MESSAGES, n=1)
        did = f": did you mean {close[0]}?" if close else f": it is none of {', '.join(_OUTGOING[1:] + _INCOMING[1:])}"
        raise ValueError(f"fault={text!r}: there is no message {kind!r}, and no method of an engine{did}")
    if kind is not None and kind not in _OUTGOING:
        fields["direction"] = "in"
    if value is not None:
        name = {"sleep": "seconds", "exit": "exit_code", "dead_exit": "exit_code", "kill": "signal"}.get(do)
        name = "size_bytes" if do == "huge" else name
        if name is None:
            raise ValueError(f"fault={text!r}: {found['do']} takes no value")
        fields[name] = value
    try:
        return msgspec.convert(fields, Fault, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"fault={text!r}: {error}") from error


def add_mock_command(commands: _SubParsersAction[ArgumentParser]) -> None:
    """The command and its arguments."""
    parser = commands.add_parser(
        "mock",
        help="be an engine without a model, with the faults that you ask for",
        description="Serve a front end that waits for its engines (vLLM's AsyncLLM, vllm-rs, our own) with made-up "
        "tokens, at the pace and with the faults that you ask for.",
        epilog=_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(options=MockOptions)
    group = parser.add_argument_group("front end")
    group.add_argument(
        "--handshake",
        required=True,
        metavar="ADDRESS",
        help="where the front end waits for its engines: tcp://HOST:PORT",
    )
    group.add_argument("--rank", type=int, default=0, metavar="N", help="data-parallel rank (default: %(default)s)")
    group.add_argument("--no-headless", dest="headless", action="store_false", help="as in `anyengine engine`")
    group = parser.add_argument_group("what it generates")
    group.add_argument("--ttft", type=float, metavar="SECONDS", help="to the first token of a request")
    group.add_argument(
        "--tpot", type=float, metavar="SECONDS", help="for each further one (default: as fast as it can)"
    )
    group.add_argument("--jitter", type=float, metavar="SHARE", help="both vary by this share, 0 to 1")
    group.add_argument("--seed", type=int, metavar="N", help="of tokens and jitter: the same seed, the same run")
    group.add_argument("--tokens-per-frame", type=int, metavar="N", help="tokens in one output (default: 1)")
    group.add_argument("--max-running", type=int, metavar="N", help="requests that run at once; others wait")
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="what it says of itself (default: 2048)")
    group.add_argument("--vocab-size", type=int, metavar="N", help="token ids are below (default: 1000)")
    group.add_argument("--release", metavar="VERSION", help="of vLLM, whose messages it speaks (default: 0.33.0)")
    group = parser.add_argument_group("faults")
    group.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND@MESSAGE:N",
        help="what happens at the N-th add, abort, utility (or a method; coming in), outputs or reply (going out), or "
        f"at the N-th message of all (in:N, out:N). KIND is one of {', '.join(get_args(FaultKind))}; "
        "die, slow and malformed stand for kill, sleep and garbage; sleep=SECONDS, exit=CODE, huge=BYTES. Repeatable",
    )
    group.add_argument("--late-outputs", type=int, metavar="N", help="outputs that still follow an abort")
    group.add_argument("--script", type=Path, metavar="FILE", help="a script in JSON, which the other options change")
    group = parser.add_argument_group("output")
    group.add_argument("--log", type=Path, metavar="FILE", help="a JSON line for each message that it receives")
    group.add_argument("-q", "--quiet", action="store_true", help="nothing but errors on standard error")
    group.add_argument("--traceback", action="store_true", help="show where an error was raised")


def serve_mock(options: MockOptions, script: Script) -> int:
    """Serve the front end until SIGTERM or SIGINT, or until a fault ends it; the exit code.

    Raises:
        OSError: the log cannot be written.
    """
    from anyengine.testing.scripted.process import Place, run_process  # loads ZeroMQ

    if not options.quiet:
        print(f"anyengine: a mock engine for the front end at {options.handshake}", file=sys.stderr, flush=True)
    place = Place(
        handshake_address=options.handshake,
        rank=options.rank,
        local=False,
        headless=options.headless,
        log=options.log,
    )
    return run_process(script, place, reports=False)
