"""A run and its peer copies (checkpoint/peers/), on every rank.

copies.py   when one is made, and what becomes of it
going_on.py whether a run goes on from one, and what follows when it does
"""
