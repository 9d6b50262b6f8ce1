"""How full packed samples are, and how fast text becomes packed samples, beside TRL and the bare tokenizer.

    python -m benchmarks.packing

Efficiency: 50,000 documents of lognormal lengths, packed in windows of 4096 documents, beside best-fit decreasing over
all of them at once and the theoretical minimum. Speed: alternated rounds in one process, medians. TRL runs here; the
figures of axolotl and torchtune are of an earlier measurement with the same documents (mean 400, sigma 1), said so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.record import write_result
from raytune_fsdp.config import CompletionFormat, DataConfig, DatasetConfig
from raytune_fsdp.data.census import census
from raytune_fsdp.data.packing import best_fit, best_fit_in_order, pack
from raytune_fsdp.data.rows.formats import Document
from raytune_fsdp.data.windows import Windows

SEQ_LEN = 2048
WINDOW = 4096
DISTRIBUTIONS = [(400, 1.0), (400, 0.5), (900, 1.0), (900, 0.5)]
EARLIER = {"axolotl": 1.0033, "torchtune": 1.20}
"""Samples over the theoretical minimum at mean 400, sigma 1, measured on 2026-11-21 with their own packers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--texts", type=int, default=6_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/packing.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    efficiency = [_efficiency(mean, sigma, options.documents) for mean, sigma in DISTRIBUTIONS]
    speed = _packing_speed(options.documents, options.rounds)
    text = _text_speed(options.texts, options.rounds)
    write_result(options.result, {"efficiency": efficiency, "packing": speed, "text_to_packed": text})


def lengths(mean: float, sigma: float, many: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(math.log(mean) - sigma**2 / 2, sigma, many)
    return [int(n) for n in np.clip(drawn, 8, SEQ_LEN)]


def _efficiency(mean: float, sigma: float, many: int) -> dict[str, Any]:
    sizes = lengths(mean, sigma, many)
    windows = sum(len(best_fit(sizes[i : i + WINDOW], SEQ_LEN)) for i in range(0, many, WINDOW))
    in_order = sum(len(best_fit_in_order(sizes[i : i + WINDOW], SEQ_LEN)) for i in range(0, many, WINDOW))
    everything = len(best_fit(sizes, SEQ_LEN))
    trl = _trl_pack(_arrow_dataset(sizes, labels=False))
    bound = math.ceil(sum(sizes) / SEQ_LEN)
    row = {
        "mean": mean, "sigma": sigma, "tokens": sum(sizes), "minimum": bound, "ours": windows,
        "all_at_once": everything, "trl": trl, "ours_over_all_at_once": round(windows / everything, 5),
        "ours_over_minimum": round(windows / bound, 5), "trl_over_minimum": round(trl / bound, 5),
        "full": round(sum(sizes) / (windows * SEQ_LEN), 5),
        "full_in_order": round(sum(sizes) / (in_order * SEQ_LEN), 5),
    }  # fmt: skip
    earlier = "".join(f", {name} {value}x*" for name, value in EARLIER.items()) if (mean, sigma) == (400, 1.0) else ""
    print(
        f"mean {mean} sigma {sigma}: {windows} samples, {windows / everything:.4f}x of all at once, "
        f"{windows / bound:.4f}x of the minimum (TRL {trl / bound:.4f}x{earlier})",
        flush=True,
    )
    return row


def _arrow_dataset(sizes: list[int], *, labels: bool) -> Any:
    import pyarrow as pa
    from datasets import Dataset

    values = np.random.default_rng(1).integers(0, 32_000, sum(sizes), dtype=np.int32)
    column = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *sizes]), pa.int32()), pa.array(values))
    return Dataset(pa.table({"input_ids": column, "labels": column} if labels else {"input_ids": column}))


def _trl_pack(dataset: Any) -> int:
    from trl import pack_dataset

    return len(pack_dataset(dataset, SEQ_LEN, "bfd"))


def _packing_speed(many: int, rounds: int) -> dict[str, Any]:
    """Ids and labels of packed samples from ids and labels of documents, both in memory."""
    sizes = lengths(400, 1.0, many)
    dataset = _arrow_dataset(sizes, labels=True)
    ids = dataset.data.table["input_ids"].chunk(0).flatten().to_numpy()
    ends = np.cumsum(sizes)
    documents = [Document(ids[end - size : end], ids[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    def ours() -> None:
        for first in range(0, many, WINDOW):
            some = documents[first : first + WINDOW]
            pack(some, sources=[0] * len(some), seq_len=SEQ_LEN, pad_id=0, packing="best_fit")

    return _alternate({"ours": ours, "trl": lambda: _trl_pack(dataset)}, rounds, sum(sizes), "packing")


def _text_speed(many: int, rounds: int) -> dict[str, Any]:
    """From text to packed samples. Ours starts at a JSON Lines file and ends with windows in the cache."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    texts = list(_texts(many))
    tokenizer = _tokenizer(texts)
    tokens = sum(min(len(ids) + 1, SEQ_LEN) for ids in tokenizer(texts)["input_ids"])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

        def ours() -> None:
            cache = Path(directory) / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            rows = DatasetConfig(path=str(path), format=CompletionFormat(type="completion"))
            data = DataConfig(train=[rows], seq_len=SEQ_LEN, window=WINDOW, long_documents="truncate")
            census(Windows([rows], data, seed=0, tokenizer=tokenizer, vocab_size=len(tokenizer), cache=cache))

        def trl() -> None:
            from datasets import Dataset

            config = SFTConfig(
                output_dir=directory, max_length=SEQ_LEN, packing=True, packing_strategy="bfd", report_to="none",
                use_cpu=True, save_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            SFTTrainer(
                model=model, args=config, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
            )

        ways = {"ours": ours, "trl": trl, "bare tokenizer": lambda: tokenizer(texts)}
        return _alternate(ways, rounds, tokens, "text to packed")


def _texts(many: int) -> Iterator[str]:
    """Sentences of made-up words, as frequent as words are; lengths lognormal."""
    generator = np.random.default_rng(2)
    syllables = [c + v for c in "bcdfghjklmnprstvwz" for v in "aeiou"]
    words = ["".join(generator.choice(syllables, generator.integers(1, 5))) for _ in range(20_000)]
    shares = 1 / np.arange(1, len(words) + 1)
    shares /= shares.sum()
    for size in lengths(300, 1.0, many):
        ranks = generator.choice(len(words), size, p=shares)
        ends = generator.random(size) < 0.08
        yield " ".join(words[rank] + "." * bool(end) for rank, end in zip(ranks, ends, strict=True))


def _tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts[:1000], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


def _alternate(ways: dict[str, Callable[[], Any]], rounds: int, tokens: int, what: str) -> dict[str, Any]:
    """Seconds of each way, in alternated rounds after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        ratio = median(a / b for a, b in zip(seconds[name], seconds["ours"], strict=True))
        print(
            f"{what}: {name} {value:.3f} s, {tokens / value / 1e3:,.0f} k tokens/s, {ratio:.2f}x the time of ours",
            flush=True,
        )
    return {"tokens": tokens, "rounds": rounds, "seconds": {n: [round(s, 4) for s in v] for n, v in seconds.items()},
            "median_seconds": {name: round(value, 4) for name, value in medians.items()}}  # fmt: skip


if __name__ == "__main__":
    main()
