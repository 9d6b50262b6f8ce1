"""Reports for people: the data before a run, and the results of a run, read from its directory alone.

data.py        packed samples with the trained tokens marked; counts and lengths of documents
summary.py     the end of a run in a terminal: what it learned, where everything is, what to do next
curves.py      metrics.jsonl -> a picture
card.py        the model card of an export; card_scores.py of one that scores
overview.py    a run in a few numbers, for a list of runs
page.py        the page about a run, report/index.html, or a page that compares several; page.html.jinja, .css, .js
history.py     a run directory -> columns of numbers, evaluations, events
thin.py        100,000 steps -> 1,000 points that lose no extreme
charts.py      which curves the page has
marks.py       events on the axis; spikes.py losses that stand out
facts.py       status, key figures, and the page's tables, also about predictions
surroundings.py  with what and where a run was trained, its time by parts, its audits, its digest
rows.py        the page's tables about the data
drawn.py       what is drawn without a script
runs_page.py   the page about all runs of a storage, and its sweeps; runs.html.jinja, runs.js
ancestors.py   from which runs a fork comes: on its page, its card, and beside another run
difference.py  the first step at which two runs part, and why
"""
