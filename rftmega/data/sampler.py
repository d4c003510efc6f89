"""Order of examples: epochs without repetition, each shuffled with its own seed, and sources mixed
by weight.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rftmega.config import DataConfig, shares
from rftmega.data.records.epochs import Epochs

T = TypeVar("T")


def order_of(
    data: DataConfig,
    load: Callable[[str], Sequence[T]],
    *,
    batch_size: int,
    seed: int,
    collate: Callable[[list[T]], Any] = list,
) -> "PromptOrder[T]":
    """Returns the stream of batches that a run trains on: the examples of data.train, or of all
    data.sources mixed by weight, shuffled with `seed`. `load` returns the examples of one file;
    `collate` combines `batch_size` examples into a batch.
    """
    if not data.sources:
        return PromptOrder(load(data.train), batch_size=batch_size, seed=seed, collate=collate)
    sources = [load(source) for source in data.sources]
    return MixedOrder(
        sources,
        list(data.sources.values()),
        batch_size=batch_size,
        seed=seed,
        collate=collate,
        names=list(data.sources),
    )


class PromptOrder(Generic[T]):
    """PromptOrder is an endless stream of batches of prompts or other examples. `position` is the
    number of examples used so far.
    """

    def __init__(
        self,
        prompts: Sequence[T],
        *,
        batch_size: int,
        seed: int | str,
        collate: Callable[[list[T]], Any] = list,
    ):
        """`collate` combines `batch_size` examples into a batch."""
        self.batch_size, self.collate = batch_size, collate
        self.position = 0
        self._mix([""], [Epochs(prompts, seed)], [1])

    def _mix(
        self, names: Sequence[str], sources: Sequence[Epochs[T]], weights: Sequence[float]
    ) -> None:
        self._names, self._sources, self._shares = names, sources, shares(weights)
        self._cycle = cycle(self._shares)
        taken = [0] * len(sources)
        self._before = []  # number of earlier occurrences of the same source in the cycle
        for source in self._cycle:
            self._before.append(taken[source])
            taken[source] += 1
        # for each source, the examples used beyond its share of the position, under earlier weights
        self._beyond = [0] * len(sources)

    @property
    def sizes(self) -> dict[str, int]:
        """Returns source name -> number of its examples. The name is "" if there is only one
        source.
        """
        return {
            name: len(source.items) for name, source in zip(self._names, self._sources, strict=True)
        }

    @property
    def examples(self) -> Iterator[T]:
        """Yields the examples of all sources, in the order of the files."""
        for source in self._sources:
            yield from source.items

    @property
    def epochs(self) -> float:
        """Returns how many times the data has been used so far: 0.5 is half of its examples."""
        return self.position / sum(self.sizes.values())

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch = [self.at(self.position + i) for i in range(self.batch_size)]
            self.position += self.batch_size
            yield self.collate(batch)

    def state(self) -> dict[str, Any]:
        """Returns the state from which `load_state` resumes: the position in the stream, and which
        examples of each source its current epoch has used. JSON-serializable except for tensors.
        """
        counts = zip(self._names, self._sources, self._taken(), strict=True)
        given = {name: source.state(taken) for name, source, taken in counts}
        return {"position": self.position, "sources": given}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from `state`, a value that the method `state` returned. If data, seed or weights
        have changed, each source still continues with the examples that its current epoch has not
        used yet.
        """
        self.position = state["position"]
        if "sources" not in state:  # of an earlier version: the data must be the same
            return
        self._beyond = [0] * len(self._sources)
        known: Mapping[str, Any] = state["sources"]
        if len(known) == len(self._names) == 1:  # even if its path has changed
            known = dict(zip(self._names, known.values(), strict=True))
        due = self._taken()
        for number, (name, source) in enumerate(zip(self._names, self._sources, strict=True)):
            if name in known:
                source.load_state(known[name])
            self._beyond[number] = (known[name]["taken"] if name in known else 0) - due[number]

    def at(self, position: int) -> T:
        """Returns the example at `position` of the stream, counted from 0 over all epochs."""
        number, place = divmod(position, len(self._cycle))
        source = self._cycle[place]
        taken = number * self._shares[source] + self._before[place]
        return self._sources[source].at(taken + self._beyond[source])

    def _taken(self) -> list[int]:
        """Returns, for each source, the number of its examples among those used so far, over all
        epochs.
        """
        number, place = divmod(self.position, len(self._cycle))
        begun = Counter(self._cycle[:place])
        return [
            number * share + begun[source] + self._beyond[source]
            for source, share in enumerate(self._shares)
        ]


class MixedOrder(PromptOrder[T]):
    """MixedOrder is a PromptOrder that interleaves several sources, each with its own epochs. A
    source's share w is its part of the sum of the weights: of the first n examples, the source
    gives more than n w - 1 and less than n w + 1, for every n, and exactly its share after each
    whole cycle (see `cycle`).
    """

    def __init__(
        self,
        sources: Sequence[Sequence[T]],
        weights: Sequence[float],
        *,
        batch_size: int,
        seed: int,
        collate: Callable[[list[T]], Any] = list,
        names: Sequence[str] | None = None,
    ):
        """`weights`: one positive number per source; their sum need not be 1. `names`: of the
        sources; a resume finds a source's state by its name. None: the sources' indices.
        """
        self.batch_size, self.collate = batch_size, collate
        self.position = 0
        epochs = [Epochs(source, f"{seed}/{number}") for number, source in enumerate(sources)]
        self._mix(names or [str(number) for number in range(len(sources))], epochs, weights)


def cycle(shares: Sequence[int]) -> list[int]:
    """Returns an order of sum(shares) examples of several sources, as the index of the source at
    each position. Source s occurs shares[s] times, evenly spaced.

    Item j of a source with share a of A must stand at or after place floor(j A / a) and before
    ceil((j + 1) A / a), or its count would leave n a / A by one or more at some prefix n. Such an
    order exists (Tijdeman, The chairman assignment problem, 1980), and the earliest deadline first
    finds it, since every item takes one place.
    """
    whole = sum(shares)
    taken = [0] * len(shares)
    order = []
    for place in range(whole):
        open_ = (s for s, share in enumerate(shares) if taken[s] * whole < (place + 1) * share)
        source = min(open_, key=lambda s: (-(-(taken[s] + 1) * whole // shares[s]), s))
        order.append(source)
        taken[source] += 1
    return order


class ResumableSampler:
    """ResumableSampler is a sampler for torch's DataLoader that yields the indices of a dataset.
    Each call of `iter` is one epoch; the first call yields the remaining indices of the epoch in
    which an earlier run stopped.
    """

    def __init__(
        self,
        size: int,
        *,
        shuffle: bool,
        seed: int,
        consumed: int = 0,
        per_epoch: int | None = None,
    ):
        """`size`: number of samples of the dataset. `consumed`: number of samples that earlier runs
        have used, over all epochs. `per_epoch`: samples that a loader uses per epoch, less than
        `size` if it drops a last, smaller batch; None: `size`.
        """
        self.size, self.shuffle = size, shuffle
        self._epochs = Epochs(range(size), seed)
        self.per_epoch = size if per_epoch is None else per_epoch
        self.epoch, self.offset = divmod(consumed, self.per_epoch) if self.per_epoch else (0, 0)

    def __iter__(self) -> Iterator[int]:
        places = range(self.epoch * self.size + self.offset, (self.epoch + 1) * self.size)
        self.epoch, self.offset = self.epoch + 1, 0
        return iter(
            [self._epochs.at(place) if self.shuffle else place % self.size for place in places]
        )

    def __len__(self) -> int:
        return self.size - self.offset
