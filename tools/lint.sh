#!/usr/bin/env bash
# ruff on everything, mypy --strict on the package.
# mypy does not follow setuptools' package-dir, so it is shown the package as it is installed: a folder
# of links in which integrations/ lies inside consensus_opt/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/env.sh

ruff check .
ruff format --check .

tree=$VIRTUAL_ENV/typed
rm -rf "$tree" && mkdir -p "$tree/consensus_opt"
ln -s "$PWD"/consensus_opt/* "$tree/consensus_opt/"
ln -s "$PWD/integrations" "$tree/consensus_opt/integrations"
config=$PWD/pyproject.toml cache=$PWD/.mypy_cache
(cd "$tree" && mypy --config-file "$config" --cache-dir "$cache" -p consensus_opt) |
    sed 's|^consensus_opt/integrations/|integrations/|'
