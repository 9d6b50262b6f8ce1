"""A fine-tuning job: `python jobs/finetune.py [--config FILE] [--section.field VALUE ...]`.

The same as `raytune-fsdp train`, also where the package is not installed, as in a Ray job's working directory. Without
--config it runs recipes/demo.yaml.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    # First on the path, so that the job runs the code it came with and not an installed version.
    sys.path.insert(0, str(HERE.parent))
    try:
        from raytune_fsdp.cli.train import main
    except KeyboardInterrupt:  # from here on it is main's, in one line too
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(main(prog="finetune.py", default_config=HERE / "recipes" / "demo.yaml"))
