#!/usr/bin/env bash
# mpirun: messages by MPI, point to point. Several machines: --hostfile FILE with "host slots=N" lines
# (Open MPI; MPICH and Intel MPI: -f FILE with "host:N" lines).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/env.sh
exec mpirun -n "${WORKERS:-4}" python -m benchmarks.train --method dppf "$@"
