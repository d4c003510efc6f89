"""Performance of all processes: throughput, stragglers and timelines."""
