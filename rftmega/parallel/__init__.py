"""Who am I among the processes, and how do they talk? `topology` is the only reader of Megatron's parallel state."""
