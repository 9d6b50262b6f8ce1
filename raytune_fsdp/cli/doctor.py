"""`raytune-fsdp doctor`: is everything there that a run needs? Starts nothing, changes nothing."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence

from raytune_fsdp.cli.common import ConfigParser, main_of


def parser_of(prog: str) -> ConfigParser:
    parser = ConfigParser(
        prog,
        "Check this machine, the Ray cluster that a run would join and, with a config, what the run needs. At most 20 "
        "seconds without --network; nothing is started or changed. Exit code 2: there is a problem.",
    )
    parser.add_argument(
        "--network", action="store_true", help="also measure collectives between the run's workers, for up to 3 minutes"
    )
    parser.add_argument(
        "--bandwidth", metavar="SPEED", help="the nominal speed of the network, such as 400Gbps, to compare with"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _doctor(parser: ConfigParser, arguments: Sequence[str]) -> int:
    began = time.monotonic() - _seconds_before()
    # With only the flags of this command there is no config, and the run is left out.
    own, overrides = parser.parse_known_args(arguments)
    found, config = parser.parse_with_config(arguments) if own.config or overrides else (own, None)
    if found.bandwidth is not None and not found.network:
        parser.error(f"--bandwidth {found.bandwidth} is compared with what --network measures: add --network")
    if found.network and config is None:
        parser.error("--network measures between the workers of a run: add --config FILE")
    from raytune_fsdp.launch.environment import environment
    from raytune_fsdp.launch.quiet import ignoring_warnings, quieting

    with environment(quieting()), ignoring_warnings():
        from raytune_fsdp.tools.doctor import finding, network
        from raytune_fsdp.tools.doctor.checkup import Checkup

        nominal = network.parse_speed(found.bandwidth) if found.bandwidth else None
        checkup = Checkup(config, network=found.network, nominal=nominal, began=began)
        findings = checkup.findings()
    about = f"run {config.run.name}" if config else "no run: --config FILE checks what a run needs, too"
    if found.json:
        print(json.dumps(finding.as_json(findings, about, time.monotonic() - began), indent=2))
    else:
        print(finding.page(findings, f"doctor: {about} ({time.monotonic() - began:.0f} s)"))
    code = finding.exit_code(findings)
    if checkup.hangs():
        # Last in, first out: this runs before pyarrow's exit handler, which waits 90 s for a request to S3.
        atexit.register(_end, code)
    return code


def _seconds_before() -> float:
    """Return how long this process has run, if it only runs this command: on a busy machine Python starts slowly."""
    if sys.argv[1:2] != ["doctor"]:
        return 0.0
    from raytune_fsdp.base.machine import began

    if (ticks := began(os.getpid())) is None:  # another operating system
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _end(code: int) -> None:
    sys.stdout.flush()
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(code)


main = main_of("doctor", parser_of, _doctor)

if __name__ == "__main__":
    raise SystemExit(main())
