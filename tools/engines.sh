#!/usr/bin/env bash
# engines.sh [mpi] [horovod] [deepspeed]: the launchers beside torchrun, all of them by default.
# Installs what it can, names what it cannot, and fails if anything is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/lib.sh
source tools/env.sh

CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/consensus-opt

compiler() { need c++ g++ && need make make && python_headers; }

python_headers() {
    python - <<'END' || debian_install python3-dev
import sys, sysconfig
from pathlib import Path
sys.exit(not Path(sysconfig.get_path("include"), "Python.h").exists())
END
}

# Debian's openmpi-bin brings mpicxx without the headers.
mpi_headers() {
    mpicxx -E -x c++ - <<<'#include <mpi.h>' >/dev/null 2>&1 || debian_install libopenmpi-dev
}

install_mpi() {
    need mpirun openmpi-bin libopenmpi-dev && pip_install mpi4py &&
        python -c 'from mpi4py import MPI'
}

install_horovod() {
    command -v mpirun >/dev/null || { say "Horovod is built on MPI, which is missing"; return 1; }
    local wheels
    wheels=$(horovod_wheels) || return 1
    compgen -G "$wheels/*.whl" >/dev/null || build_horovod "$wheels" || return 1
    pip_install cffi cloudpickle packaging psutil pyyaml &&
        pip_install --no-deps --force-reinstall "$wheels"/*.whl || return 1
    if ! python -c 'import horovod.torch as hvd; assert hvd.mpi_built() and hvd.gloo_built()'; then
        say "Horovod does not load; remove $wheels to build it anew"
        return 1
    fi
}

# One folder for each combination that has to agree: Horovod, torch, Python, machine and MPI.
horovod_wheels() {
    local mpi
    mpi=$(mpirun --version | head -n1 | tr -cd '[:alnum:].') &&
        python - "$CACHE/$(pin horovod)" "${mpi#mpirun}" <<'END'
import platform, sys, torch
print(sys.argv[1], f"torch-{torch.__version__}", sys.implementation.cache_tag, platform.machine(), sys.argv[2], sep="-")
END
}

# Without pip's own cache, which does not know for which torch a wheel was built.
build_horovod() {
    compiler && need mpicxx libopenmpi-dev && mpi_headers &&
        pip_install setuptools wheel packaging psutil pyyaml cloudpickle cffi "cmake<4" || return 1
    say "building Horovod (some minutes)"
    local built log
    mkdir -p "$CACHE" && built=$(mktemp -d "$CACHE/build.XXXXXX") && log=$CACHE/horovod-build.log || return 1
    if ! CXX=$PWD/tools/cxx17 MAKEFLAGS=-j$(nproc) \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 \
        pip wheel -v --no-cache-dir --no-build-isolation --no-deps -w "$built" "$(pin horovod)" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        say "Horovod did not build; the whole log is $log"
        rm -rf "$built"
        return 1
    fi
    rm -rf "$1" && mv "$built" "$1"
}

install_deepspeed() {
    compiler && DS_BUILD_OPS=0 pip_install --no-build-isolation deepspeed ninja &&
        build_deepspeed_op && check_shared_memory
}

# A rank that gets none dies of a signal, without a word.
check_shared_memory() {
    local free
    free=$(df -Pm /dev/shm | awk 'NR == 2 { print $4 }')
    ((free >= 512)) || say "note: DeepSpeed takes 66 MB of /dev/shm a rank, and $free MB are free" \
        "(for a container: --shm-size=1g)"
}

# DeepSpeed compiles this op when it starts. A process killed meanwhile leaves a lock that every later
# process waits for, so it is compiled here, in one process, and locks found here are stale.
build_deepspeed_op() {
    say "building DeepSpeed's shared-memory op (about a minute, once)"
    mkdir -p "$TORCH_EXTENSIONS_DIR" && find "$TORCH_EXTENSIONS_DIR" -name lock -delete &&
        DS_ACCELERATOR=cpu python - >/dev/null <<'END'
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load()
END
}

(($#)) || set -- mpi horovod deepspeed
missing=()
for engine in "$@"; do
    say "installing $engine"
    "install_$engine" || missing+=("$engine")
done
if ((${#missing[@]})); then
    say "left out: ${missing[*]} (the lines above say why)"
    exit 1
fi
