"""A plan as it is read: text, a page, a page with sliders.

text.py      a plan as text, and as plain data
points.py    what can be chosen on the page, and what the planner says about a choice
document.py  the page, one file, and its server on this machine
grid.py      points computed beforehand, for the page without a server
"""
