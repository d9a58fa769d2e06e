#!/usr/bin/env bash
# torchrun: one process for each worker of this machine; further arguments go to the training.
# Several machines: the same command on each, with --nnodes=2 --rdzv-backend=c10d
# --rdzv-endpoint=FIRST_HOST:29500 --rdzv-id=job1 in place of --standalone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/env.sh
exec torchrun --standalone --nproc-per-node="${WORKERS:-4}" -m benchmarks.train --method dppf "$@"
