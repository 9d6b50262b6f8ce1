"""`raytune-fsdp digest`: one line that says which numbers a checkpoint or a model holds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raytune_fsdp.base.errors import UserError
from raytune_fsdp.cli.common import BASE, Parser, add_trust, main_of, say
from raytune_fsdp.cli.diff import PART

_MOST = 10
"""Names of tensors that are listed."""


def parser_of(prog: str) -> Parser:
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
    parser.add_argument(
        "--as-export", action="store_true", help="of a checkpoint: the digest that its export has, without writing it"
    )
    parser.add_argument(
        "--dtype", choices=("trained", "bf16", "fp16", "fp32"), help="with --as-export: as in `export`; default: bf16"
    )
    parser.add_argument("--merge", action="store_true", help="with --as-export: adapters merged into their base")
    add_trust(parser, base=f"with --as-export: {BASE}")
    return parser


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The digests of a place's tensors, and lines that say those of all together."""

    tensors: Mapping[str, str]
    lines: Sequence[str]


def _digest(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    if not found.as_export:
        given = {f"--{flag}": bool(getattr(found, flag)) for flag in ("dtype", "merge", "base")}
        parser.refuse_given(given, "says how a checkpoint would be exported: add --as-export, or leave it out")
    one = _of(found.place, found)
    if found.other is None:
        _print(one, tensors=found.tensors)
        return 0
    other = _of(found.other, found)
    for each in (one, other):
        _print(each, tensors=found.tensors)
    left, right = one.tensors, other.tensors
    if not left.keys() & right.keys():
        raise UserError(
            f"{found.place} and {found.other} have no tensor in common, so they cannot be compared: compare two "
            "checkpoints, two model directories of one kind, or with --as-export a checkpoint and its export"
        )
    differ = sorted(name for name in {*left, *right} if left.get(name) != right.get(name))
    if not differ:
        say("the same numbers")
        return 0
    more = f" and {len(differ) - _MOST} more" if len(differ) > _MOST else ""
    say(f"{len(differ)} of {len({*left, *right})} differ: {', '.join(differ[:_MOST])}{more}")
    return PART


def _of(place: str, found: Namespace) -> _Numbers:
    from raytune_fsdp.base.row_hashes import root
    from raytune_fsdp.checkpoint.contents import roots_of
    from raytune_fsdp.checkpoint.model_files import find_checkpoint
    from raytune_fsdp.config import ExportConfig
    from raytune_fsdp.run.places import check_places
    from raytune_fsdp.run.publish import digest_of_weights, digests_as_export
    from raytune_fsdp.tools.digest import digests_of_checkpoint, digests_of_model

    if any(Path(place).glob("*.safetensors")):
        tensors = digests_of_model(Path(place))
        return _Numbers(tensors, [f"model       {root(tensors)}  {place}"])
    if not found.as_export:
        check_places(place, trusted=found.trust_places, base="")
        tensors = digests_of_checkpoint(find_checkpoint(place))
        roots = roots_of(tensors)
        whole = f"everything  {roots.everything}  {place}, with the optimizer and the state"
        return _Numbers(tensors, [f"weights     {roots.weights}  {place}", whole])
    check_places(place, trusted=found.trust_places, base=found.base, exports=True)
    checkpoint = find_checkpoint(place)
    chosen = ExportConfig(dtype=found.dtype or "bf16", merge=found.merge)
    tensors = digests_as_export(checkpoint, chosen, base=found.base)
    lines = [f"model       {root(tensors)}  {place}, as an export has it"]
    if found.merge:
        lines.append(f"weights     {digest_of_weights(checkpoint)}  {place}, before they were merged")
    return _Numbers(tensors, lines)


def _print(numbers: _Numbers, *, tensors: bool) -> None:
    for line in numbers.lines:
        say(line)
    for name, digest in sorted(numbers.tensors.items()) if tensors else ():
        say(f"  {digest}  {name}")


main = main_of("digest", parser_of, _digest)

if __name__ == "__main__":
    raise SystemExit(main())
