"""Example: counting beeps in recordings with an audio-language model."""
