"""Options of components: algorithms, adapters, environments and tools."""
