#!/bin/bash
# A run in a Slurm allocation: a Ray cluster on its nodes, one process a node, then the run, then nothing is left.
#
#   sbatch cluster/slurm.sh --config llama2-70b-full-16xa100 --data.train.0.path /shared/data/train.jsonl \
#     --data.eval.0.path /shared/data/eval.jsonl --run.name llama2-70b --run.storage /shared/runs \
#     --cluster.device cuda --model.attention auto
#
# Everything after the file's name goes to the run. Forty minutes before its time is up the job asks the run to stop; the
# run commits a checkpoint, and the job queues again and goes on from there. `scancel` ends it for good. So --time must be
# longer than those forty minutes: a job that would stop in its first ten minutes is not queued again.
#
# Edit what is marked EDIT. Not run under Slurm by us: tests/cluster runs it with real Ray and an srun of our own.

#SBATCH --job-name=raytune-fsdp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@2400
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# EDIT: #SBATCH --partition, --account

set -euo pipefail

# EDIT, here and in --signal above: the save that is being written, and then the last one. For 828 GB at 1.2 GB/s that is
# 1400 s; `raytune-fsdp plan --storage SPEED` says it of yours. The run warns if its saves take longer.
export RAYTUNE_FSDP_STOP_SECONDS=2400
# EDIT: where models from the hub go, on storage that all nodes share. Its token comes from your environment, or from the
# file that `hf auth login` writes.
export HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}"
HF_TOKEN="${HF_TOKEN:-$(cat "$HOME/.cache/huggingface/token" 2> /dev/null || true)}"
export HF_TOKEN

# EDIT: the environment that has raytune-fsdp, in the same place on all nodes.
# shellcheck disable=SC1091
. "${VENV:-$HOME/raytune-fsdp-env}/bin/activate"

# EDIT: the network between the nodes; docs/start/slurm.md has the settings for EFA and InfiniBand.
# export NCCL_SOCKET_IFNAME=ib0

port=${RAY_PORT:-6379}
# One token for this job: nobody else on these machines can talk to its Ray. srun hands the environment on.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]} # this script runs there, too
# exec, so that in the background $! is srun's, and it gets the signal. Only for subshells. Since Slurm 22.05 srun does not
# take sbatch's CPUs for a task by itself: where tasks are bound, Ray and all ranks would share one core.
on() { exec srun --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --overlap --nodelist="$1" "${@:2}"; }
address=$(on "$head" hostname -I | cut -d ' ' -f 1)

again='' run=''
# As early as this: a signal that nothing awaits ends the job, and does not queue it again.
trap 'again=$SECONDS; [[ -z $run ]] || kill -TERM "$run"' USR1

started=()
# shellcheck disable=SC2329  # by the trap
end() {
  # srun hands the signal to `ray start --block`, which ends what it has started.
  for each in "${started[@]}"; do kill -TERM "$each" 2> /dev/null || true; done
  for each in "${started[@]}"; do wait "$each" || true; done
}
trap end EXIT

ray_on() {
  on "$1" ray start --block --num-gpus "${SLURM_GPUS_ON_NODE:-0}" --num-cpus "$SLURM_CPUS_ON_NODE" \
    --disable-usage-stats "${@:2}" &
  started+=($!)
}
ray_on "$head" --head --node-ip-address "$address" --port "$port" --include-dashboard false
for _ in {1..90}; do
  ray status --address "$address:$port" > /dev/null 2>&1 && break
  sleep 2
done
for node in "${nodes[@]:1}"; do ray_on "$node" --address "$address:$port"; done
# A run that finds fewer GPUs than it is to have does not wait for more.
for _ in {1..90}; do
  [[ $(ray status --address "$address:$port" 2> /dev/null | grep -c "1 node_") -ge ${#nodes[@]} ]] && break
  sleep 2
done

# Whether the job was to stop so early that another one would not come far, either.
too_short() { [[ -n $again ]] && ((again < ${RAYTUNE_FSDP_LEAST_SECONDS:-600})); }
give_up() {
  echo "the job was to stop after $again s, so it is not queued again: raise --time, or lower --signal" >&2
  exit 1
}
if too_short; then give_up; fi

export RAY_ADDRESS="$address:$port"
raytune-fsdp train --cluster.workers "$((${#nodes[@]} * ${SLURM_GPUS_ON_NODE:-1}))" "$@" &
run=$!
trap 'kill -TERM "$run"' TERM
# `wait` ends early, with 138 or 143, when one of these signals comes; a run never ends with these.
code=138
while [[ $code == 138 || $code == 143 ]]; do
  code=0
  wait "$run" || code=$?
done
if [[ -n $again && $code == 130 ]]; then
  if too_short; then give_up; fi
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
