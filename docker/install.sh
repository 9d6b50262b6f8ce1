#!/bin/sh
# Install this checkout, and what it needs in the versions of requirements.lock, into a virtual environment.
#
#   docker/install.sh PREFIX [EXTRAS [PIP_OPTION...]]          # EXTRAS: all, or several, as in all,aws
#
# `make demo` and the images come by this one way. PYTHON is the interpreter to use; TORCH_INDEX, an index to take torch
# from instead of PyPI (https://download.pytorch.org/whl/cpu has builds without CUDA, of a tenth of the size). LEAN=gpu
# leaves out the packages' own tests, LEAN=cpu also what only a compiler reads: 0.3 GB, as the images do.
set -eu

prefix=$1
extras=${2:-all}
if [ $# -gt 1 ]; then shift 2; else shift; fi
python=${PYTHON:-python3}
case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac # where the caller is, and not in the repository
cd "$(dirname "$0")/.."

if [ ! -x "$prefix/bin/python" ]; then
  "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || {
    echo "raytune_fsdp needs Python 3.11 or 3.12; name one in PYTHON, as in PYTHON=python3.12" >&2
    exit 2
  }
  "$python" -m venv "$prefix"
fi

pip() {
  "$prefix/bin/pip" install --quiet --disable-pip-version-check --constraint requirements.lock "$@"
}

# torch first and alone: nothing else may choose its version.
pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
pip "$@" ".[$extras]"

if [ -n "${LEAN:-}" ]; then
  find "$prefix"/lib/python3*/site-packages -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
fi
if [ "${LEAN:-}" = cpu ]; then
  rm -rf "$prefix"/lib/python3*/site-packages/torch/include "$prefix"/lib/python3*/site-packages/pyarrow/include
  find "$prefix"/lib/python3*/site-packages -type f \( -name '*.h' -o -name '*.pxd' -o -name '*.pyx' \) -delete
fi
