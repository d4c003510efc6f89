"""Strategy is the only room where what is learnt meets where it runs."""
