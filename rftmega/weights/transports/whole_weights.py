"""Base class of the transports that send whole HF-named tensors to engines."""

from abc import abstractmethod
from collections.abc import Sequence

from rftmega.core.shards import Shard
from rftmega.core.types import SliceChecksums
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.weights import Exporter
from rftmega.weights.slice_sums import sum_of
from rftmega.weights.transports.disk_weights import READER, own_writes
from rftmega.weights.transports.remote_weights import Asked, RemoteReceivers, RemoteWeights


class WholeWeights(RemoteWeights):
    """WholeWeights sends the complete model to engines that run without this package, e.g. stock
    SGLang.
    """

    def __init__(self, shards: Sequence[Shard], engines: RemoteReceivers, *, bucket_bytes: int):
        super().__init__(shards, engines, bucket_bytes=bucket_bytes)
        self._exporter = Exporter(shards, None, bucket_bytes=bucket_bytes)
        self._own = [each for bucket in own_writes(self.buckets, self.rank) for each in bucket]
        self._sums = dict[str, int]()  # of this process's slices in the last push

    def checksums(self) -> list[SliceChecksums]:
        """Returns for every slice of the last push its checksums: of the trainer's weights now, as
        sent and as received; a collective. The policy's weights must be on the device. The received
        checksums repeat the sent ones, since these engines compute none.
        """
        self.shards.look_again()
        found = []
        for each in self._own:
            held, sent = sum_of(self.shards.slice_of(each)), self._sums.get(str(each))
            found.append(SliceChecksums(each.name, each.box, self.rank, READER, held, sent, sent))
        return [each for theirs in gather_objects(found) for each in theirs]

    def _brought(self, names: Sequence[str], version: int) -> tuple[int, Asked]:
        moved, asked = self._gave(names, version)
        self._sums = {str(each): sum_of(self.shards.slice_of(each)) for each in self._own}
        return moved, asked

    @abstractmethod
    def _gave(self, names: Sequence[str], version: int) -> tuple[int, Asked]:
        """Sends whole tensors to the engines `names`, as weight version `version`. Returns the
        number of bytes sent, and the engines' pending replies.
        """
