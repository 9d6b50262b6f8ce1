#!/usr/bin/env bash
# Fetch what a bare GPU machine without a package index lacks (7 MB) into .device, where there is one. Git ignores that
# folder, so it has to be told to travel along.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p .device
for package in pydantic pydantic_core annotated-types typing-inspection typing_extensions torchao; do
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest .device \
    --python-version "${PYTHON_THERE:-3.12}" --implementation cp --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "$(grep -i "^$package==" requirements.lock)"
done
ls .device
