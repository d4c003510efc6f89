"""Options of the parts that a run is put together from: algorithms, environments, tools."""
