"""`raytune-fsdp recipes`: list, show and copy the configs that come with the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.cli.common import Parser, nearest, run_command, write_new

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig


def main(argv: Sequence[str] | None = None, prog: str = "raytune-fsdp recipes") -> int:
    """List, show or copy recipes; return the exit code."""
    parser = Parser(prog, "The configs that come with the package. `--config NAME` of other commands takes them, too.")
    parser.add_argument(
        "what", nargs="?", default="list", choices=("list", "show", "copy"), help="default: list all of them"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to show or copy")
    parser.add_argument(
        "destination", nargs="?", type=Path, metavar="DEST", help="file or directory to copy to (default: NAME.yaml)"
    )
    return run_command(parser, argv, _run)


def _run(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    from raytune_fsdp.config.load import load_config, recipe_text, recipes

    known = recipes()
    if found.what == "list":
        if found.name is not None:
            parser.error(f"unexpected argument {found.name}; a recipe is shown with `show {found.name}`")
        for name, path in known.items():
            comment = takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
            about = " ".join(line.removeprefix("# ") for line in comment).partition(". ")[0].rstrip(".")
            print(f"{name:24} {about}")
        return 0
    if found.name is None:
        parser.error(f"{found.what} needs the name of a recipe; `{parser.prog}` lists them")
    if found.name not in known:
        parser.error(f"unknown recipe {found.name}{nearest(found.name, known)}; `{parser.prog}` lists all")
    text = recipe_text(found.name)
    if found.what == "show":
        if found.destination is not None:
            parser.error(f"unexpected argument {found.destination}; only copy takes a destination")
        print(text, end="")
        return 0
    target = found.destination or Path(f"{found.name}.yaml")
    if target.is_dir():
        target = target / f"{found.name}.yaml"
    write_new(target, text)
    print(f"copied to {target}")
    yours = list(_yours(load_config(target)))
    if yours:
        print("set what is yours:")
        print("\n".join(f"  {line}" for line in yours))
    print(f"then: raytune-fsdp train --config {target}")
    return 0


def _yours(config: FinetuneConfig) -> Iterator[str]:
    """Yield the fields of a recipe that name files which are not here, or models that the hub must have."""
    evals = config.data.eval if isinstance(config.data.eval, list) else []
    for kind, datasets in (("train", config.data.train), ("eval", evals)):
        for index, dataset in enumerate(datasets):
            if dataset.path is not None and not Path(dataset.path).exists():
                yield f"data.{kind}.{index}.path: {dataset.path} is not here"
    if config.model.path is not None and not Path(config.model.path).exists():
        yield f"model.path: {config.model.path} comes from the hub, or give a directory"


if __name__ == "__main__":
    raise SystemExit(main())
