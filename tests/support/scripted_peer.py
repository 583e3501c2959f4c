"""A peer that speaks the wire by hand and misbehaves on purpose: ``scripted_peer.py BEHAVIOUR [ARG ...]``.

Independent of the client: raw pyzmq and msgpack, positions written out as docs/protocol.md has them.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import zmq

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
READY_RESPONSE = {
    "max_model_len": 64,
    "num_gpu_blocks": 1,
    "block_size": 16,
    "dtype": "float32",
    "vllm_version": "0.33.0",
}


class Peer:
    """One engine core, by hand."""

    tasks: Any = ("generate",)

    def __init__(self) -> None:
        launch = json.loads(sys.stdin.readline())
        self.rank: int = launch.get("rank", 0)
        self.context = zmq.Context()
        self.handshake = self._dealer(launch["handshake_address"])
        self.local: bool = launch.get("local", True)  # False: somebody else than the client has started it

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.rank.to_bytes(2, "little"))
        socket.connect(address)
        return socket

    def hello(self, **claims: Any) -> None:
        self.handshake.send(pack({"status": "HELLO", "local": self.local, "headless": not self.local, **claims}))

    def init(self) -> None:
        addresses = unpack(self.handshake.recv())["addresses"]
        self._connect(addresses["inputs"][0], addresses["outputs"][0])

    def _connect(self, inputs: str, outputs: str) -> None:
        self.inputs = self._dealer(inputs)
        self.outputs = self.context.socket(zmq.PUSH)
        self.outputs.connect(outputs)

    def register(self) -> None:
        self.inputs.send(pack(READY_RESPONSE))

    def ready(self, **claims: Any) -> None:
        self.handshake.send(pack({"status": "READY", "local": self.local, "headless": not self.local, **claims}))

    def start(self) -> None:
        self.hello()
        self.init()
        self.register()
        self.ready()

    def receive(self) -> tuple[bytes, Any]:
        """The next message that a behaviour must see; what every client asks of every engine is answered here."""
        while True:
            kind, payload, *_ = self.inputs.recv_multipart()
            message = unpack(payload)
            if kind != b"\x03" or message[2] != "get_supported_tasks":
                return kind, message
            self.reply(message[1], self.tasks)

    def send_tokens(self, request_id: str, token_ids: list[int], finish_reason: int | None = None) -> None:
        output = [request_id, token_ids, None, None, None, finish_reason]
        self.outputs.send(pack([self.rank, [output], None, 0.0, None]))

    def reply(self, call_id: int, result: Any) -> None:
        self.outputs.send(pack([self.rank, [], None, 0.0, [call_id, None, [None, result]]]))


def exit_at(peer: Peer, stage: str, code: str) -> None:
    """Exit silently before HELLO, after HELLO, after INIT or before READY; code "kill" means SIGKILL."""

    def leave() -> None:
        print(f"leaving at {stage}", file=sys.stderr, flush=True)
        if code == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(int(code))

    if stage == "before_hello":
        leave()
    peer.hello()
    if stage == "after_hello":
        leave()
    peer.init()
    if stage == "after_init":
        leave()
    peer.register()
    leave()


def nonsense(peer: Peer, what: str) -> None:
    """A handshake that makes no sense."""
    if what == "garbage":
        peer.handshake.send(b"\xc1")
    elif what == "remote":
        peer.hello(local=False)
    elif what == "ready_first":
        peer.ready()
    elif what == "twice":
        peer.hello()
        peer.hello()
    signal.pause()


def silent(peer: Peer) -> None:
    """Never says anything; ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def ignores_sigterm(peer: Peer) -> None:
    """Is ready, and ends on nothing but SIGKILL; so does a child of its, whose process id it says on stderr."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if (pid := os.fork()) == 0:
        while True:
            time.sleep(60)
    print(f"child {pid}", file=sys.stderr, flush=True)
    peer.start()
    while True:
        time.sleep(60)


def dead_after_ready(peer: Peer) -> None:
    """Sends the dead sentinel at once, then takes a moment to exit with code 7."""
    peer.start()
    print("RuntimeError: the model exploded", file=sys.stderr, flush=True)
    peer.outputs.send(b"ENGINE_CORE_DEAD")
    time.sleep(0.1)
    peer.outputs.close(linger=1000)
    os._exit(7)


def late_outputs(peer: Peer, count: str) -> None:
    """One token for each request; ``count`` more after its abort, then an ordinary reply to whatever call comes."""
    peer.start()
    while True:
        kind, payload = peer.receive()
        if kind == b"\x00":
            peer.send_tokens(payload[0], [5])
        elif kind == b"\x01":
            for request_id in payload:
                for _ in range(int(count)):
                    peer.send_tokens(request_id, [6])
        elif kind == b"\x03":
            peer.reply(payload[1], "done")


def notify(peer: Peer) -> None:
    """Unsolicited messages around the reply to each call."""
    peer.start()
    while True:
        kind, payload = peer.receive()
        if kind == b"\x03":
            peer.reply(-1, ["RECONFIGURE_FINISHED", 0])
            peer.reply(-2, {"id": 0, "status": "unhealthy", "fault_info": "x"})
            peer.reply(-1, "nonsense")
            peer.outputs.send(b"\xc1garbage")
            peer.reply(payload[1], "done")


def slow_calls(peer: Peer) -> None:
    """Answers calls only when told to: "flush" answers everything, in reverse order, itself last."""
    peer.start()
    waiting: list[int] = []
    while True:
        kind, payload = peer.receive()
        if kind == b"\x03":
            if payload[2] == "flush":
                for call_id in reversed(waiting):
                    peer.reply(call_id, call_id)
                waiting.clear()
                peer.reply(payload[1], "flushed")
            else:
                waiting.append(payload[1])


def record(peer: Peer, path: str, version: str = "0.33.0") -> None:
    """Appends what it receives to ``path``, one JSON line for each message; never generates anything; answers calls."""
    peer.hello()
    peer.init()
    peer.inputs.send(pack({**READY_RESPONSE, "vllm_version": version}))
    peer.ready()
    names = {b"\x00": "add", b"\x01": "abort", b"\x03": "utility"}
    with Path(path).open("a", buffering=1) as log:
        while True:
            kind, payload = peer.receive()
            print(json.dumps([names[kind], payload]), file=log, flush=True)
            if kind == b"\x00":
                peer.send_tokens(payload[0], [1])
            if kind == b"\x03":
                peer.reply(payload[1], "ok")


def says_paused(peer: Peer) -> None:
    """Answers every call with true: of itself, that it is paused."""
    peer.start()
    while True:
        _, payload = peer.receive()
        peer.reply(payload[1], True)


def wedged(peer: Peer) -> None:
    """Its main loop answers calls; its scheduler never schedules anything."""
    peer.start()
    while True:
        kind, payload = peer.receive()
        if kind == b"\x03":
            peer.reply(payload[1], False)


def errors_only(peer: Peer) -> None:
    """Answers calls; ends every request with an error."""
    peer.start()
    while True:
        kind, payload = peer.receive()
        if kind == b"\x00":
            peer.send_tokens(payload[0], [], 3)
        elif kind == b"\x03":
            peer.reply(payload[1], False)


def fails_at_first(peer: Peer, count: str, before: str = "null") -> None:
    """Ends so many requests with a retryable error, behind the tokens ``before`` (JSON); then answers each with one
    token."""
    peer.start()
    left = int(count)
    while True:
        kind, payload = peer.receive()
        if kind == b"\x00":
            if left and (tokens := json.loads(before)):
                peer.send_tokens(payload[0], tokens)
            if not left:
                peer.send_tokens(payload[0], [7], 1)
                continue
            left -= 1
            output = [payload[0], [], None, None, None, 3, None, None, None, None, None, None, None, 0]
            output += [None, None, None, None, {"code": "engine_paused", "message": "it is", "retryable": True}]
            peer.outputs.send(pack([peer.rank, [output], None, 0.0, None]))
        elif kind == b"\x03":
            peer.reply(payload[1], False)


def only_once(peer: Peer, marker: str) -> None:
    """Serves calls if the file ``marker`` is not there, and makes it; exits with status 3 if it is."""
    if Path(marker).exists():
        os._exit(3)
    Path(marker).touch()
    wedged(peer)


def slow_second_start(peer: Peer, marker: str, moment: str) -> None:
    """:func:`only_once`, but the second start never ends. "clearing": closes its input at the first call of the name
    "deaf", and ignores SIGTERM."""
    if moment == "clearing":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if Path(marker).exists():
        signal.pause()
    Path(marker).touch()
    peer.start()
    while True:
        _, payload = peer.receive()
        if payload[2] == "deaf":
            peer.inputs.close(linger=1000)
            signal.pause()
        peer.reply(payload[1], False)


def old_release(peer: Peer, probe: str) -> None:
    """Registers with an empty frame, as releases up to 0.19.1 do, and has is_scheduler_paused ("found": from 0.17) or
    not ("missing"). Answers an ADD with one token: 1 if position 5 is an end-of-sequence id, as it is up to 0.16."""
    peer.hello()
    peer.init()
    peer.inputs.send(b"")
    if probe == "gone":
        peer.inputs.close(linger=1000)
    peer.ready()
    if probe == "gone":
        signal.pause()
    while True:
        kind, payload = peer.receive()
        if kind == b"\x03":
            failure = None if probe == "found" else f"Call to {payload[2]} method failed: no such method"
            result = [None, False] if probe == "found" else None
            peer.outputs.send(pack([0, [], None, 0.0, [payload[1], failure, result], None, None, None]))
        else:
            seen = 1 if payload[5] is None or isinstance(payload[5], int) else 2
            output = [payload[0], [seen], None, None, None, 1, None, None, None, None, 0, 0, None, 0]
            peer.outputs.send(pack([0, [output], None, 0.0, None, None, None, None]))


def old_pair(peer: Peer, marker: str) -> None:
    """Two of :func:`old_release`: rank 1 is unreachable, and makes the file ``marker`` on SIGTERM. Rank 0 does not say
    what its release is before that file is there; it answers everything else."""
    if peer.rank == 1:
        signal.signal(signal.SIGTERM, lambda *_: Path(marker).touch())
        old_release(peer, "gone")
    peer.hello()
    peer.init()
    peer.inputs.send(b"")
    peer.ready()
    held: list[int] = []
    while True:
        if held and Path(marker).exists():
            peer.reply(held.pop(), False)
        if peer.inputs.poll(10):
            _, payload = peer.receive()
            if payload[2] == "is_scheduler_paused":
                held.append(payload[1])
            else:
                peer.reply(payload[1], False)


def loses_link(peer: Peer, link: str) -> None:
    """Serves one call, then closes its "input" (deaf) or "output" (mute) socket and lives on."""
    peer.start()
    _, payload = peer.receive()
    peer.reply(payload[1], "done")
    peer.receive()  # what comes next is never answered
    (peer.inputs if link == "input" else peer.outputs).close(linger=1000)
    signal.pause()


def silent_after_ready(peer: Peer) -> None:
    """Is ready, and never says another word."""
    peer.start()
    signal.pause()


def deaf_ears(peer: Peer) -> None:
    """Takes no notice of anything but the first request."""
    peer.start()
    peer.receive()
    signal.pause()


def fails_requests(peer: Peer, version: str, error: str) -> None:
    """Answers each request with one token and then finish reason 3; ``error`` (JSON) stands at the position that 0.33
    has for it, if it is not null."""
    peer.hello()
    peer.init()
    peer.inputs.send(pack({**READY_RESPONSE, "vllm_version": version}))
    peer.ready()
    detail = json.loads(error)
    while True:
        kind, payload = peer.receive()
        if kind == b"\x00":
            peer.send_tokens(payload[0], [5])
            output = [payload[0], [], None, None, None, 3]
            if detail is not None:
                output += [None, None, None, None, None, None, None, 0, None, None, None, None, detail]
            peer.outputs.send(pack([peer.rank, [output], None, 0.0, None]))


def checksums(peer: Peer) -> None:
    """Answers calls with a checksum of the largest frame of each request."""
    peer.start()
    sums: list[int] = []
    while True:
        kind, *frames = peer.inputs.recv_multipart()
        if kind == b"\x00":
            sums.append(zlib.crc32(max(frames, key=len)))
        elif kind == b"\x03":
            peer.reply(unpack(frames[0])[1], sums)


def collective(peer: Peer) -> None:
    """Has two workers: answers each call with its rank and arguments, once for each of them."""
    peer.start()
    while True:
        _, payload = peer.receive()
        peer.reply(payload[1], [[peer.rank, worker, payload[2], payload[3]] for worker in (0, 1)])


def talks_on(peer: Peer) -> None:
    """Answers the first request without end, and hears nothing any more."""
    peer.start()
    _, payload = peer.receive()
    assert isinstance(payload[0], str), payload
    while True:
        peer.send_tokens(payload[0], [5])
        time.sleep(0.01)


def grandchild(peer: Peer) -> None:
    """Starts a process of its own that would outlive it, and says so on stderr."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
    peer.start()
    signal.pause()


