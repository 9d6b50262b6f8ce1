#!/usr/bin/env bash
# Gather evidence on a bare GPU machine: there.sh SECONDS [options of benchmarks.gpu.evidence]. What comes back is in
# $OUT. Wheels, and the evidence of an earlier call, are in .device (or $CARRIED). Without the latter, what a call on this
# machine has left in the last ten minutes is continued.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
limit=$1 carried=${CARRIED:-.device} out=${OUT:-.device/out}
site=${TMPDIR:-/tmp}/raytune-fsdp-evidence # the second command finds there what the first one has compiled
shift
mkdir -p "$out" "$site"
if compgen -G "$carried/*.whl" > /dev/null; then
  # Beside what is there, not over it.
  python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target "$site" "$carried"/*.whl || exit
fi
export PYTHONPATH=$site:$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCHINDUCTOR_CACHE_DIR=$site/inductor TRITON_CACHE_DIR=$site/triton
earlier=$(find "$carried/evidence.json" 2> /dev/null || find "$site/evidence.json" -mmin -10 2> /dev/null)
[[ -z $earlier ]] || cp "$earlier" "$out/"
nvidia-smi > "$out/nvidia-smi.txt" 2>&1
# The shell's clock began when this script did. What does not end by itself is interrupted, and leaves what it has.
left=$((limit - SECONDS))
timeout --signal INT --kill-after 3 "$left" python3 -m benchmarks.gpu.evidence \
  --out "$out" --seconds $((left - 2)) --continue "$out/evidence.json" "$@" 2>&1 | tee -a "$out/log.txt"
code=$?
[[ ! -e $out/evidence.json ]] || cp "$out/evidence.json" "$site/"
exit "$code"
