"""Beeps in recordings, counted."""
