#!/usr/bin/env bash
# horovodrun: messages by Horovod's collectives. --gloo or --mpi; several machines: more lines in hostfile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/env.sh
exec horovodrun "${CONTROLLER:---gloo}" -np "${WORKERS:-4}" -hostfile integrations/launch/hostfile \
    python -m benchmarks.train --engine horovod --method dppf "$@"
