"""When engines end a rollout before its last answer: together, as soon as what they have suffices."""

from collections.abc import Sequence

from rftmega.interfaces import Enough
from rftmega.parallel import stop
from rftmega.parallel.collectives import gather_objects
from rftmega.strategy.judging import Judging
from rftmega.types import Completion

EVERY = 16  # engine steps from one decision to the next


class Together:
    """What the engines of all processes have finished, the same everywhere; ask it after each step of this process's engine.

    Decisions fall after the same steps of every engine, whatever time these took, and know what was finished one decision
    earlier, scores included: those are waited for. So the same requests end with the same answers, run after run, and rewards
    have EVERY steps of time before an engine waits for them. A request to stop the run ends it, too: `given_up`.
    """

    def __init__(self, judging: Judging, places: Sequence[int], requests: int, enough: Enough):
        """`places` among all `requests`: of those that this process's engine got; empty where another process speaks for it."""
        self.judging, self.places, self.enough = judging, places, enough
        self.answers: list[Completion | None] = [None] * requests
        self.over = self.given_up = False
        self._steps = self._told = self._finished = 0  # the latter two: of reports, until the last decision

    def __call__(self) -> bool:
        self._steps += 1
        return self._steps % EVERY == 0 and self._decide(idle=False)

    def wait(self) -> None:
        """This process's engine has nothing left to do: the others decide, and this one with them."""
        while not self.over and not self.given_up:
            self._decide(idle=True)

    def _decide(self, *, idle: bool) -> bool:
        """A collective."""
        asked, own = stop.asked(), {}
        if self.places and self.judging.settled(stop.asked, self._told, self._finished):
            own = self.judging.scored(self._told, self._finished)
        elif self.places:  # scores were not waited for, so this is the last decision
            asked = True
        self._told, self._finished = self._finished, len(self.judging.reports)
        done = idle and self._told == self._finished and not asked
        told = gather_objects(({self.places[place]: answer for place, answer in own.items()}, done, asked))
        for answers, _, _ in told:
            for place, answer in answers.items():
                self.answers[place] = answer
        self.over = self.enough(self.answers) or all(done for _, done, _ in told)
        self.given_up = not self.over and any(asked for _, _, asked in told)
        return self.over or self.given_up
