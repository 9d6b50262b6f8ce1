"""Whether the ranks of an attempt get on, as the driver hears it.

beats.py      ranks say how far they are
listening.py  time counts as far as the driver has listened
starting.py   ranks before their second step; hangs.py: after it
head.py       whether the head of the cluster answers
ranks.py      all of these together
"""
