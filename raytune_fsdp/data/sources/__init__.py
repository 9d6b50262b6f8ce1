"""Where rows come from: everything that a dataset of the config can name, opened as rows by number.

    names     the kind of a file by its ending, the name of a dataset, values as they stand in messages
    places    the files that a path, pattern, directory or URL means, in an order that never changes
    prepared  directories of the cache: made once, renamed into place, used by all nodes
    handles   what a process holds open, bounded
    scan      one pass over a text file: where each row is, and the hash of the content
    texts     rows of text files (JSON Lines, JSON, CSV, text), read by position
    arrow     rows of Arrow files, mapped into memory
    parquet   rows of Parquet files: by row group in place, or written once as Arrow
    hub       datasets of the Hugging Face hub, written once as Arrow
    opening   all of it together

A file is never held in memory, and a source is small: offsets of rows and the like are files of the cache, so that a
source can be sent to other processes and nodes, which open what they need of it.
"""

from raytune_fsdp.data.sources.file_names import dataset_name, dataset_names, shorten
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.source import Source

__all__ = ["Source", "dataset_name", "dataset_names", "open_source", "shorten"]
