"""Records are what data files hold."""

from rftmega.records.readers import Record, records

__all__ = ["Record", "records"]
