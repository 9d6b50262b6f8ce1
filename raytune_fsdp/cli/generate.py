"""`raytune-fsdp generate`: ask a trained model, from a run, a checkpoint, an export or any Hugging Face directory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raytune_fsdp.base.untrusted import without_controls
from raytune_fsdp.cli.common import ModelParser, main_of


def parser_of(prog: str) -> ModelParser:
    parser = ModelParser(
        prog, "Ask a trained model. Without prompts, each line of standard input is one.", max_new_tokens=128
    )
    parser.add_argument("prompts", nargs="*", metavar="prompt", help="what to ask")
    return parser


def _generate(parser: ModelParser, arguments: Sequence[str]) -> int:
    found, model, tokenizer, device = parser.parse_and_load(arguments)
    from raytune_fsdp.run.evaluation.answers import answer

    # Read line by line, so that it answers while the other end of a pipe is still asking.
    lines = found.prompts or (line.strip() for line in sys.stdin)
    for prompt in filter(None, lines):
        text = answer(
            model, tokenizer, prompt,
            max_new_tokens=found.max_new_tokens, device=device, temperature=found.temperature,
        )  # fmt: skip
        print(without_controls(text), flush=True)
    return 0


main = main_of("generate", parser_of, _generate)

if __name__ == "__main__":
    raise SystemExit(main())
