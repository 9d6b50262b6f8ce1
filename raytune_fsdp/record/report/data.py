"""Show the data before training: samples with the trained tokens marked, and counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raytune_fsdp.base.batch import GROUP_COLUMNS, IGNORE, PADDING, PackedSample, Role
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.plan.counts import Census, GroupsOfSteps
from raytune_fsdp.record.report.curves import new_figure, save_png

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raytune_fsdp.data.rows.scores.scoring import Scoring

_TRAINED, _CONTEXT, _HEAD, _RESET = "\033[32m", "\033[2m", "\033[1m", "\033[0m"
_BAR = 40
_SAMPLE_ROW = "{:24} {:>10} {:>10} {:>12} {:>12} {:>8} {:>8} {:>9} {:>6}"


def preview(
    sample: PackedSample,
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    *,
    title: str,
    colours: bool,
    columns: Sequence[str] = (),
    scoring: Scoring | None = None,
) -> Iterator[str]:
    """Yield a packed sample as lines: each document with its dataset; trained tokens are green, or between « and ».

    `columns`: the names of what a loss is told of each document. `scoring`: how documents are scored.
    """
    documents = documents_of(sample)
    yield headline(sample, title, colours=colours)
    for number, document in enumerate(documents, start=1):
        name = names[int(sample.source_ids[document.start])]
        trained = int((sample.labels[document] != IGNORE).sum())
        tokens = document.stop - document.start
        role = "".join(f", {each}" for each in role_of(sample, document, columns, scoring))
        yield f"  -- document {number}{role}, {printable(name)}: {tokens:,} tokens, {trained:,} trained"
        yield from text_of(sample, document, tokenizer, colours=colours)


def documents_of(sample: PackedSample) -> list[slice]:
    """Return the tokens of each document of a packed sample."""
    real = sample.source_ids != PADDING
    starts = np.flatnonzero((sample.position_ids == 0) & real).tolist()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], int(real.sum())], strict=False)]


def role_of(sample: PackedSample, document: slice, columns: Sequence[str], scoring: Scoring | None = None) -> list[str]:
    """Return what a document is in its group, in words; empty where documents stand alone."""
    if sample.columns is None or tuple(columns[: len(GROUP_COLUMNS)]) != GROUP_COLUMNS:
        return []
    told = dict(zip(columns, sample.columns[:, document.start].tolist(), strict=False))
    role = Role(int(told["role"]))
    if role is Role.SCORED and scoring is not None:
        words, told["margin"] = [scoring.in_words(told["margin"])], 0.0
    else:
        words = [role.name.lower()]
    words += [f"weight {told['weight']:g}"] if told["weight"] != 1 else []
    words += [f"margin {told['margin']:g}"] if told["margin"] else []
    return words + ([f"its first {told['skipped']:,.0f} targets are not the answer's"] if told["skipped"] else [])


def headline(sample: PackedSample, title: str, *, colours: bool) -> str:
    """Return the first line about a packed sample."""
    real = sample.source_ids != PADDING
    targets = int((sample.labels != IGNORE).sum())
    head = (
        f"{title}: {len(documents_of(sample))} document(s), {real.sum():,} of {len(real):,} tokens, {targets:,} trained"
    )
    return f"{_HEAD}{head}{_RESET}" if colours else head


def text_of(
    sample: PackedSample, document: slice, tokenizer: PreTrainedTokenizerBase, *, colours: bool
) -> Iterator[str]:
    """Yield a document's text as lines, marked as in `preview`."""
    ids, trained = sample.input_ids[document], sample.labels[document] != IGNORE
    before, after = (_TRAINED, _RESET) if colours else ("«", "»")
    marked = ""
    # Decoded by runs of tokens that are trained on, or are not: a single token may be only a part of a character.
    for flag, run in groupby(range(len(ids)), key=lambda i: bool(trained[i])):
        text = printable(str(tokenizer.decode(ids[list(run)], clean_up_tokenization_spaces=False)), keep="\n\t")
        if flag:
            # In some terminals a colour ends with its line.
            marked += before + text.replace("\n", f"{after}\n{before}" if colours else "\n") + after
        else:
            marked += f"{_CONTEXT}{text}{_RESET}".replace("\n", f"{_RESET}\n{_CONTEXT}") if colours else text
    yield from (f"  {line}" for line in marked.split("\n"))


