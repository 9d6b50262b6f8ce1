"""Write datasets of the Hugging Face hub into the cache as Arrow, once, so that only one node downloads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.durable import replace_at_once
from raytune_fsdp.base.errors import DataError, RaytuneError, setting
from raytune_fsdp.config.sections.data import SourceConfig
from raytune_fsdp.data.sources.arrow import (
    BATCH_ROWS,
    ArrowRows,
    check_columns,
    hash_file,
    index_batches,
    mapped,
    plain_schema,
    prepared_rows,
    write_batches,
)
from raytune_fsdp.data.sources.prepared import key_of, prepare_file
from raytune_fsdp.data.sources.source import Columns, File, reading, shorten

# A hub that does not answer must not hold up a run whose data is in the cache.
_ASK_SECONDS = 10.0


def open_hub(dataset: SourceConfig, *, cache: Path, columns: Columns, progress: Progress | None) -> ArrowRows:
    """Open the rows of a dataset of the hub, at the commit that its revision names now.

    If the hub cannot be reached, its last answer counts: in this cache, or in the cache of the datasets library.
    """
    name, dataset = str(dataset.hub), dataset.model_copy(update={"split": dataset.split or dataset.usual_split})
    wanted = {"hub": name, "subset": dataset.subset, "split": dataset.split, "revision": dataset.revision}
    noted = cache / "files" / f"{key_of(wanted)}.json"
    commit = _ask(dataset) or _noted(noted)

    def make(directory: Path) -> Mapping[str, Any]:
        loaded = _load(dataset, commit)
        rows = directory / "rows.arrow"
        check_columns(loaded.data.schema, shown=name)
        batches = _batches(loaded, shown=name, progress=progress)
        write_batches(rows, plain_schema(loaded.data.schema), batches, shown=name)
        content = hash_file(rows, file=File(name, str(rows), 0, ""), progress=None)
        return {"content": content, "rows": index_batches(mapped(rows), directory, shown=name)}

    identity = {"preparation": "hub", **wanted, "revision": commit or dataset.revision}
    made = prepare_file(cache, identity, make, shown=name, progress=progress)
    if commit is not None and _noted(noted) != commit:
        with suppress(OSError):  # it only helps processes that cannot reach the hub
            replace_at_once(noted, json.dumps({"commit": commit}).encode())
    return prepared_rows(made, shown=name, columns=columns)


def _ask(dataset: SourceConfig) -> str | None:
    """Return the commit that the revision names on the hub; None if the hub cannot be reached."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        commit: str | None = HfApi().dataset_info(dataset.hub, revision=dataset.revision, timeout=_ASK_SECONDS).sha
        return commit
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        log_in = f"log in with `hf auth login`, or {setting('HF_TOKEN')}"
        raise _refused(dataset, error, f"correct hub and revision; if it is private or restricted, {log_in}") from error
    # No network, a proxy, a hub that is down: the client's errors for these have no common base class.
    except Exception:
        return None


def _noted(path: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError):
        return str(json.loads(path.read_text(encoding="utf-8"))["commit"])
    return None


def _load(dataset: SourceConfig, commit: str | None) -> Any:
    import datasets

    try:
        # As a URL, because a directory of this name here would come before the hub.
        place = f"hf://datasets/{str(dataset.hub).removeprefix('hf://datasets/')}"
        loaded = datasets.load_dataset(place, dataset.subset, split=dataset.split, revision=commit or dataset.revision)
    except (RaytuneError, MemoryError):
        raise
    # Any Exception: it raises whatever dozens of libraries and file systems raise. The text of the error names existing
    # subsets and splits.
    except Exception as error:
        if isinstance(error, ConnectionError):
            way_out = "connect to the hub, or first load the dataset with the same HF_HOME on a machine with a network"
        elif isinstance(error, OSError):
            way_out = "check that the directory of HF_HOME is writable and has space"
        else:
            way_out = "correct hub, subset, split or revision"
        raise _refused(dataset, error, way_out) from error
    _check_commit(dataset, loaded, commit)
    return loaded


def _check_commit(dataset: SourceConfig, loaded: Any, commit: str | None) -> None:
    """Refuse another commit than the one that is wanted.

    Whatever fails, the library then takes the newest dataset in its cache, whatever revision was asked for. Directories
    there are named after the commit, or after a hash of all files by versions before 3.
    """
    wanted = commit or dataset.revision
    commits = {Path(file["filename"]).parent.name for file in loaded.cache_files}
    there = sorted(commit for commit in commits if re.fullmatch(r"[0-9a-f]{40}", commit))
    if wanted is None or commits == {wanted} or (commit is not None and not there):
        return
    asked = f"hub={dataset.hub}" + ("" if dataset.revision is None else f", revision={dataset.revision}")
    has = f"the cache of the datasets library has {', '.join(there) or 'unknown'}"
    if commit is None:
        raise DataError(
            f"{asked}: the hub cannot be asked which commit this is, and {has}; set revision to that, leave it out, or "
            "connect to the hub"
        )
    raise DataError(
        f"{asked}: the hub said last that this is commit {commit}, which cannot be loaded from it now, and {has}; "
        "connect to the hub, or set revision to that"
    )


def _refused(dataset: SourceConfig, error: Exception, way_out: str) -> DataError:
    asked = {"hub": dataset.hub, "subset": dataset.subset, "split": dataset.split, "revision": dataset.revision}
    text = ", ".join(f"{key}={value}" for key, value in asked.items() if value is not None)
    return DataError(f"{text}: cannot be loaded ({shorten(' '.join(str(error).split()), limit=300)}); {way_out}")


def _batches(loaded: Any, *, shown: str, progress: Progress | None) -> Iterator[Any]:
    done, total = 0, max(len(loaded), 1)
    size = int(loaded.data.nbytes)
    with reading(shown):
        for table in loaded.with_format("arrow").iter(BATCH_ROWS):
            # One batch whatever the chunks in the library's cache, so that the content hash is always the same.
            yield from table.combine_chunks().to_batches()
            done += table.num_rows
            if progress is not None:
                progress(shown, size * done // total, size)