def registers_with(peer: Peer, fields: str) -> None:
    """A registration with these fields (JSON) in place of the usual ones."""
    peer.hello()
    peer.init()
    peer.inputs.send(pack({**READY_RESPONSE, **json.loads(fields)}))
    peer.ready()
    signal.pause()


def hands_back(peer: Peer, fields: str) -> None:
    """A registration with these fields (JSON) besides the usual ones; answers each call with the last ADD."""
    peer.hello()
    peer.init()
    peer.inputs.send(pack({**READY_RESPONSE, **json.loads(fields)}))
    peer.ready()
    added: list[Any] = []
    while True:
        kind, payload = peer.receive()
        if kind == b"\x00":
            added = payload
        else:
            peer.reply(payload[1], added)


def vanish(peer: Peer, marker: str) -> None:
    """Says HELLO, hangs up, makes the file ``marker`` and, once that is gone, exits with code 3."""
    peer.hello()
    peer.handshake.close(linger=5000)
    peer.context.term()
    path = Path(marker)
    path.touch()
    while path.exists():
        time.sleep(0.01)
    os._exit(3)


UNDECODABLE: dict[str, Any] = {  # what stands after the request id, in place of [token_ids, ...]
    "no tokens": [],
    "a token that is no int": [[1.5]],
    "a stop reason that is an array": [[1], None, None, None, 0, [1]],
    "a pickle": [[1], None, None, None, None, None, None, {"x": msgspec.msgpack.Ext(1, b"cos\nsystem\n")}],
    "a tensor without its frame": [[1], None, None, ["float32", [1], 1]],
}


