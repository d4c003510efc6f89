"""ServerGroup holds vLLM servers: their processes, what is said to them, and the engine that they are together."""
