"""The commands. `main.py` finds them, each has a file of its own, `common.py` is what they share."""
