"""`raytune-fsdp schema`: print the config's JSON schema, for editors that complete and check YAML files with it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from raytune_fsdp.cli.common import Parser, main_of


def parser_of(prog: str) -> Parser:
    parser = Parser(prog, "Print the JSON schema of a run's config, for editors.")
    parser.add_argument("--sweep", action="store_true", help="that of a sweep, whose base is not described again")
    return parser


def _schema(parser: Parser, arguments: Sequence[str]) -> int:
    found = parser.parse(arguments)
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.tune.spec import SweepSpec

    described = SweepSpec if found.sweep else FinetuneConfig
    print(json.dumps(described.model_json_schema(), indent=2, ensure_ascii=False))
    return 0


main = main_of("schema", parser_of, _schema)

if __name__ == "__main__":
    raise SystemExit(main())
