"""What all rooms stand on. It knows nothing of runs, models or data.

errors.py         what can go wrong, for people, and the exit code of each
durable.py        writes that a crash cannot undo, or that nobody sees half done
untrusted.py      reads files that a stranger may have written
urls.py           paths and URLs as text; file_systems.py: the file systems that URLs name
redaction.py      removes secrets from what others read
mark.py           a user's mark on a list, made with a key that nobody else has
bounded.py        a cache with a bound
random.py         randomness that is looked up, never drawn
answers_alike.py  whether two answers are the same
batch.py          the values that travel between stages
row_hashes.py     hashes the rows of a tensor, a part of them at a time
measured.py       what is predicted for a run's ranks, and what is measured of it
collectives.py    work on one rank or on all, with one outcome for all
threads.py        threads for calls that nothing can interrupt
leaving.py        leaves the process at once where Python's own way out would crash or wait
beat.py           a sign of life of a process
lease.py          whether a run is still this command's
machine.py        what a process can know of its machine, and of the room on its disks
hushed.py         libraries that print while they are imported
"""
