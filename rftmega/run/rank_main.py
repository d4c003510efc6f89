"""The main module of every rank, in place of the program that started it.

A notebook has none that a rank could import, and a script would start its run once more.
"""

from rftmega.runtime.parallel import preemption

if __name__ == "__mp_main__":
    preemption.listen()  # before anything that takes time
