"""Reward shaping before advantages: overlong penalty, normalisation and clipping."""

from collections.abc import Callable

from torch import Tensor


def overlong_penalty(length: Tensor, *, longest: int, buffer: int, factor: float) -> Tensor:
    """Maps completion lengths [B] int, in tokens, to penalties [B]: 0 up to `longest` - `buffer`
    tokens, then falling linearly to -factor at `longest` tokens, and -factor beyond (DAPO,
    arXiv:2503.14476, eq. 13).
    """
    return -factor * ((length - (longest - buffer)) / buffer).clamp(0.0, 1.0)


class RunningMoments:
    """Running mean and variance of all rewards (Chan et al., "Updating formulae", 1979). `state`,
    which checkpoints store: number of rewards, mean, and summed squared distances to the mean.
    """

    def __init__(self) -> None:
        # `squares`: summed squared distances to the mean
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def update(self, reward: Tensor) -> None:
        """Updates the running mean and variance with the rewards [B] of one rollout phase."""
        exact = reward.double()
        mean, squares, count = (
            exact.mean().item(),
            (exact - exact.mean()).square().sum().item(),
            len(exact),
        )
        together = self.count + count
        apart = mean - self.mean
        self.squares += squares + apart * apart * self.count * count / together
        self.mean += apart * count / together
        self.count = together

    def normalised(self, reward: Tensor, *, eps: float = 1e-8) -> Tensor:
        """Returns the rewards [B] minus the running mean, over the running standard deviation plus
        `eps`.
        """
        deviation = (self.squares / max(self.count - 1, 1)) ** 0.5
        return ((reward.double() - self.mean) / (deviation + eps)).to(reward.dtype)

    @property
    def state(self) -> tuple[int, float, float]:
        return self.count, self.mean, self.squares

    @state.setter
    def state(self, state: tuple[int, float, float]) -> None:
        self.count, self.mean, self.squares = state


class Shaping:
    """Shaping applies overlong penalty, running normalisation and clipping, in this order.
    `longest`: maximum response length in tokens; `buffer`: the last tokens of this length, over
    which the penalty grows to `factor`; `clip`: maximum absolute value of a reward. `buffer` 0,
    `normalise` False or `clip` 0 turns the respective one off. `weight_in` returns the weight of a
    reward component for a task type (both names), for advantage estimators that read components.
    """

    def __init__(
        self,
        *,
        longest: int,
        buffer: int = 0,
        factor: float = 1.0,
        normalise: bool = False,
        clip: float = 0.0,
        weight_in: Callable[[str, str], float] = lambda kind, component: 1.0,
    ):
        self.longest, self.buffer, self.factor = longest, buffer, factor
        self.moments = RunningMoments() if normalise else None
        self.clip, self.weight_in = clip, weight_in

    def __call__(self, reward: Tensor, length: Tensor) -> Tensor:
        """Returns the shaped rewards [B] of completions; `length` [B]: their numbers of tokens.
        Updates the running moments, so call it once per rollout phase.
        """
        if self.buffer:
            reward = reward + overlong_penalty(
                length, longest=self.longest, buffer=self.buffer, factor=self.factor
            )
        if self.moments is not None:
            self.moments.update(reward)
            reward = self.moments.normalised(reward)
        return reward.clamp(-self.clip, self.clip) if self.clip else reward
