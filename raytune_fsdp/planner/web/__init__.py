"""The planner as a page that is moved about in: sliders, a bar of memory, a table.

choices.py   what can be chosen beside a config, and the config that a choice makes of it
points.py    what the planner says of a choice, computed when it is asked for
server.py    the page at an address of this machine, which asks for points
grid.py      points of well-known models, computed beforehand; export.py: the page that has them inside, one file
document.py  the page itself, the same for both, with page.html.jinja, page.css and page.js

All figures are the planner's. The page's script only adds parts up to the end of a bar, and multiplies by a price.
"""
