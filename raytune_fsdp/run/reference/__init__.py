"""What an objective of preferences compares with: the log-probabilities that a reference gives to a run's documents.

find.py     which model it is
network.py  what decides its values, and a network of its own that has them
unchanged.py  whether it is the same model as before, and has said the same
passes.py   a pass over the data, by all ranks, window by window; one that was killed goes on where it was
during.py   a reference that is asked in every step instead
attempt.py  what an attempt has of it, and computes before it trains; the loss that compares
"""
