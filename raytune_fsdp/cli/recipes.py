"""`raytune-fsdp recipes`: list, show and copy the configs that come with the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.cli.common import Parser, main_of, nearest, write_new
from raytune_fsdp.record.console import aligned

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig


def parser_of(prog: str) -> Parser:
    parser = Parser(prog, "The configs that come with the package. `--config NAME` of other commands takes them, too.")
    parser.add_argument(
        "what", nargs="?", default="list", choices=("list", "show", "copy"),
        help="default: list all of them, with the columns that rows of their data must have",
    )  # fmt: skip
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to show or copy")
    parser.add_argument(
        "destination", nargs="?", type=Path, metavar="DEST", help="file or directory to copy to (default: NAME.yaml)"
    )
    return parser


def _run(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    from raytune_fsdp.config.load import load_config, recipe_text, recipes

    known = recipes()
    if found.what == "list":
        if found.name is not None:
            parser.error(f"unexpected argument {found.name}; a recipe is shown with `show {found.name}`")
        rows = [("recipe", "columns", "what it is"), *((name, *_described(path)) for name, path in known.items())]
        print("\n".join(aligned(rows)))
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


def _described(recipe: Path) -> tuple[str, str]:
    """Return the columns that rows of a recipe's datasets must have, each kind of rows once, and what it is."""
    from raytune_fsdp.config.load import load_config
    from raytune_fsdp.config.sections.formats import needed_columns

    data = load_config(recipe).data
    formats = [dataset.format for dataset in (*data.train, *(data.eval if isinstance(data.eval, list) else []))]
    needed = [", ".join(columns) for each in formats if (columns := needed_columns(each)) is not None]
    comment = takewhile(lambda line: line.startswith("# "), recipe.read_text(encoding="utf-8").splitlines())
    about = " ".join(line.removeprefix("# ") for line in comment).partition(". ")[0].rstrip(".")
    return " | ".join(dict.fromkeys(needed)), about


def _yours(config: FinetuneConfig) -> Iterator[str]:
    """Yield the fields of a recipe that name files which are not here, or models that the hub must have."""
    from raytune_fsdp.config.sections.formats import needed_columns

    evals = config.data.eval if isinstance(config.data.eval, list) else []
    for kind, datasets in (("train", config.data.train), ("eval", evals)):
        for index, dataset in enumerate(datasets):
            if dataset.path is not None and not Path(dataset.path).exists():
                columns = needed_columns(dataset.format)
                rows = f" (rows with {', '.join(columns)})" if columns else ""
                yield f"data.{kind}.{index}.path: {dataset.path} is not here{rows}"
    if config.model.path is not None and not Path(config.model.path).exists():
        yield f"model.path: {config.model.path} comes from the hub, or give a directory"


main = main_of("recipes", parser_of, _run)

if __name__ == "__main__":
    raise SystemExit(main())
