"""The main module of every rank, in place of the program that started it.

A notebook has no main module that a rank could import, and a script would start its run again.
"""

from rftmega.runtime.parallel import preemption

if __name__ == "__mp_main__":
    preemption.listen()  # before any slow import
