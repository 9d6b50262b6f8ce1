#!/bin/bash
# Submits a run to a cluster of `ray up`, and submits it again when its driver or the whole head is lost, as KubeRay's
# backoffLimit does on Kubernetes. The run goes on where it has committed last, because its name is the same.
#
#   export RAY_AUTH_MODE=token
#   cluster/again.sh cluster/aws-p4d-a100.yaml python jobs/finetune.py --config llama2-70b-full-16xa100 \
#     --run.name llama2-70b --run.storage /fsx/runs ...
#
# It runs where `ray up` has run, on a machine that stays (in tmux), and shows what the run prints. `-` in the place of
# the file: a cluster that it cannot make, at RAY_API_SERVER_ADDRESS; there each try waits two minutes for a head that is
# lost. Ctrl-C ends this script, not the run; `ray job stop` ends both. TRIES: how often it submits the run, or looks for
# the head, at most; PAUSE: seconds between two tries.
#
# Its exit code is the run's: 0 done; 2, 3 and 4, of which another try would end the same; 130 stopped; 1 when TRIES are
# used up. 2 as well where this shell lacks Ray's token or a Python with Ray. tests/cluster runs it with a stand-in for
# `ray`, tests/ray with a real one; not run on a cloud by us.
set -u

cluster=$1
shift
tries=${TRIES:-6}
pause=${PAUSE:-60}
export RAY_API_SERVER_ADDRESS="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}"
tunnel=
trap drop EXIT
trap 'exit 130' INT TERM

say() { echo "again.sh: $*" >&2; }

drop() { # the way to the head's port 8265. `ray dashboard` leaves its ssh, which would keep the port here
  [ -z "$tunnel" ] || { kill -- "-$tunnel" && wait "$tunnel"; } 2> /dev/null
  tunnel=
}

dig() { # a new way, if there is none: the port may be free only a while after the old one has ended
  [ -z "$tunnel" ] || ! kill -0 "$tunnel" 2> /dev/null || return
  drop
  set -m # a process group of its own
  ray dashboard "$cluster" < /dev/null > /dev/null 2>&1 &
  tunnel=$!
  set +m
}

asked() { # does the head answer?
  said=$(ray job list 2>&1 > /dev/null) && return
  case $said in
    *"Token authentication is enabled but"*)
      say "this shell has no token, or not that of $RAY_API_SERVER_ADDRESS: export RAY_AUTH_MODE=token, with the head's" \
        "token in ~/.ray/auth_token, and see that no other program has this port"
      exit 2 ;;
  esac
  return 1
}

answers() { # is the head there? Asked for two minutes: a Ray has to start
  for _ in 1 2 3 4 5 6 7 8 9 10 11 12; do
    [ "$cluster" = - ] || dig
    asked && return
    sleep "$((pause / 6))"
  done
  say "no answer from $RAY_API_SERVER_ADDRESS: $(echo "$said" | tail -n 1)"
  return 1
}

reach() { # the head, made if it is gone
  asked && return
  if [ "$cluster" = - ]; then
    answers
    return
  fi
  ray up --yes --no-restart "$cluster" || return
  drop
  answers && return
  # A restart ends all jobs: only where the head itself says that there is no Ray. Not every head has `ray` in its PATH.
  # shellcheck disable=SC2016  # for the shell there
  case $(ray exec "$cluster" 'cat /proc/[0-9]*/cmdline 2> /dev/null | grep -qa "[g]cs_server"; echo "found: $?"' \
    < /dev/null 2> /dev/null) in
    *"found: 1"*) ray up --yes "$cluster" && drop && answers ;;
    *"found: 0"*)
      say "Ray runs on the head, so it is not started again: look at $RAY_API_SERVER_ADDRESS (ray dashboard $cluster)"
      return 1 ;;
    *)
      say "the head does not say whether its Ray runs (ray exec $cluster …), so it is not started again"
      return 1 ;;
  esac
}

state() { # of a job, with its exit code; "unknown" if the head knows no such job, "away" if it does not answer
  python -c '
import sys
from ray.job_submission import JobSubmissionClient
try:
    found = JobSubmissionClient(sys.argv[1]).get_job_info(sys.argv[2])
    print(found.status.value, found.driver_exit_code)
except RuntimeError as error:
    print("unknown" if "status code 404" in str(error) else "away")' \
    "$RAY_API_SERVER_ADDRESS" "$1" 2> /dev/null || echo away
}

follow() { # the run, submitted unless it goes on, until it has failed, is lost with its head, or is out of sight
  [ "$found" != away ] || found=$(state "$job")
  case $found in
    unknown | FAILED*)
      job=again-$(date +%s)-$$-$try
      ray job submit --submission-id "$job" --working-dir . -- "$@" ;;
  esac
  while :; do
    found=$(state "$job")
    case $found in
      SUCCEEDED*) exit 0 ;;
      STOPPED*) exit 130 ;;
      "FAILED 2" | "FAILED 3" | "FAILED 4" | "FAILED 130") exit "${found#* }" ;;
      FAILED* | unknown) return ;; # the driver has failed or was killed, or the head is another
      away)
        reach || return
        [ "$(state "$job")" != away ] || return ;;
      *) # only the connection was lost
        sleep "$((pause / 12))"
        ray job logs --follow "$job" ;;
    esac
  done
}

if ! python -c 'import ray.job_submission'; then
  say "the python of this shell has no Ray: activate the environment whose \`ray\` you call"
  exit 2
fi
try=0
found=unknown # the state of the last job
while [ "$try" -lt "$tries" ]; do
  [ "$try" = 0 ] || sleep "$pause"
  try=$((try + 1))
  reach && follow "$@"
  say "try $try of $tries has ended without the run being done ($found)"
done
[ "$found" != away ] || say "the run was lost sight of, and may go on: see \`ray job list\` for $job"
exit 1
