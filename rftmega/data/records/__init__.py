"""Records of data files: readers, and access to their values."""

from rftmega.data.records.readers import records
from rftmega.data.records.values import Record, listed, value_at, with_value

__all__ = ["Record", "listed", "records", "value_at", "with_value"]
