"""ReplayMixer mixes experience of earlier steps into the experience of the current step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from rftmega.core.interfaces import Scorer
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience, Metrics
from rftmega.trainer.experience.mixed import mixed_evenly
from rftmega.trainer.experience.replay import ReplayBuffer
from rftmega.trainer.experience.replayed_teachers import taught_again, with_every_teacher
from rftmega.trainer.experience.teachers import AskedTeacher


class ReplayMixer:
    """ReplayMixer trains again on completions of policies at most `max_age` steps old, with the
    behaviour log-probs of the engine that sampled them.

    The current policy computes new old log-probs for these completions: the ratio that a surrogate
    clips starts at 1 as for new completions, and the importance weight, old over behaviour
    probability, corrects for the policy's change since then (the decoupled objective,
    arXiv:2110.00641, eq. 3, and arXiv:2505.24298, eq. 5), bounded by
    `algorithm.importance_sampling`. Teachers are asked again, so that one that is the policy itself
    teaches with its current weights.
    """

    def __init__(
        self,
        policy: Scorer,
        buffer: ReplayBuffer,
        *,
        max_age: int,
        own_routes: bool = False,
        teachers: Sequence[AskedTeacher] = (),
    ):
        """`policy` computes the new old log-probs; `buffer` stores the completions of earlier
        steps. `own_routes`: ignore recorded expert routes and use those that the policy chooses
        each time rows are scored. `teachers`: those of the run.
        """
        self.own_routes, self.teachers = own_routes, teachers
        self.policy, self.buffer, self.max_age = policy, buffer, max_age
        self._crowded_out = 0  # groups that the last `keep` dropped

    def beside(
        self, experience: Experience[Ragged], step: int
    ) -> tuple[Experience[Ragged], Metrics]:
        """Returns `experience` of step `step`, mixed evenly with the stored rows that are recent
        enough.

        Also returns metrics: the number of stored rows, the mean age of their tokens in steps, and
        the number of groups dropped since the last step (too old, or beyond the limit).
        """
        dropped = self._crowded_out + self.buffer.drop_older(step - self.max_age)
        metrics = {"replay_rows": float(len(self.buffer)), "replay_groups_dropped": float(dropped)}
        if not self.buffer.groups:
            return experience, metrics | {"replay_staleness": 0.0}
        once = self.buffer.host.once
        earlier = once(
            lambda: Experience.join(
                with_every_teacher(group, self.teachers) for group in self.buffer.groups
            )
        )
        metrics["replay_staleness"] = once(lambda: _staleness(earlier, step))
        if self.own_routes:
            earlier = replace(earlier, routes=None)
        stats = self.policy.log_probs(earlier.rows)
        earlier = taught_again(earlier, stats.logp, self.teachers, self.buffer.host)
        earlier = replace(earlier, old_logp=stats.logp, entropy=stats.entropy)
        if self.own_routes:
            earlier = replace(earlier, routes=stats.routes)
        return once(lambda: mixed_evenly([experience, earlier])), metrics

    def keep(self, experience: Experience[Ragged], group: Tensor) -> None:
        """Stores the groups of `experience` for later steps; `group`: the group number of each row.

        Groups without a nonzero advantage in a trained token, and without a teacher in the loss,
        are left out. What teachers said is not stored, except of the sampled tokens.
        """
        teaches = self.buffer.host.once(lambda: _teaches(experience))
        rows = [int(row) for row in range(len(group)) if bool(teaches[group == group[row]].any())]
        index = group.new_tensor(rows)
        self._crowded_out = (
            self.buffer.append(replace(experience, teachers=()).select(index), group[index])
            if rows
            else 0
        )

    def state(self) -> dict[str, Any]:
        return self.buffer.state() | {"crowded_out": self._crowded_out}

    def load_state(self, state: dict[str, Any]) -> None:
        self.buffer.load_state(state)
        self._crowded_out = state["crowded_out"]


def _staleness(experience: Experience[Ragged], step: int) -> float:
    """Returns the mean age of the sampled tokens: by how many versions the policy that sampled them
    is behind `step`.
    """
    assert experience.versions is not None
    versions = experience.versions.flat
    return (step - versions[versions >= 0].double()).mean().item()


def _teaches(experience: Experience[Ragged]) -> Tensor:
    """Returns [B] bool: True for rows with a nonzero advantage in a trained token, and for those
    that a teacher in the loss teaches.
    """
    counts = (experience.advantage.flat != 0) & experience.mask.flat
    found = experience.mask.with_values(counts).sums() > 0
    for scores in experience.teachers:
        found = found | scores.taught
    return found
