"""What the loss of a large vocabulary costs: time and memory of the plain loss, of ours without logits, of torch's.

    python -m benchmarks.loss [--rounds 3] [--threads 1] [--out benchmarks/results/loss.json]

Hidden states of 2,048 tokens (512 wide) and an output embedding of 128,256, fp32, forward and backward. Every
measurement has a process of its own; extra memory is the growth of the peak less the gradients of head and hidden
states, as a multiple of the logits (1,002 MiB). Losses and gradients must agree. Time is processor time. `torch`:
`torch.nn.functional.linear_cross_entropy`, which torch has since 2.13.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

VOCABULARY, TOKENS, WIDTH = 128_256, 2048, 512
WAYS = ("plain", "chunked", "torch")


def once(way: str, threads: int, vocabulary: int) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    from raytune_fsdp.model.objective.chunked_head import Shape, linear_cross_entropy

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).requires_grad_()
    # In place: what is freed again before the measurement would hide as much in it.
    weight = torch.randn(vocabulary, WIDTH).div_(WIDTH**0.5).requires_grad_()
    ids = torch.randint(vocabulary, (TOKENS,))
    states, head = (torch.randn(shape, WIDTH, requires_grad=True) for shape in (8, 64))
    linear_cross_entropy(states, head, None, ids[:8] % 64, Shape()).total.backward()  # what starts once
    before, since = _peak(), time.process_time()
    if way == "plain":
        total = F.cross_entropy(hidden @ weight.t(), ids, reduction="sum")
    elif way == "torch":
        chunks = torch.nn.LinearCrossEntropyOptions()
        total = F.linear_cross_entropy(hidden, weight, ids, reduction="sum", options=chunks)
    else:
        total = linear_cross_entropy(hidden, weight, None, ids, Shape()).total
    (total / TOKENS).backward()
    seconds = time.process_time() - since
    assert hidden.grad is not None and weight.grad is not None
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    return {
        "seconds": seconds,
        "extra": (_peak() - before - gradients) / (4 * TOKENS * vocabulary),
        "loss": total.item() / TOKENS,
        "gradients": [hidden.grad.double().abs().sum().item(), weight.grad.double().abs().sum().item()],
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.once, options.threads, options.vocabulary)))
        return
    from benchmarks.record import write_result

    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS[:: 1 - 2 * (number % 2)]:
            sizes = ["--threads", str(options.threads), "--vocabulary", str(options.vocabulary)]
            command = [sys.executable, "-m", "benchmarks.loss", "--once", way, *sizes]
            found[way].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    plain = found["plain"][0]
    for each in (one for several in found.values() for one in several):
        for a, b in zip([each["loss"], *each["gradients"]], [plain["loss"], *plain["gradients"]], strict=True):
            assert abs(a - b) <= 1e-6 * abs(b), (a, b)
    table = {
        way: {key: median(one[key] for one in several) for key in ("seconds", "extra")}
        for way, several in found.items()
    }
    ratios = {
        way: median(a["seconds"] / b["seconds"] for a, b in zip(found[way], found["plain"], strict=True))
        for way in WAYS[1:]
    }
    for way, row in table.items():
        print(f"{way:8} {row['seconds']:6.2f} s  extra memory {row['extra']:.2f} of the logits")
    print(*(f"{way} / plain: {ratio:.3f} of the time" for way, ratio in ratios.items()), sep="\n")
    if options.out:
        write_result(
            options.out,
            {"rounds": options.rounds, "table": table, "time_ratio": ratios["chunked"], "time_ratios": ratios},
        )


if __name__ == "__main__":
    main()
