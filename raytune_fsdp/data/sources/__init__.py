"""Where rows come from: open whatever a dataset of the config can name, as rows found by number.

In the order of the data:

opening     opens a dataset; calls all the others
places      the files behind a path, pattern, directory or URL, in a stable order
splits      which files of a directory belong to the split that is read
remote      files in object stores, and whatever else fsspec opens; the content of files, decompressed
keys        which keys rows have, of the keys that only newer versions of the order read
json_columns  columns that say they are JSON
hub         datasets of the Hugging Face hub, written once as Arrow
texts       rows of text files (JSON Lines, JSON, CSV, plain text), read by position
scan        one pass over a text file: where each row is, and the hash of the content
parquet     rows of Parquet files: by row group in place, or written once as Arrow
arrow       rows of Arrow files, mapped into memory
prepared    directories of the cache: made once, renamed into place, used by all nodes
handles     what a process holds open, within bounds; and the hashes of the chunks of a file
source      what a source is, what a file's name says, and how the rows of several files are joined
selection   some of a source's rows: the first, the last, a choice; what is held out for evaluation

No file is ever held in memory as a whole, and a source is small to pickle: row offsets and the like are files in the
cache. So a source can be sent to other processes and nodes, which open what they need.
"""
