"""Coloured shapes in images, counted."""
