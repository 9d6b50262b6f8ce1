"""Export a checkpoint as a job: the same as `raytune-fsdp export`, also where the package is not installed.

ray job submit --working-dir . -- python jobs/export.py /shared/runs/third /shared/models/third
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # First on the path, so that the job runs the code it came with and not an installed version.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from raytune_fsdp.cli.export import main

    sys.exit(main(prog="export.py"))