def undecodable(peer: Peer, what: str) -> None:
    """Answers three requests in one message: one token, the last. The second one's output cannot be decoded (or, of
    "statistics", what stands beside the outputs). Then answers calls with the ids of all requests, and of the aborted
    ones."""
    peer.start()
    added: list[str] = []
    aborted: list[str] = []
    while True:
        kind, payload = peer.receive()
        if kind == b"\x00":
            added.append(payload[0])
        elif kind == b"\x01":
            aborted += payload
        else:
            peer.reply(payload[1], [added, aborted])
        if kind == b"\x00" and len(added) == 3:
            outputs: list[Any] = [[request_id, [7], None, None, None, 1] for request_id in added]
            if what != "statistics":
                outputs[1] = [added[1], *UNDECODABLE[what]]
            peer.outputs.send(pack([0, outputs, "nonsense" if what == "statistics" else None, 0.0, None]))


UNREADABLE: dict[str, list[Any]] = {  # what stands after the call id, in place of [failure message, [type info, value]]
    "a pickle": [None, [["m", "C"], msgspec.msgpack.Ext(2, b"cos\nsystem\n")]],
    "no pair": [None, "done"],
    "a failure that is no text": [5, None],
}


def unreadable_reply(peer: Peer, what: str) -> None:
    """Answers every other call so that it cannot be read."""
    peer.start()
    while True:
        for reply in (UNREADABLE[what], [None, [None, "done"]]):
            _, payload = peer.receive()
            peer.outputs.send(pack([0, [], None, 0.0, [payload[1], *reply]]))


