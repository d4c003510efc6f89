"""The main module of every rank, in place of the program that started the run.

A notebook has no main module that a rank could import; a script, if imported, would start its run
again.
"""

from rftmega.runtime.parallel import preemption

if __name__ == "__mp_main__":
    preemption.listen()  # before any slow import
