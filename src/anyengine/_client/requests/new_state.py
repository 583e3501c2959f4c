"""Which merge buffer a request gets: the plain one, unless it asks for more than tokens.

Owns the choice.
"""

from __future__ import annotations

from anyengine._client.session.wakeup import Parker
from anyengine._wire import EngineCoreRequest
from anyengine.params import SamplingParams

from .deadlines import TimedRequestState, TimedScoredRequestState
from .scores import ScoredRequestState, wants_scores
from .state import BatchClock, RequestState

__all__ = ["make_state"]


def make_state(
    request: EngineCoreRequest,
    parker: Parker,
    params: SamplingParams,
    num_prompt_tokens: int,
    clock: BatchClock,
    *,
    timed: bool,
) -> RequestState:
    """Where the outputs of ``request`` go; ``timed``: the times of its tokens matter."""
    wire_id, label = request.request_id, request.external_req_id or ""
    if wants_scores(params):
        scored = TimedScoredRequestState if timed else ScoredRequestState
        state: RequestState = scored(wire_id, label, parker, params, num_prompt_tokens, clock=clock)
    else:
        state = (TimedRequestState if timed else RequestState)(wire_id, label, parker, clock=clock)
    if params.stream_interval is not None:
        state.interval = params.stream_interval
    return state
