"""A state machine lets an engine fail at any times, and checks its account against a list of all restarts."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from anyengine import RestartPolicy
from anyengine._protocol import RestartBudget
from anyengine.exceptions import EngineDeadError, EngineError

SECONDS = st.floats(0, 100, allow_nan=False)


class RestartBudgetMachine(RuleBasedStateMachine):
    """``granted_s`` has every restart that there was, and ``failures`` what each was for."""

    @initialize(
        max_restarts=st.integers(1, 5),
        window_s=st.floats(0.5, 50),
        backoff_s=SECONDS,
        factor=st.floats(1, 1e300),
        max_backoff_s=SECONDS,
        jitter=st.floats(0, 1),
    )
    def begin(
        self, max_restarts: int, window_s: float, backoff_s: float, factor: float, max_backoff_s: float, jitter: float
    ) -> None:
        self.policy = RestartPolicy(
            max_restarts=max_restarts,
            window_s=window_s,
            backoff_s=backoff_s,
            backoff_factor=factor,
            max_backoff_s=max_backoff_s,
            jitter=jitter,
        )
        self.budget = RestartBudget(self.policy)
        self.now_s = 0.0
        self.granted_s: list[float] = []
        self.failures: list[EngineError] = []

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(chance=st.floats(0, 1))
    def fail(self, chance: float) -> None:
        failure = EngineDeadError(f"at {self.now_s}")
        recent = [time_s for time_s in self.granted_s if self.now_s - time_s < self.policy.window_s]
        restart = self.budget.failed(failure, self.now_s, chance)
        assert (restart is not None) == (len(recent) < self.policy.max_restarts)
        if restart is None:
            return
        assert restart.attempt == len(recent) + 1
        assert 0 <= restart.delay_s <= self.policy.max_backoff_s
        assert restart.delay_s >= self.policy.delay_s(restart.attempt, 1.0)
        assert self.policy.delay_s(restart.attempt, 0) <= self.policy.delay_s(restart.attempt + 1, 0)
        self.granted_s.append(self.now_s)
        self.failures.append(failure)

    @invariant()
    def no_window_has_more_than_its_share(self) -> None:
        for first, last in zip(self.granted_s, self.granted_s[self.policy.max_restarts :], strict=False):
            assert last - first >= self.policy.window_s

    @invariant()
    def the_history_is_what_came_last(self) -> None:
        history = list(self.budget.history)
        assert len(history) <= self.policy.max_restarts
        assert history == self.failures[len(self.failures) - len(history) :]


TestRestartBudget = RestartBudgetMachine.TestCase