def stats(census: Census, *, title: str, groups: GroupsOfSteps | None = None, kind: str | None = None) -> Iterator[str]:
    """Yield the counts of a census as a table, a line for every dataset, and the lengths of its documents.

    `kind`: of groups, if there are any; `groups`: how many of them a step has.
    """
    epochs = "an epoch" if len(census.epochs) == 1 else f"{len(census.epochs)} epochs"
    yield f"{title}: {epochs} in {census.windows:,} window(s)"
    yield _SAMPLE_ROW.format(
        "dataset", "rows", "documents", "tokens", "targets", "dropped", "cut off", "cut apart", "mean"
    )
    rows = list(zip(census.names, census.datasets, strict=True))
    if len(rows) > 1:
        rows.append(("all", census.total))
    for name, count in rows:
        yield _SAMPLE_ROW.format(
            name[:24], f"{count.rows:,}", f"{count.documents:,}", f"{count.tokens:,}", f"{count.target_tokens:,}",
            f"{sum(count.dropped.values()):,}", f"{count.truncated:,}", f"{count.cut:,}",
            f"{count.tokens / count.documents:.0f}" if count.documents else "-",
        )  # fmt: skip
    samples = sum(census.epochs)
    yield (
        f"packed samples {samples:,} of {census.seq_len:,} tokens, {census.efficiency:.2%} full; "
        f"{census.total.target_tokens / max(1, census.tokens):.1%} of the tokens are trained on"
    )
    what = {"preference": "pairs", "score": "scored documents"}.get(kind or "", "judged answers")
    if kind is not None:
        together = "" if kind == "score" else ", each of two documents that stay together"
        a_step = "" if groups is None else f", {groups.words}"
        yield f"{census.total.groups:,} {what}{together}{a_step}"
    for name, count in rows[: len(census.names)]:
        for reason, many in sorted(count.dropped.items()):
            yield f"dropped from {name}: {many:,} {reason}"
        if count.without_targets:
            yield f"cut apart in {name}: {count.without_targets:,} pieces have no token that is trained on"
    for row in census.skipped[:5]:
        yield f"  {row.message}"
    if len(census.skipped) > 5:
        yield f"  ... and {len(census.skipped) - 5:,} more"
    octaves: dict[int, int] = {}  # the census counts in quarters of octaves
    for bucket, many in census.total.lengths.items():
        octaves[bucket // 4] = octaves.get(bucket // 4, 0) + many
    if not octaves:
        return
    yield f"{'documents' if kind is None else what} by length in tokens"
    most = max(octaves.values())
    for octave in range(min(octaves), max(octaves) + 1):
        many = octaves.get(octave, 0)
        bar = "#" * math.ceil(_BAR * many / most)
        yield f"  {2**octave:>8,} to {2 ** (octave + 1) - 1:>8,}  {many:>10,}  {bar}"


def plot_lengths(censuses: Mapping[str, Census], png_path: Path) -> None:
    """Draw a histogram of document lengths, with a step line for every dataset. Needs no display."""
    figure = new_figure(4.5)
    axes = figure.subplots()
    for what, census in censuses.items():
        for name, count in zip(census.names, census.datasets, strict=True):
            if count.lengths:
                buckets = range(min(count.lengths), max(count.lengths) + 1)
                heights = [count.lengths.get(bucket, 0) for bucket in buckets]
                edges = [2 ** (bucket / 4) for bucket in (*buckets, buckets[-1] + 1)]
                axes.stairs(
                    heights,
                    edges,
                    label=name if what == "train" else what,
                    fill=len(censuses) == len(census.names) == 1,
                )
    seq_len = next(iter(censuses.values())).seq_len
    axes.axvline(seq_len, color="0.4", linestyle="--", linewidth=1, label=f"data.seq_len = {seq_len:,}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(xlabel="tokens of a document", ylabel="documents")
    axes.grid(alpha=0.3)
    axes.legend()
    save_png(figure, png_path)
