# shellcheck shell=bash
# source tools/env.sh: the virtual environment, and what the launchers need on one machine.
# The README's commands and the Makefile run in it; tools/README.md says what each variable is for.
# A value that is already set stays.

VIRTUAL_ENV=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)/.venv
export VIRTUAL_ENV
case :$PATH: in
    *":$VIRTUAL_ENV/bin:"*) ;;
    *) export PATH="$VIRTUAL_ENV/bin:$PATH" ;;
esac
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$VIRTUAL_ENV/torch_extensions}"
export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
if ! [ -e /dev/nvidiactl ]; then
    export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
fi
