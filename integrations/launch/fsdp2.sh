#!/usr/bin/env bash
# fully_shard inside replicas of two ranks. Several machines: the same command on each, with --nnodes=2
# --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 --rdzv-id=job1 in place of --standalone, and as many ranks in a
# replica as a machine has. --sharding node keeps whole models, and averages gradients inside a replica.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/env.sh
exec torchrun --standalone --nproc-per-node="${WORKERS:-4}" -m benchmarks.train --method dppf \
    --sharding fsdp2 --replica-size "${REPLICA:-2}" "$@"
