"""A plan as it is read: text, a page, a page with sliders.

text.py      a plan as text, and as plain data
choices.py   what can be chosen on the page; points.py: what the planner says of a choice
document.py  the page, one file; server.py: served on this machine
grid.py      points computed beforehand; export.py: writes the page that has them inside
"""
