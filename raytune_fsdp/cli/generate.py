"""`raytune-fsdp generate`: ask a trained model, from a run, a checkpoint, an export or any Hugging Face directory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.cli.common import BASE, TRUST, Parser, exit_code


def main(argv: Sequence[str] | None = None, prog: str = "raytune-fsdp generate") -> int:
    """Answer prompts; returns the exit code."""
    parser = Parser(prog, "Ask a trained model. Without prompts, each line of standard input is one.")
    parser.add_argument("model", type=Path, help="run directory, checkpoint, export, or Hugging Face model directory")
    parser.add_argument("prompts", nargs="*", metavar="prompt", help="what to ask")
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="maximum length of an answer (default: 128)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely tokens (default)")
    parser.add_argument("--base", metavar="PATH", help=BASE)
    parser.add_argument("--trust-remote-code", action="store_true", help=TRUST)
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: _generate(parser, arguments))


def _generate(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    if found.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {found.max_new_tokens} must be at least 1")
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    import torch

    from raytune_fsdp.answers import answer
    from raytune_fsdp.checkpoint.model_files import load_for_inference

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_for_inference(
        found.model, device, trust_remote_code=found.trust_remote_code, base=found.base
    )
    # Read line by line, so that it answers while the other end of a pipe is still asking.
    lines = found.prompts or (line.strip() for line in sys.stdin)
    for prompt in filter(None, lines):
        text = answer(
            model, tokenizer, prompt,
            max_new_tokens=found.max_new_tokens, device=device, temperature=found.temperature,
        )  # fmt: skip
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
