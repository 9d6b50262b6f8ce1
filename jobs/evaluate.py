"""Measure a model as a job: the same as `raytune-fsdp eval`, also where the package is not installed.

ray job submit --entrypoint-num-gpus 1 --working-dir . -- python jobs/evaluate.py /shared/runs/third --trust-places

--trust-places: a run has the mark of who has trained it, whose key is in the home directory of the machine or container
that the driver ran on. On another one, the run is a stranger's.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # First on the path, so that the job runs the code it came with and not an installed version.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from raytune_fsdp.cli.eval import main

    sys.exit(main(prog="evaluate.py"))
