#!/usr/bin/env bash
# DeepSpeed's ZeRO stage 3 inside replicas of two ranks: "replica_size" in zero3.json. Without that key a replica is
# a machine, where there are several: --hostfile integrations/launch/hostfile with a line for each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/env.sh
exec deepspeed --num_accelerators "${WORKERS:-4}" --no_local_rank --master_port "${PORT:-29500}" \
    --module benchmarks.train --deepspeed-config integrations/launch/zero3.json "$@"
