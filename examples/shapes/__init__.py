"""Example: counting coloured shapes in images with a vision-language model."""
