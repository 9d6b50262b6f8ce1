"""Run by another environment's Python, on the directory that `test_transformers_4.py` fills.

For each export in it: the logits and the token ids that this environment gets, beside those that are expected. Prints
one JSON object: by export, what differs. Imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any


def look_at_model(export: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    expected = load_file(export.parent / f"{export.name}.safetensors")
    # "auto": which type it is loaded in is what config.json says.
    model, report = AutoModelForCausalLM.from_pretrained(export, torch_dtype="auto", output_loading_info=True)
    with torch.no_grad():
        logits = model.eval()(input_ids=expected["ids"], use_cache=False).logits
    difference = (logits - expected["logits"]).abs().max() / expected["logits"].abs().max()
    return {
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "difference": float(difference),
        "keys": {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys},
    }


def look_at_tokenizer(export: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    texts = json.loads((export.parent / f"{export.name}.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(export)
    hello = [{"role": "user", "content": "hello"}]
    return {
        "tokens": {text: tokenizer(text)["input_ids"] for text in texts},
        "decoded": {text: tokenizer.decode(ids, skip_special_tokens=True) for text, ids in texts.items()},
        "inputs": sorted(tokenizer("a word")),
        "special": sorted(tokenizer.all_special_tokens),
        "chat": tokenizer.apply_chat_template(hello, tokenize=False) if tokenizer.chat_template else None,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {"version": transformers.__version__}
    for export in sorted(path for path in Path(sys.argv[1]).iterdir() if (path / "config.json").is_file()):
        for what, look in {"model": look_at_model, "tokenizer": look_at_tokenizer}.items():
            try:
                seen = look(export)
            except Exception as error:
                seen = {"error": f"{type(error).__name__}: {error}"}
            found.setdefault(export.name, {})[what] = seen
    print(json.dumps(found))


if __name__ == "__main__":
    main()
