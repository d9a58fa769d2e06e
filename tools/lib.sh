# shellcheck shell=bash
# What the installers share; sourced from the repository's root.

VENV=$PWD/.venv
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf 'consensus-opt: %s\n' "$*" >&2; }

# The version that constraints.txt pins, as pip wants it: pin torch -> torch==2.13.0
pin() { grep -m1 "^$1==" constraints.txt; }

installed() { dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }

# Install the Debian packages that are absent, or say how a person can.
debian_install() {
    local package missing=()
    for package in "$@"; do installed "$package" || missing+=("$package"); done
    if ((${#missing[@]} == 0)); then return 0; fi
    if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
        say "missing: ${missing[*]} (on Debian and Ubuntu: sudo apt-get install ${missing[*]})"
        return 1
    fi
    say "installing ${missing[*]}"
    apt-get update -qq </dev/null &&
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends -o Dpkg::Use-Pty=0 \
            "${missing[@]}" </dev/null >/dev/null
}

# need COMMAND PACKAGE...: nothing to do where the command exists, from whatever source.
need() { command -v "$1" >/dev/null || debian_install "${@:2}"; }

# The versions that are tested; on a Python older than theirs, whatever pip finds.
pip_install() {
    local pins=(-c constraints.txt)
    "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || pins=()
    "$VENV/bin/pip" install -qq "${pins[@]}" "$@"
}
