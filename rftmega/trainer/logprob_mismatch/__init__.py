"""Log-prob mismatch between engine and trainer: measurement, diagnosis and the gate that stops a
run.
"""
