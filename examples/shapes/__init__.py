"""Coloured shapes in pictures, counted."""
