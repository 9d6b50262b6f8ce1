"""Run a sweep as a job: the same as `raytune-fsdp sweep`, also where the package is not installed.

ray job submit --working-dir . -- python jobs/sweep.py sweep.yaml --storage /shared/runs
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # First on the path, so that the job runs the code it came with and not an installed version.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from raytune_fsdp.cli.sweep import main

    sys.exit(main(prog="sweep.py"))
