#!/usr/bin/env bash
# Runs a command of a container, and turns Kubernetes' SIGTERM into what the job needs (docs/kubernetes.md).
#
#   run.sh node COMMAND ...         the supervisor of a node: SIGTERM drains the node
#   run.sh coordinator COMMAND ...  the coordinator: SIGTERM ends the job between two iterations, with exit code 143
#
# Kubernetes sends SIGTERM to a pod that it evicts. To a supervisor, SIGTERM would mean the end of the whole job.
set -uo pipefail

role=$1
shift
asked=0
"$@" &
child=$!
case $role in
node) trap 'asked=1; kill -USR1 "$child" 2>/dev/null' TERM ;;
coordinator) trap 'asked=1; kill -TERM "$child" 2>/dev/null' TERM ;;
*)
    echo "run.sh $role: needs node or coordinator" >&2
    exit 2
    ;;
esac

status=0
while :; do
    wait "$child" # a signal interrupts it
    status=$?
    kill -0 "$child" 2>/dev/null || break
done
if [ "$role" = coordinator ] && [ "$asked" = 1 ] && [ "$status" = 0 ]; then
    status=143 # The job has not reached its end: the JobSet has to start it again.
fi
exit "$status"
