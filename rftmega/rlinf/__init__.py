"""RLinf's model managers and actors on top of rftmega, under RLinf's names and signatures. Nothing
in rftmega imports this package.
"""
