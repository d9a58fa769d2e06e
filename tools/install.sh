#!/usr/bin/env bash
# install.sh EXTRA[,EXTRA...]: a virtual environment with torch, this package (editable) and its extras.
# torch comes first and exactly as pinned: a range lets pip take a CUDA build of several GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/lib.sh

python=${PYTHON:-python3}

usable() {
    "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

if ! [[ -x $VENV/bin/pip ]]; then
    usable || debian_install python3 python3-venv || true
    if ! usable; then
        say "$python is not Python 3.10 or newer with the venv module; install one, or set PYTHON=..."
        exit 1
    fi
    say "creating $VENV"
    "$python" -m venv "$VENV"
fi

say "installing the package with its extras: $1"
pip_install "$(pin torch)" numpy setuptools wheel
pip_install --no-build-isolation -e ".[$1]"
