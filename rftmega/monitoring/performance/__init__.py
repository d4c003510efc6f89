"""Performance of all processes: throughput, slow processes (stragglers) and timelines."""