def dead_but_talking(peer: Peer, when: str = "at once") -> None:
    """Sends the dead sentinel ("called": at the first call), lives on, and sends output batches as fast as it can."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    peer.start()
    if when == "called":
        peer.receive()
    peer.outputs.send(b"ENGINE_CORE_DEAD")
    message = pack([0, [["nobody", [1] * 100]], None, 0.0, None])
    while True:
        peer.outputs.send(message)


def sentinels(peer: Peer, count: str) -> None:
    """Says so many times at its first call that it is dead, and lives on in silence."""
    peer.start()
    peer.receive()
    for _ in range(int(count)):
        peer.outputs.send(b"ENGINE_CORE_DEAD")
    signal.pause()


def notifies_without_end(peer: Peer, count: str) -> None:
    """Sends so many notifications in front of the reply to each call."""
    peer.start()
    notification = pack([peer.rank, [], None, 0.0, [-1, None, [None, ["RECONFIGURE_FINISHED", 0]]]])
    while True:
        _, payload = peer.receive()
        for _ in range(int(count)):
            peer.outputs.send(notification)
        peer.reply(payload[1], "done")


def garbage_without_end(peer: Peer, count: str) -> None:
    """Sends so many messages that are none in front of the reply to each call."""
    peer.start()
    while True:
        _, payload = peer.receive()
        for _ in range(int(count)):
            peer.outputs.send(b"\xc1garbage")
        peer.reply(payload[1], "done")


def flood(peer: Peer, name: str) -> None:
    """At each call, sends on the socket ``name`` until nothing is taken any more; the answer: how many of 20,000."""
    peer.start()
    socket: zmq.Socket[bytes] = getattr(peer, name)
    socket.setsockopt(zmq.SNDTIMEO, 500)
    while True:
        _, payload = peer.receive()
        count = 0
        try:
            for count in range(20_000):  # noqa: B007 - the count is what is asked for
                socket.send(bytes(4096))
        except zmq.Again:
            pass
        peer.reply(payload[1], count + 1)


def talkative(peer: Peer) -> None:
    """Says where it is among much that only looks like it, then exits with code 3."""
    junk = [
        b"\xff" * 3_000_000,
        b'{"stage":"\xff"}',
        b'{"stage":1}',
        b'{"stage":"loading","fraction":"x"}',
        b"[" * 100_000,
    ]
    junk += [b'{"stage":"epoch %d"}' % epoch for epoch in range(2000)]
    sys.stdout.buffer.write(b'{"stage":"loading"}\n' + b"\n".join(junk) + b"\n")
    sys.stdout.flush()
    os.write(2, b"\xff" * 3_000_000)
    os._exit(3)


def model_at(peer: Peer, model_dir: str) -> None:
    """Names ``model_dir`` as the directory of its model."""
    print(json.dumps({"stage": "loading", "model_dir": model_dir}), flush=True)
    peer.start()
    signal.pause()


def log_probs_of(tokens: list[int], columns: int = 6) -> list[Any]:
    """LogprobsLists: row i says that token t was taken with -t/10, rank t, beside tokens 101, 102, ..."""
    others = columns - 1
    ids = [item for token in tokens for item in (token, *range(101, 101 + others))]
    values = [item for token in tokens for item in (-token / 10, *(-float(rank) for rank in range(1, columns)))]
    shape = [len(tokens), columns]
    return [
        ["<i4", shape, msgspec.msgpack.Ext(3, struct.pack(f"<{len(ids)}i", *ids))],
        ["<f4", shape, msgspec.msgpack.Ext(3, struct.pack(f"<{len(values)}f", *values))],
        ["<i8", [len(tokens)], msgspec.msgpack.Ext(3, struct.pack(f"<{len(tokens)}q", *tokens))],
        None,
    ]


BROKEN_LOG_PROBS: dict[str, Any] = {  # in place of the two rows of the second output
    "missing": None,
    "a row too few": log_probs_of([6]),
    "no matrix": [["<i4", [2], msgspec.msgpack.Ext(3, bytes(8))], *log_probs_of([6, 7])[1:]],
    "rows without end": [
        ["<i4", [1 << 31, 0], msgspec.msgpack.Ext(3, b"")],
        ["<f4", [1 << 31, 0], msgspec.msgpack.Ext(3, b"")],
        ["<i8", [0], msgspec.msgpack.Ext(3, b"")],
    ],
    "columns without end": [
        ["<i4", [0, 1 << 62], msgspec.msgpack.Ext(3, b"")],
        ["<f4", [0, 1 << 62], msgspec.msgpack.Ext(3, b"")],
        ["<i8", [0], msgspec.msgpack.Ext(3, b"")],
    ],
    "no columns": [
        ["<i4", [2, 0], msgspec.msgpack.Ext(3, b"")],
        ["<f4", [2, 0], msgspec.msgpack.Ext(3, b"")],
        ["<i8", [2], msgspec.msgpack.Ext(3, bytes(16))],
    ],
    "ranks beyond 63 bits": [*log_probs_of([6, 7])[:2], ["<u8", [2], msgspec.msgpack.Ext(3, b"\xff" * 16)]],
    "tokens that are no integers": [log_probs_of([6, 7])[1], *log_probs_of([6, 7])[1:]],
    "an unknown dtype": [["q4", [2, 6], msgspec.msgpack.Ext(3, b"x")], *log_probs_of([6, 7])[1:]],
    "big-endian": [[">i4", [2, 6], msgspec.msgpack.Ext(3, bytes(48))], *log_probs_of([6, 7])[1:]],
    "bytes of another size": [["<i3", [2, 6], msgspec.msgpack.Ext(3, bytes(36))], *log_probs_of([6, 7])[1:]],
    "ranks of others": [*log_probs_of([6, 7])[:2], *log_probs_of([6])[2:]],
    "no numbers": [
        log_probs_of([6, 7])[0],
        ["float8_e5m2", [2, 6], msgspec.msgpack.Ext(3, bytes(12))],
        *log_probs_of([6, 7])[2:],
    ],
}


def scores(peer: Peer, what: str) -> None:
    """Answers each request with tokens 5, 6, 7 and 8 in three outputs, with their log-probabilities, and those of a
    prompt of four tokens in three pieces, two of them before any token. ``what`` is "good" or a way to be broken;
    "together" sends all of it in one message."""
    peer.start()
    while True:
        kind, payload = peer.receive()
        if kind == b"\x03":
            peer.reply(payload[1], "done")
        if kind != b"\x00":
            continue
        name = payload[0]
        rows = BROKEN_LOG_PROBS.get(what, log_probs_of([6, 7]))
        outputs = [
            [name, [], None, [*log_probs_of([11])[:3], None, None]],
            [name, [], None, [*log_probs_of([12])[:3], None, None]],
            [name, [5], log_probs_of([5]), [*log_probs_of([13])[:3], None, None]],
            [name, [6, 7], rows],
            [name, [8], log_probs_of([8]), None, None, 1],
        ]
        for batch in [outputs] if what == "together" else [[output] for output in outputs]:
            peer.outputs.send(pack([0, batch, None, 0.0, None]))


def pooler(peer: Peer) -> None:
    """A pooling engine. Answers by the first token of the prompt: 1 a vector, 2 an error, 3 an end without a result, 4
    nothing, 5 by dying, 6 an abort that nobody asked for. Answers calls with the ids that were aborted."""
    peer.tasks = ["embed", "token_embed", "classify"]
    peer.start()
    aborted: list[str] = []
    vector = ["float32", [3], msgspec.msgpack.Ext(3, struct.pack("<3f", 1.0, 2.0, 3.0))]
    while True:
        kind, payload = peer.receive()
        if kind == b"\x01":
            aborted += payload
        elif kind == b"\x03":
            peer.reply(payload[1], aborted)
        elif payload[1][0] == 5:
            os._exit(5)
        elif payload[1][0] != 4:
            result, reason = {1: (vector, 0), 2: (None, 3), 3: (None, 0), 6: (None, 2)}[payload[1][0]]
            peer.outputs.send(pack([0, [[payload[0], [], None, None, result, reason]], None, 0.0, None]))


def adapters(peer: Peer, path: str) -> None:
    """``record``, but add_lora fails for what is in "/nowhere"."""
    peer.start()
    with Path(path).open("a", buffering=1) as log:
        while True:
            kind, payload = peer.receive()
            print(
                json.dumps([{b"\x00": "add", b"\x01": "abort", b"\x03": "utility"}[kind], payload]),
                file=log,
                flush=True,
            )
            if kind == b"\x03":
                failed = payload[2] == "add_lora" and payload[3][0][2] == "/nowhere"
                failure = "Call to add_lora method failed: no such file" if failed else None
                peer.outputs.send(pack([0, [], None, 0.0, [payload[1], failure, None if failed else [None, True]]]))
            elif kind == b"\x00":
                peer.send_tokens(payload[0], [7], 1)


def strict_references(peer: Peer) -> None:
    """Fails each request that refers to what it was not given: an adapter that no add_lora brought (every other one of
    these fails), a feature without its data (which is forgotten at once). Others get one token."""
    peer.start()
    adapters: set[int] = set()
    calls = 0
    while True:
        kind, payload = peer.receive()
        if kind == b"\x03":
            calls += payload[2] == "add_lora"
            failed = payload[2] == "add_lora" and calls % 2 == 1
            if payload[2] == "add_lora" and not failed:
                adapters.add(payload[3][0][1])
            if payload[2] == "remove_lora":
                adapters.discard(payload[3][0])
            failure = "Call to add_lora method failed: try again" if failed else None
            peer.outputs.send(pack([0, [], None, 0.0, [payload[1], failure, None if failed else [None, True]]]))
        elif kind == b"\x00":
            unknown = payload[6] is not None and payload[6][1] not in adapters
            unknown |= any(feature["data"] is None for feature in payload[2] or ())
            peer.send_tokens(payload[0], [] if unknown else [7], 3 if unknown else 1)


def broken_under_check(peer: Peer, what: str) -> None:
    """Becomes ready, in its way, and then says nothing that helps."""
    if what == "hellos":
        for _ in range(20_000):
            peer.hello()
    peer.hello()
    addresses = unpack(peer.handshake.recv())["addresses"]
    peer._connect(addresses["inputs"][0], addresses["outputs"][0])
    second = peer._dealer(addresses["inputs"][1])
    claims = {"max_model_len": 1 << 62} if what == "no end of room" else {}
    for socket in (peer.inputs, second):
        socket.send(b"" if what == "old and silent" else pack({**READY_RESPONSE, **claims}))
    if what == "registers on and on":
        for _ in range(20_000):
            peer.register()
    peer.ready()
    nested = b"\x95\x00\x90\xc0\xcb" + bytes(8) + b"\x93\x05\xc0\x92\xc0" + b"\x91" * 900 + b"\xc0"
    while True:
        _, payload = peer.receive()
        if what == "nested":
            peer.outputs.send_multipart([nested, b""])
        if what == "no end of room":
            peer.reply(payload[1], None)


BEHAVIOURS = {name: value for name, value in globals().copy().items() if inspect.isfunction(value)}

if __name__ == "__main__":
    BEHAVIOURS[sys.argv[1]](Peer(), *sys.argv[2:])
