"""`raytune-fsdp digest`: one line that says which numbers a checkpoint or a model holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.base.errors import UserError
from raytune_fsdp.cli.common import Parser, add_trust, run_command, say
from raytune_fsdp.cli.diff import PART

_MOST = 10
"""Names of tensors that are listed."""


def main(argv: Sequence[str] | None = None, prog: str = "raytune-fsdp digest") -> int:
    """Print the digest of the numbers in a checkpoint or model, or compare two; return the exit code."""
    parser = Parser(
        prog,
        "Print a digest of the numbers in a checkpoint or a model directory, which does not depend on how many ranks "
        "wrote them; or compare two. Exit code 1: they differ. Needs no GPU.",
    )
    parser.add_argument(
        "place", help="run directory (its newest checkpoint), checkpoint, its URL, or a model directory"
    )
    parser.add_argument("other", nargs="?", help="another, to compare with")
    parser.add_argument("--tensors", action="store_true", help="also print the digest of each tensor")
    add_trust(parser)
    return run_command(parser, argv, _digest)


def _digest(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    one = _of(found.place, trusted=found.trust_places)
    if found.other is None:
        _print(found.place, one, tensors=found.tensors)
        return 0
    other = _of(found.other, trusted=found.trust_places)
    for place, each in ((found.place, one), (found.other, other)):
        _print(place, each, tensors=found.tensors)
    if not one.keys() & other.keys():
        raise UserError(
            f"{found.place} and {found.other} have no tensor in common, so they cannot be compared: compare two "
            "checkpoints, or two model directories of one kind"
        )
    differ = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    if not differ:
        say("the same numbers")
        return 0
    more = f" and {len(differ) - _MOST} more" if len(differ) > _MOST else ""
    say(f"{len(differ)} of {len({*one, *other})} differ: {', '.join(differ[:_MOST])}{more}")
    return PART


def _of(place: str, *, trusted: bool) -> dict[str, str]:
    from raytune_fsdp.checkpoint.model_files import find_checkpoint
    from raytune_fsdp.run.places import check_places
    from raytune_fsdp.tools.digest import digests_of_checkpoint, digests_of_model

    if any(Path(place).glob("*.safetensors")):
        return digests_of_model(Path(place))
    check_places(place, trusted=trusted, base="")
    return digests_of_checkpoint(find_checkpoint(place))


def _print(place: str, digests: dict[str, str], *, tensors: bool) -> None:
    from raytune_fsdp.base.row_hashes import root
    from raytune_fsdp.checkpoint.contents import roots_of
    from raytune_fsdp.checkpoint.state import STATE

    if STATE in digests:
        roots = roots_of(digests)
        say(f"weights     {roots.weights}  {place}")
        say(f"everything  {roots.everything}  {place}, with the optimizer and the state")
    else:
        say(f"model       {root(digests)}  {place}")
    for name, digest in sorted(digests.items()) if tensors else ():
        say(f"  {digest}  {name}")


if __name__ == "__main__":
    raise SystemExit(main())
