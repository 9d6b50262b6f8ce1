#!/bin/sh
# Submits a run to a cluster of `ray up`, and submits it again when its driver or the whole head is lost, as KubeRay's
# backoffLimit does on Kubernetes. The run goes on where it has committed last, because its name is the same.
#
#   export RAY_AUTH_MODE=token
#   cluster/again.sh cluster/aws-p4d-a100.yaml python jobs/finetune.py --config llama2-70b-full-16xa100 \
#     --run.name llama2-70b --run.storage /fsx/runs ...
#
# It runs where `ray up` has run, on a machine that stays (in tmux), and shows what the run prints. `-` in the place of
# the file: a cluster that it cannot make, at RAY_API_SERVER_ADDRESS; there each try waits two minutes for a head that is
# lost. Ctrl-C ends this script, not the run; `ray job stop` ends both. TRIES: how often it submits at most; PAUSE: seconds
# between two tries.
#
# Its exit code is the run's: 0 done; 2, 3 and 4, of which another try would end the same; 130 stopped; 1 when TRIES are
# used up. tests/cluster runs it with a stand-in for `ray`, tests/ray with a real one; not run on a cloud by us.
set -u

cluster=$1
shift
tries=${TRIES:-6}
pause=${PAUSE:-60}
export RAY_API_SERVER_ADDRESS="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}"
tunnel=
trap '[ -z "$tunnel" ] || kill "$tunnel" 2> /dev/null' EXIT
trap 'exit 130' INT TERM

answers() { # is the head there? Asked for two minutes: a Ray has to start
  for _ in 1 2 3 4 5 6 7 8 9 10 11 12; do
    ray job list > /dev/null 2>&1 && return
    sleep "$((pause / 6))"
  done
  return 1
}

dig() { # a new way to the head's port 8265
  [ -z "$tunnel" ] || kill "$tunnel" 2> /dev/null
  ray dashboard "$cluster" > /dev/null 2>&1 &
  tunnel=$!
}

reach() { # the head, made if it is gone. Its Ray is only started again where nothing answers: that ends all jobs
  ray job list > /dev/null 2>&1 && return
  if [ "$cluster" = - ]; then
    answers
    return
  fi
  ray up --yes --no-restart "$cluster" || return
  dig
  answers && return
  ray up --yes "$cluster" && dig && answers
}

state() { # of a job, with its exit code; "nothing" where nobody knows it
  python -c '
import sys
from ray.job_submission import JobSubmissionClient
found = JobSubmissionClient(sys.argv[1]).get_job_info(sys.argv[2])
print(found.status.value, found.driver_exit_code)' "$RAY_API_SERVER_ADDRESS" "$1" 2> /dev/null || echo nothing
}

try=0
while [ "$try" -lt "$tries" ]; do
  [ "$try" = 0 ] || sleep "$pause"
  try=$((try + 1))
  reach || continue
  job=again-$(date +%s)-$$-$try
  ray job submit --submission-id "$job" --working-dir . -- "$@"
  while :; do
    found=$(state "$job")
    case $found in
      SUCCEEDED*) exit 0 ;;
      STOPPED*) exit 130 ;;
      "FAILED 2" | "FAILED 3" | "FAILED 4" | "FAILED 130") exit "${found#* }" ;;
      FAILED*) break ;; # the driver has failed, or was killed
      nothing) # the head or the way to it is lost
        reach || break
        [ "$(state "$job")" != nothing ] || break ;;
      *) # only the connection was lost
        sleep "$((pause / 12))"
        ray job logs --follow "$job" ;;
    esac
  done
  echo "again.sh: try $try of $tries has ended without the run being done ($found)" >&2
done
exit 1
